//! Resources and sandbox of mods.

use super::{ConfigError, Size};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// Flags for mods.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Mods")]
pub struct ModFlags {
    /// Folder of Python mods, registered at start and after each change
    #[arg(long, env = "THUNDER_MODS_DIR", value_name = "DIR")]
    pub mods_dir: Option<PathBuf>,
    /// Mods that run in a sandbox without access to the network, other processes, and files except Python's own: uploaded
    /// ones, all, or none (off); without sandbox support in the kernel, mods that need one are rejected
    #[arg(long, env = "THUNDER_MOD_SANDBOX", value_name = "uploaded|all|off", default_value = "uploaded")]
    pub mod_sandbox: ModSandbox,
    /// Default maximum number of workers per Python mod, which serve runs in parallel
    #[arg(long, env = "THUNDER_MOD_WORKERS", value_name = "N", default_value_t = 1)]
    pub mod_workers: u16,
    /// Time limit of a call of a Python mod in milliseconds
    #[arg(long, env = "THUNDER_MOD_TIMEOUT", value_name = "MS", default_value_t = 1000)]
    pub mod_timeout: u32,
    /// Maximum address space of a worker including its libraries, e.g. 4G
    #[arg(long, env = "THUNDER_MOD_MEMORY", value_name = "SIZE", default_value = "4G")]
    pub mod_memory: Size,
    /// Seconds without a run after which a worker exits; 0 for never
    #[arg(long, env = "THUNDER_MOD_IDLE", value_name = "SECONDS", default_value_t = 600)]
    pub mod_idle: u32,
}

/// Mods that run in a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum ModSandbox {
    /// Uploaded mods.
    #[default]
    Uploaded,
    /// Uploaded mods and mods from files.
    All,
    /// No mods.
    Off,
}

/// Resources and sandbox of mods.
#[derive(Debug, Clone)]
pub struct ModsConfig {
    /// Folder of Python mods.
    pub dir: Option<PathBuf>,
    /// Mods that run in a sandbox.
    pub sandbox: ModSandbox,
    /// Workers per mod, 1 or more.
    pub workers: usize,
    /// Time limit of one call.
    pub timeout: Duration,
    /// Maximum address space of a worker.
    pub memory_bytes: u64,
    /// Time without a run after which a worker exits; zero for never.
    pub idle: Duration,
}

/// Minimum address space of a worker; Python itself needs about half of it.
const MIN_MEMORY_BYTES: u64 = 64 << 20;

impl ModFlags {
    /// Validates the flags.
    ///
    /// # Errors
    /// [`ConfigError`] names the invalid flag.
    pub fn config(self) -> Result<ModsConfig, ConfigError> {
        let range = |flag, range, value| Err(ConfigError::Range { flag, range, value });
        if let Some(path) = self.mods_dir.as_ref().filter(|path| !path.is_dir()) {
            return Err(ConfigError::NoModsDir { path: path.display().to_string() });
        }
        if !(1..=64).contains(&self.mod_workers) {
            return range("--mod-workers", "between 1 and 64", self.mod_workers.into());
        }
        if self.mod_timeout == 0 {
            return range("--mod-timeout", "at least 1 ms", 0);
        }
        let memory_bytes = self.mod_memory.0 as u64;
        if memory_bytes < MIN_MEMORY_BYTES {
            return range("--mod-memory", "at least 64M", memory_bytes);
        }
        Ok(ModsConfig {
            dir: self.mods_dir,
            sandbox: self.mod_sandbox,
            workers: self.mod_workers.into(),
            timeout: Duration::from_millis(self.mod_timeout.into()),
            memory_bytes,
            idle: Duration::from_secs(self.mod_idle.into()),
        })
    }
}
