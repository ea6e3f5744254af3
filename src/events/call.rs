use super::EventType;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One call of a mod.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ModCall {
    /// `sequence_order` of the event that caused the call.
    pub event_sequence_order: i32,
    /// Name of the mod.
    pub mod_name: String,
    /// Type of the event.
    pub event_type: EventType,
    /// Step of the event.
    pub step: i32,
    /// Time of the call.
    pub created_at: Option<DateTime<Utc>>,
    /// Duration in milliseconds.
    pub execution_time_ms: Option<f64>,
    /// True if the call failed: with an exception, at its deadline, or with an action that is not permitted.
    pub exception_occurred: bool,
    /// The exception in one line.
    pub exception_message: Option<String>,
    /// Traceback of the exception.
    pub exception_traceback: Option<String>,
}

/// A line that a mod printed or logged.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ModLog {
    /// Index of the mod call that wrote it.
    pub mod_call_sequence: i32,
    /// Name of the mod.
    pub mod_name: String,
    /// The text of the line.
    pub log_message: String,
    /// Level of the line.
    pub log_level: LogLevel,
    /// Time at which the line was written.
    pub created_at: Option<DateTime<Utc>>,
}

/// Level of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum LogLevel {
    /// Details for the author of the mod.
    Debug,
    /// The default level; output of `print` has it.
    #[default]
    Info,
    /// A possible problem.
    Warning,
    /// A problem.
    Error,
}

impl LogLevel {
    /// Returns the name used in JSON and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Debug => "DEBUG",
            Self::Info => "INFO",
            Self::Warning => "WARNING",
            Self::Error => "ERROR",
        }
    }

    /// Returns the level with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Debug, Self::Info, Self::Warning, Self::Error].into_iter().find(|level| level.as_str() == name)
    }
}
