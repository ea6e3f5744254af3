//! Sandbox of uploaded mods: no network, no files except those that Python itself needs, read only, no other processes,
//! no signals to other processes, and resource limits that the worker cannot raise.
//!
//! The server starts its own program as `thunder mod-worker PROFILE`. That process restricts itself irrevocably and
//! then executes Python. Landlock restricts files, seccomp restricts system calls. A sandbox needs a kernel with both.
//! If one is missing, [`SandboxLauncher::support`] returns the reason, and uploaded source is refused.
//!
//! If the server runs as root, a worker gives up all capabilities. It also gives up root's user id, unless the
//! interpreter is in a folder that only root can enter, such as a private home directory.
//!
//! The sandbox hides neither the existence and the size of files nor the time. It does not limit the CPU time within
//! the deadline of a call.

#[cfg(target_os = "linux")]
mod filter;
mod paths;
#[cfg(target_os = "linux")]
mod privileges;

use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

/// Hidden command of the program that calls [`enter`].
pub const COMMAND: &str = "mod-worker";

/// Maximum threads that the user of a worker may have besides those at its start. They include later ones of the server and
/// of other workers.
#[cfg(target_os = "linux")]
const MAX_NEW_THREADS: u64 = 1024;

/// First user id for workers of a server that runs as root; each process gets its own. No account has these ids, so no
/// files belong to them.
const FIRST_UID: u32 = 1_000_000_000;
/// User id of an account without rights, for systems that map only the usual ids.
const NOBODY: u32 = 65_534;

/// Returns true if a worker of this server may run as this user.
pub(super) fn is_worker_uid(uid: u32) -> bool {
    let own = geteuid();
    uid == own.as_raw() || (own.is_root() && (uid >= FIRST_UID || uid == NOBODY))
}

/// Selection of the mods that run in a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxPolicy {
    /// Uploaded mods; files are trusted.
    #[default]
    Uploaded,
    /// All Python mods, including files.
    All,
    /// No mods, not even uploaded ones.
    Off,
}

/// Launcher of workers in a sandbox.
#[derive(Debug, Clone)]
pub struct SandboxLauncher {
    program: PathBuf,
    support: Arc<OnceLock<Result<String, String>>>,
}

/// Sets the launcher of this process; only the first call sets it.
pub fn install(program: PathBuf) -> &'static SandboxLauncher {
    INSTALLED.get_or_init(|| SandboxLauncher::new(program))
}

/// Returns the launcher set by [`install`].
#[must_use]
pub fn installed() -> Option<&'static SandboxLauncher> {
    INSTALLED.get()
}

/// Returns `LD_LIBRARY_PATH`, which the libraries of a GPU driver or of Python may need.
pub(super) fn library_path() -> Option<(&'static str, OsString)> {
    const NAME: &str = "LD_LIBRARY_PATH";
    std::env::var_os(NAME).map(|path| (NAME, path))
}

static INSTALLED: OnceLock<SandboxLauncher> = OnceLock::new();

impl SandboxLauncher {
    /// Creates a launcher from a program that runs [`check`] or [`enter`] if its first argument is [`COMMAND`].
    #[must_use]
    pub fn new(program: PathBuf) -> Self {
        Self { program, support: Arc::default() }
    }

    /// Returns the mechanisms that the kernel supports. The first call tests them in a separate process.
    ///
    /// # Errors
    /// The missing feature.
    pub fn support(&self) -> Result<&str, &str> {
        let found = self.support.get_or_init(|| {
            let tried = Command::new(&self.program)
                .args([COMMAND, "--check"])
                .env_clear()
                .envs(library_path())
                .stdin(Stdio::null())
                .output()
                .map_err(|error| format!("{} cannot be started: {error}", self.program.display()))?;
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
            if tried.status.success() { Ok(text(&tried.stdout)) } else { Err(text(&tried.stderr)) }
        });
        found.as_ref().map(String::as_str).map_err(String::as_str)
    }

