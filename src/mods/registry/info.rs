//! Information about mods for clients.

use super::{CallStats, ModDescription, RegisteredVersion};
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;

/// Reason why a source could not be registered; the previous version remains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct ModProblem {
    /// File, or name of the mod.
    pub file: String,
    /// Message, one line.
    pub message: String,
    /// Python traceback, if there is one.
    pub traceback: Option<String>,
    /// Time of the failed registration.
    pub at: DateTime<Utc>,
}

/// A mod as listed by the API.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ModInfo {
    /// Description of the mod.
    #[serde(flatten)]
    pub description: ModDescription,
    /// Current version.
    #[serde(flatten)]
    pub current: RegisteredVersion,
    /// True if runs can use the mod.
    pub enabled: bool,
    /// Earlier versions since the start of the server, oldest first.
    pub earlier: Vec<RegisteredVersion>,
    /// Statistics of the calls of this version since its registration.
    #[serde(flatten)]
    pub stats: CallStats,
    /// Reason why a newer source is not registered.
    pub problem: Option<ModProblem>,
}
