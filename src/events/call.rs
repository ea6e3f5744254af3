use super::EventType;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// One invocation of a mod.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ModCall {
    /// The event that caused it.
    pub event_sequence_order: i32,
    /// The mod.
    pub mod_name: String,
    /// The event's type.
    pub event_type: EventType,
    /// The event's step.
    pub step: i32,
    /// When the mod was called.
    pub created_at: Option<DateTime<Utc>>,
    /// How long it took, in milliseconds.
    pub execution_time_ms: Option<f64>,
    /// Whether it raised, overran its deadline or answered with an action that its event does not permit.
    pub exception_occurred: bool,
    /// What it raised, in one line.
    pub exception_message: Option<String>,
    /// Where it raised.
    pub exception_traceback: Option<String>,
}

/// A line that a mod printed or logged.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ModLog {
    /// Index of the mod call that wrote it.
    pub mod_call_sequence: i32,
    /// The mod.
    pub mod_name: String,
    /// The line.
    pub log_message: String,
    /// Its level.
    pub log_level: LogLevel,
    /// When it was written.
    pub created_at: Option<DateTime<Utc>>,
}

/// Level of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum LogLevel {
    /// For the author of the mod.
    Debug,
    /// The default, and the level of what a mod prints.
    #[default]
    Info,
    /// Something looks wrong.
    Warning,
    /// Something is wrong.
    Error,
}

impl LogLevel {
    /// The name as it stands on the wire and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Debug => "DEBUG",
            Self::Info => "INFO",
            Self::Warning => "WARNING",
            Self::Error => "ERROR",
        }
    }

    /// The level of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Debug, Self::Info, Self::Warning, Self::Error].into_iter().find(|level| level.as_str() == name)
    }
}
