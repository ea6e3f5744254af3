//! Settings of the log, with llama-server's flags.

use super::flag_values::OnOffAuto;
use clap::Args;
use std::path::PathBuf;

/// Log settings, with llama-server's flags.
#[derive(Debug, Clone, Args)]
pub struct LogFlags {
    /// File to which the log is appended; default: standard error
    #[arg(long, env = "THUNDER_LOG_FILE", value_name = "FILE", help_heading = "Logging")]
    pub log_file: Option<PathBuf>,
    /// Colored lines; default: if standard error is a terminal.
    #[arg(long, hide = true, value_name = "on|off|auto", num_args = 0..=1, default_missing_value = "on")]
    pub log_colors: Option<OnOffAuto>,
    /// Disables logging.
    #[arg(long, hide = true)]
    log_disable: bool,
    /// Logs everything, and adds `__verbose` to responses.
    #[arg(short, long, alias = "log-verbose", hide = true)]
    verbose: bool,
    /// 0 and 1 for errors, 2 for warnings, 3 for the default, 4 for more, 5 for everything.
    #[arg(long, alias = "log-verbosity", hide = true, value_name = "N", allow_negative_numbers = true)]
    verbosity: Option<i32>,
}

impl LogFlags {
    /// Returns true if responses have `__verbose` by default.
    pub(super) const fn shows_verbose(&self) -> bool {
        self.verbose
    }

    /// Returns the log filter that the flags select.
    #[must_use]
    pub fn log_filter(&self) -> Option<&'static str> {
        match (self.log_disable, self.verbose, self.verbosity) {
            (true, _, _) => Some("off"),
            (_, true, _) | (_, _, Some(5..)) => Some("debug"),
            (_, _, Some(4)) => Some("info"),
            (_, _, Some(2)) => Some("warn"),
            (_, _, Some(..=1)) => Some("error"),
            (_, _, Some(3) | None) => None,
        }
    }
}
