//! Types of flag values that several groups of flags share.

use clap::ValueEnum;

/// The help of values whose names say what they do; the flag's help describes their effect.
const NO_HELP: Option<&str> = None;

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    /// On.
    #[value(help = NO_HELP, aliases = ["1", "true", "enabled"])]
    On,
    /// Off.
    #[value(help = NO_HELP, aliases = ["0", "false", "disabled"])]
    Off,
}

/// On, off, or chosen automatically.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum OnOffAuto {
    /// Chosen automatically.
    #[default]
    #[value(help = NO_HELP)]
    Auto,
    /// On.
    #[value(help = NO_HELP, aliases = ["1", "true", "enabled"])]
    On,
    /// Off.
    #[value(help = NO_HELP, aliases = ["0", "false", "disabled"])]
    Off,
}

impl OnOffAuto {
    /// Returns the setting; `None` if it is chosen automatically.
    #[must_use]
    pub fn as_bool(self) -> Option<bool> {
        match self {
            Self::Auto => None,
            Self::On => Some(true),
            Self::Off => Some(false),
        }
    }
}

/// Text that must not appear in logs, without surrounding whitespace, such as the newline at the end of a file.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub(super) String);

impl std::str::FromStr for Secret {
    type Err = std::convert::Infallible;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.trim().to_owned()))
    }
}

impl Secret {
    /// Returns the text.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(secret)")
    }
}

/// A number of bytes, written as `4096`, `512K`, `256M` or `2G`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub usize);

impl std::str::FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || format!("'{text}' is not a size; expected e.g. 4096, 512K, 256M or 2G");
        let (digits, shift) = match text.as_bytes().last() {
            Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
            Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
            Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
            _ => (text, 0),
        };
        let count: usize = digits.parse().map_err(|_| invalid())?;
        count.checked_mul(1 << shift).filter(|&bytes| bytes > 0).map(Self).ok_or_else(invalid)
    }
}
