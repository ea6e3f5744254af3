//! What mods may use, and where they run.

use super::{ConfigError, Size};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// Mods.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Mods")]
pub struct ModFlags {
    /// Folder of Python mods, registered at start
    #[arg(long, env = "THUNDER_MODS_DIR", value_name = "DIR")]
    pub mods_dir: Option<PathBuf>,
    /// Which mods run without network, files and processes: those that clients upload, those from files as well, or none. Where
    /// the kernel has no sandbox, those that need one are refused
    #[arg(long, env = "THUNDER_MOD_SANDBOX", value_name = "uploaded|all|off", default_value = "uploaded")]
    pub mod_sandbox: ModSandbox,
    /// Workers of a Python mod that may serve runs at once, where the mod does not say it
    #[arg(long, env = "THUNDER_MOD_WORKERS", value_name = "N", default_value_t = 1)]
    pub mod_workers: u16,
    /// Milliseconds that a call of a Python mod may take
    #[arg(long, env = "THUNDER_MOD_TIMEOUT", value_name = "MS", default_value_t = 1000)]
    pub mod_timeout: u32,
    /// Address space of a worker, e.g. 4G, its libraries included
    #[arg(long, env = "THUNDER_MOD_MEMORY", value_name = "SIZE", default_value = "4G")]
    pub mod_memory: Size,
    /// Seconds after which a worker that no run needs is ended, 0 for never
    #[arg(long, env = "THUNDER_MOD_IDLE", value_name = "SECONDS", default_value_t = 600)]
    pub mod_idle: u32,
}

impl Default for ModFlags {
    fn default() -> Self {
        Self {
            mods_dir: None,
            mod_sandbox: ModSandbox::Uploaded,
            mod_workers: 1,
            mod_timeout: 1000,
            mod_memory: Size(4 << 30),
            mod_idle: 600,
        }
    }
}

/// Which mods run in a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum ModSandbox {
    /// Those that clients upload.
    #[default]
    Uploaded,
    /// Those from files as well.
    All,
    /// None.
    Off,
}

/// Mods.
#[derive(Debug, Clone)]
pub struct ModsConfig {
    /// Folder of Python mods.
    pub dir: Option<PathBuf>,
    /// Which mods run in a sandbox.
    pub sandbox: ModSandbox,
    /// Workers of a mod, at least 1.
    pub workers: usize,
    /// Time for one call.
    pub timeout: Duration,
    /// Address space of a worker.
    pub memory_bytes: u64,
    /// When a worker that no run needs is ended; zero for never.
    pub idle: Duration,
}

/// Python itself needs about half of it.
const LEAST_MEMORY: u64 = 64 << 20;

impl TryFrom<ModFlags> for ModsConfig {
    type Error = ConfigError;
    fn try_from(flags: ModFlags) -> Result<Self, ConfigError> {
        let range = |flag, range, value| Err(ConfigError::Range { flag, range, value });
        if let Some(path) = flags.mods_dir.as_ref().filter(|path| !path.is_dir()) {
            return Err(ConfigError::NoModsDir { path: path.display().to_string() });
        }
        if !(1..=64).contains(&flags.mod_workers) {
            return range("--mod-workers", "between 1 and 64", flags.mod_workers.into());
        }
        if flags.mod_timeout == 0 {
            return range("--mod-timeout", "at least 1 ms", 0);
        }
        let memory_bytes = flags.mod_memory.0 as u64;
        if memory_bytes < LEAST_MEMORY {
            return range("--mod-memory", "at least 64M", memory_bytes);
        }
        Ok(Self {
            dir: flags.mods_dir,
            sandbox: flags.mod_sandbox,
            workers: flags.mod_workers.into(),
            timeout: Duration::from_millis(flags.mod_timeout.into()),
            memory_bytes,
            idle: Duration::from_secs(flags.mod_idle.into()),
        })
    }
}