    /// Returns the command that runs Python with these arguments in a sandbox.
    pub(super) fn command(
        &self,
        python: &Path,
        worker_dir: &Path,
        limits: &super::WorkerLimits,
        arguments: Vec<String>,
    ) -> Command {
        let (mut read, execute) = paths::required_paths(python);
        read.push(worker_dir.join("sdk"));
        let profile = SandboxProfile {
            server: std::process::id(),
            worker_dir: worker_dir.to_owned(),
            python: python.to_owned(),
            arguments,
            read,
            execute,
            address_space_bytes: limits.address_space_bytes,
            open_files: limits.open_files,
        };
        let mut command = Command::new(&self.program);
        command.arg(COMMAND).arg(serde_json::to_string(&profile).unwrap_or_default());
        command
    }
}

/// Permissions of a worker.
#[derive(Debug, Serialize, Deserialize)]
struct SandboxProfile {
    /// Server process, which the worker must not outlive.
    server: u32,
    /// Directory of the worker, with the SDK.
    worker_dir: PathBuf,
    python: PathBuf,
    arguments: Vec<String>,
    /// Files and folders that may be read.
    read: Vec<PathBuf>,
    /// Files that may be executed.
    execute: Vec<PathBuf>,
    address_space_bytes: u64,
    open_files: u64,
}

/// Restricts this process like a worker. Returns the mechanisms used.
///
/// # Errors
/// The restriction that failed.
pub fn check() -> io::Result<String> {
    #[cfg(target_os = "linux")]
    {
        close_inherited()?;
        privileges::drop_capabilities()?;
    }
    restrict(&[], &[])
}

/// Turns this process into a worker in a sandbox. `profile` comes from [`SandboxLauncher`]. Returns only on error.
///
/// # Errors
/// The restriction that failed, or why Python cannot be started.
pub fn enter(profile: &str) -> io::Result<Infallible> {
    let profile: SandboxProfile = serde_json::from_str(profile)?;
    become_worker(&profile)
}

#[cfg(target_os = "linux")]
fn become_worker(profile: &SandboxProfile) -> io::Result<Infallible> {
    use nix::sys::prctl;
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use nix::sys::signal::Signal;
    use nix::unistd::getppid;
    use std::os::unix::process::CommandExt;

    close_inherited()?;
    start_session();
    // The directory of the worker is given to it.
    let needed = profile.read.iter().chain(&profile.execute).filter(|path| !path.starts_with(&profile.worker_dir));
    let needed: Vec<PathBuf> = needed.cloned().collect();
    privileges::drop_root(&profile.worker_dir, &needed)?;
    privileges::drop_capabilities()?;
    // A change of the user id resets the signal, so it is set afterwards.
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    if getppid().as_raw().cast_unsigned() != profile.server {
        return Err(io::Error::other("the server process has ended"));
    }
    let mut limits = vec![
        (Resource::RLIMIT_CORE, 0),
        // The sandbox opens no file for writing, so this limit only keeps the shared memory from growing.
        (Resource::RLIMIT_FSIZE, 0),
        (Resource::RLIMIT_MEMLOCK, 0),
        (Resource::RLIMIT_MSGQUEUE, 0),
        (Resource::RLIMIT_NOFILE, profile.open_files),
        // The server counts the threads too, but only at intervals. The kernel ignores this limit for root.
        (Resource::RLIMIT_NPROC, privileges::user_threads() + MAX_NEW_THREADS),
    ];
    if profile.address_space_bytes > 0 {
        // Kernel buffers of the worker's sockets count as its memory, up to half of it.
        let buffers = privileges::socket_buffers(profile.open_files).min(profile.address_space_bytes / 2);
        limits.push((Resource::RLIMIT_AS, profile.address_space_bytes - buffers));
        limits.push((Resource::RLIMIT_DATA, profile.address_space_bytes - buffers));
    }
    for (resource, max) in limits {
        let max = max.min(getrlimit(resource)?.1);
        setrlimit(resource, max, max)?;
    }
    restrict(&profile.read, &profile.execute)?;
    Err(Command::new(&profile.python).args(&profile.arguments).exec())
}

