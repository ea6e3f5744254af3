use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Origin of a mod's code, which determines its rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModOrigin {
    /// Part of Thunder, in Rust.
    Builtin,
    /// A file of the user, named on the command line or in the folder of mods.
    #[default]
    File,
    /// Sent by a client; runs in a sandbox.
    Uploaded,
}

impl ModOrigin {
    /// Returns true if the code may run with the rights of the server's user.
    #[must_use]
    pub const fn is_trusted(self) -> bool {
        !matches!(self, Self::Uploaded)
    }

    /// Returns the name used in the API and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Builtin => "builtin",
            Self::File => "file",
            Self::Uploaded => "uploaded",
        }
    }

    /// Returns the origin of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Builtin, Self::File, Self::Uploaded].into_iter().find(|origin| origin.as_str() == name)
    }
}

/// One version of a mod: its hash, and the origin and time of its registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegisteredVersion {
    /// SHA-256 in hexadecimal, of the source and of the module and entrypoint that an upload names; the release for a
    /// built-in mod.
    pub hash: String,
    /// Origin of the code.
    pub origin: ModOrigin,
    /// Time of registration; `None` for mods that are part of the program.
    pub registered_at: Option<DateTime<Utc>>,
    /// Label of the key that sent it, or name of the file.
    pub registered_by: Option<String>,
}
