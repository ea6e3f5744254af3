//! Routes of llama-server that can be switched on and off.

use super::ConfigError;
use super::flag_values::OnOff;
use clap::Args;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Routes of llama-server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "llama-server's routes")]
pub struct RouteFlags {
    /// GET /slots with the state of every slot, the actions on slots in memory, and /sessions [also: --no-slots]
    #[arg(long, env = "THUNDER_SLOTS", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    pub slots: OnOff,
    /// GET /metrics with counters and histograms for Prometheus; default: on if the server listens on loopback addresses only
    #[arg(long, env = "THUNDER_METRICS", value_name = "on|off", default_missing_value = "on", num_args = 0..=1,
          require_equals = true)]
    pub metrics: Option<OnOff>,
    /// POST /props, for compatibility; it changes nothing
    #[arg(long, env = "THUNDER_PROPS", value_parser = clap::builder::FalseyValueParser::new())]
    pub props: bool,
    /// Folder for saving and restoring slot and session snapshots
    #[arg(long, env = "THUNDER_SLOT_SAVE_PATH", value_name = "DIR")]
    pub slot_save_path: Option<PathBuf>,
}

/// Routes of llama-server and their settings.
#[derive(Debug, Clone)]
pub struct RouteConfig {
    /// True if `GET /slots` is served.
    pub slots: bool,
    /// True if `GET /metrics` is served.
    pub metrics: bool,
    /// True if `POST /props` is served.
    pub props: bool,
    /// Folder for slot and session snapshots.
    pub slot_save_path: Option<PathBuf>,
}

impl RouteFlags {
    /// Validates the flags.
    pub(super) fn config(&self, listen: &[SocketAddr]) -> Result<RouteConfig, ConfigError> {
        if let Some(path) = self.slot_save_path.as_ref().filter(|path| !path.is_dir()) {
            return Err(ConfigError::NoFolder { flag: "--slot-save-path", path: path.display().to_string() });
        }
        Ok(RouteConfig {
            slots: self.slots == OnOff::On,
            metrics: self.metrics.map_or_else(
                || listen.iter().all(|address| address.ip().is_loopback()),
                |metrics| metrics == OnOff::On,
            ),
            props: self.props,
            slot_save_path: self.slot_save_path.clone(),
        })
    }
}