/// Closes all descriptors except input, output and error. A library of the server may have opened files that its child
/// processes inherit, and the sandbox hides them from Python's entry point.
#[cfg(target_os = "linux")]
fn close_inherited() -> io::Result<()> {
    let failed = |error: io::Error| io::Error::other(format!("the open descriptors cannot be listed: {error}"));
    let mut descriptors: Vec<i32> = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").map_err(failed)? {
        descriptors.extend(entry.map_err(failed)?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    // This process itself has opened only the list, which is closed now.
    for descriptor in descriptors.into_iter().filter(|&descriptor| descriptor > 2) {
        // Fails for the descriptor of the list.
        let _ = nix::unistd::close(descriptor);
    }
    Ok(())
}

/// Starts a session with a lower priority than that of the server. If the kernel groups processes by session, the priority of
/// a process counts only inside its session.
#[cfg(target_os = "linux")]
fn start_session() {
    const AUTOGROUP: &str = "/proc/self/autogroup";
    let servers = std::fs::read_to_string(AUTOGROUP).ok();
    let nice = servers.as_deref().and_then(|text| text.trim_end().rsplit_once("nice ")?.1.parse::<i32>().ok());
    // Fails only if a user starts the command in a shell, where the process already leads its group.
    if nix::unistd::setsid().is_ok()
        && let Some(nice) = nice
    {
        // The kernel may reject it if another worker has just started.
        let _ = std::fs::write(AUTOGROUP, (nice + super::limits::EXTRA_NICE).min(19).to_string());
    }
}

#[cfg(not(target_os = "linux"))]
fn become_worker(_: &SandboxProfile) -> io::Result<Infallible> {
    Err(unsupported())
}

#[cfg(not(target_os = "linux"))]
fn unsupported() -> io::Error {
    io::Error::other("the sandbox needs Linux")
}

#[cfg(not(target_os = "linux"))]
fn restrict(_: &[PathBuf], _: &[PathBuf]) -> io::Result<String> {
    Err(unsupported())
}

/// Permanently restricts this process. Returns the mechanisms used.
#[cfg(target_os = "linux")]
fn restrict(read: &[PathBuf], execute: &[PathBuf]) -> io::Result<String> {
    use landlock::{
        ABI, Access, AccessFs, AccessNet, LandlockStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
        Scope, path_beneath_rules,
    };

    let failed = |what: &str, error: &dyn std::fmt::Display| io::Error::other(format!("{what}: {error}"));
    let rules = || {
        let abi = ABI::V9;
        Ruleset::default()
            .handle_access(AccessFs::from_all(abi))?
            .handle_access(AccessNet::from_all(abi))?
            .scope(Scope::from_all(abi))?
            .create()?
            .add_rules(path_beneath_rules(read, AccessFs::ReadFile | AccessFs::ReadDir))?
            .add_rules(path_beneath_rules(execute, AccessFs::ReadFile | AccessFs::Execute))?
            .add_rules(path_beneath_rules(["/dev/null"], AccessFs::ReadFile | AccessFs::WriteFile))?
            .restrict_self()
    };
    let status = rules().map_err(|error| failed("Landlock cannot be used", &error))?;
    let landlock = match status.landlock {
        LandlockStatus::Available { effective_abi, .. } if status.ruleset != RulesetStatus::NotEnforced => {
            effective_abi
        }
        LandlockStatus::NotEnabled => return Err(io::Error::other("Landlock is disabled in this kernel")),
        _ => return Err(io::Error::other("this kernel has no Landlock, which needs Linux 5.13 or newer")),
    };
    if !status.no_new_privs {
        return Err(io::Error::other("no_new_privs cannot be set"));
    }
    filter::install().map_err(|error| failed("seccomp cannot be used", &error))?;
    Ok(format!("Landlock ABI {} and seccomp", landlock as i32))
}
