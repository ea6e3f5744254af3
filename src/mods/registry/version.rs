use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// Whose code a mod is; decides how it is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModOrigin {
    /// Ours, in Rust, within the server.
    Builtin,
    /// The user's own: a file named on the command line, or one of the folder of mods.
    #[default]
    File,
    /// Sent by a client: somebody else's code, which runs in a sandbox.
    Uploaded,
}

impl ModOrigin {
    /// Whether its code may do what the server's user may do.
    #[must_use]
    pub const fn is_trusted(self) -> bool {
        !matches!(self, Self::Uploaded)
    }

    /// The name as it stands on the wire and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Builtin => "builtin",
            Self::File => "file",
            Self::Uploaded => "uploaded",
        }
    }

    /// The origin of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Builtin, Self::File, Self::Uploaded].into_iter().find(|origin| origin.as_str() == name)
    }
}

/// One version of a mod: what was registered under its name, by whom and when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisteredVersion {
    /// SHA-256 of the source in hexadecimal; the release for a built-in mod. The first 12 digits are what runs record.
    pub hash: String,
    /// Whose code it is.
    pub origin: ModOrigin,
    /// When it was registered; `None` for what comes with the program.
    pub registered_at: Option<DateTime<Utc>>,
    /// Who sent it: the label of a key, or the name of the file.
    pub registered_by: Option<String>,
}
