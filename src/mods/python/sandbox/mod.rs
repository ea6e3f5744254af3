//! What keeps source that somebody uploaded from the machine: no network, no files but those that Python itself needs,
//! read only, no other processes, no signals to others, bounds that it cannot lift.
//!
//! The server does not start Python but itself, as `thunder mod-worker PROFILE`; that process restricts itself, which
//! nothing can take back, and then becomes Python. Landlock keeps it from files, seccomp from system calls. A kernel
//! that has not both has no sandbox: [`SandboxLauncher::support`] says why, and uploaded source is refused.
//!
//! The worker of a server that runs as root gives up all capabilities, and root's user id where an account without rights
//! can reach the interpreter: not where it is in a folder of root's alone, such as a private home.
//!
//! Not kept from it: whether a file exists and how large it is, the time, and the processor, of which a call has as
//! much as its deadline lets it have.

#[cfg(target_os = "linux")]
mod account;
#[cfg(target_os = "linux")]
mod filter;
mod paths;

use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

/// The hidden command of the program that [`enter`]s a sandbox.
pub const COMMAND: &str = "mod-worker";

/// Which mods run in the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxPolicy {
    /// Those whose source was uploaded; files are the user's own.
    #[default]
    Uploaded,
    /// Those from files as well.
    All,
    /// None, also where somebody uploads source.
    Off,
}

/// The program that becomes a worker in a sandbox.
#[derive(Debug, Clone)]
pub struct SandboxLauncher {
    program: PathBuf,
    support: Arc<OnceLock<Result<String, String>>>,
}

/// The launcher of this process, when its program is one; the first call says which.
pub fn install(program: PathBuf) -> &'static SandboxLauncher {
    INSTALLED.get_or_init(|| SandboxLauncher::new(program))
}

/// The launcher that was [`install`]ed.
#[must_use]
pub fn installed() -> Option<&'static SandboxLauncher> {
    INSTALLED.get()
}

/// Where the system's loader finds libraries beside its own folders: those of a GPU's driver, which this program may need to
/// start again, or of a Python.
pub(super) fn library_path() -> Option<(&'static str, OsString)> {
    const NAME: &str = "LD_LIBRARY_PATH";
    std::env::var_os(NAME).map(|path| (NAME, path))
}

static INSTALLED: OnceLock<SandboxLauncher> = OnceLock::new();

impl SandboxLauncher {
    /// `program` runs [`check`] or [`enter`] when its first argument is [`COMMAND`].
    #[must_use]
    pub fn new(program: PathBuf) -> Self {
        Self { program, support: Arc::default() }
    }

    /// What the kernel keeps workers in, or why it cannot. The first call tries it, in a process of its own.
    ///
    /// # Errors
    /// What is missing.
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

    /// The command that runs Python with these arguments in a sandbox.
    pub(super) fn command(
        &self,
        python: &Path,
        home: &Path,
        limits: &super::WorkerLimits,
        arguments: Vec<String>,
    ) -> Command {
        let (mut read, execute) = paths::needed(python);
        read.push(home.join("sdk"));
        let profile = Profile {
            server: std::process::id(),
            home: home.to_owned(),
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

/// What a worker may have.
#[derive(Debug, Serialize, Deserialize)]
struct Profile {
    /// Process that it must not outlive.
    server: u32,
    /// ModFolder of the worker's own, with the SDK in it.
    home: PathBuf,
    python: PathBuf,
    arguments: Vec<String>,
    /// Files and folders that may be read.
    read: Vec<PathBuf>,
    /// Files that may be run.
    execute: Vec<PathBuf>,
    address_space_bytes: u64,
    open_files: u64,
}

/// Restricts this process as a worker's, and says what by.
///
/// # Errors
/// What cannot be restricted.
pub fn check() -> io::Result<String> {
    #[cfg(target_os = "linux")]
    account::drop_capabilities()?;
    restrict(&[], &[])
}

/// Becomes a worker in a sandbox: `profile` is what [`SandboxLauncher`] wrote. Returns only when it cannot.
///
/// # Errors
/// What cannot be restricted, or why Python cannot be started.
pub fn enter(profile: &str) -> io::Result<Infallible> {
    let profile: Profile = serde_json::from_str(profile)?;
    become_worker(&profile)
}

#[cfg(target_os = "linux")]
fn become_worker(profile: &Profile) -> io::Result<Infallible> {
    use nix::sys::prctl;
    use nix::sys::resource::{Resource, setrlimit};
    use nix::sys::signal::Signal;
    use nix::unistd::{getppid, setsid};
    use std::os::unix::process::CommandExt;

    // It is the first of its own group already only when a person tries this by hand.
    let _ = setsid();
    // What is below the home is given to the worker.
    let needed = profile.read.iter().chain(&profile.execute).filter(|path| !path.starts_with(&profile.home));
    let needed: Vec<PathBuf> = needed.cloned().collect();
    account::leave_root(&profile.home, &needed)?;
    account::drop_capabilities()?;
    // After the change of the user, which takes it back.
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    if getppid().as_raw().cast_unsigned() != profile.server {
        return Err(io::Error::other("the server has gone"));
    }
    let mut limits = vec![
        (Resource::RLIMIT_CORE, 0),
        // Nothing can be opened for writing; this keeps the shared memory from growing.
        (Resource::RLIMIT_FSIZE, 0),
        (Resource::RLIMIT_MEMLOCK, 0),
        (Resource::RLIMIT_MSGQUEUE, 0),
        (Resource::RLIMIT_NOFILE, profile.open_files),
    ];
    if profile.address_space_bytes > 0 {
        // What the kernel may keep for the worker's sockets counts as its memory; at least half is left for the rest.
        let buffers = account::socket_buffers(profile.open_files).min(profile.address_space_bytes / 2);
        limits.push((Resource::RLIMIT_AS, profile.address_space_bytes - buffers));
        limits.push((Resource::RLIMIT_DATA, profile.address_space_bytes - buffers));
    }
    for (resource, most) in limits {
        setrlimit(resource, most, most)?;
    }
    restrict(&profile.read, &profile.execute)?;
    Err(Command::new(&profile.python).args(&profile.arguments).exec())
}

#[cfg(not(target_os = "linux"))]
fn become_worker(_: &Profile) -> io::Result<Infallible> {
    Err(missing())
}

#[cfg(not(target_os = "linux"))]
fn missing() -> io::Error {
    io::Error::other("the sandbox needs Linux")
}

#[cfg(not(target_os = "linux"))]
fn restrict(_: &[PathBuf], _: &[PathBuf]) -> io::Result<String> {
    Err(missing())
}

/// Restricts this process for good, and says what by.
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
        LandlockStatus::NotEnabled => return Err(io::Error::other("this kernel has Landlock turned off")),
        _ => return Err(io::Error::other("this kernel has no Landlock (Linux 5.13 has it)")),
    };
    if !status.no_new_privs {
        return Err(io::Error::other("no_new_privs cannot be set"));
    }
    filter::install().map_err(|error| failed("seccomp cannot be used", &error))?;
    Ok(format!("Landlock ABI {} and seccomp", landlock as i32))
}
