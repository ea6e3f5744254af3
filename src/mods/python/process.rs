//! One worker process: started, spoken to, and ended.

use super::frame::{self, Decoder, Frame, TooLong};
use super::sandbox::{SandboxLauncher, library_path};
use super::{WorkerLimits, memory::SharedMemory};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The Python side, as it is unpacked for every worker.
#[derive(rust_embed::RustEmbed)]
#[folder = "src/mods/python/sdk"]
struct Sdk;

/// How long a worker may take to say where it is, before it is killed.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// How long a worker may take to end by itself when it is no longer needed.
const GRACE: Duration = Duration::from_millis(300);
/// How a worker's directory is called.
const HOME_PREFIX: &str = "thunder-mod-";
/// Most threads of a worker, and how often they are counted while it is waited for.
pub const MOST_THREADS: u64 = 512;
const COUNT_THREADS: Duration = Duration::from_millis(50);
/// Most bytes that are written at once.
const PART: usize = 16 * 1024;
/// How much stray output is kept, in bytes.
const STRAY: usize = 16 * 1024;

/// Why a worker can no longer be spoken to.
#[derive(Debug)]
pub enum Lost {
    /// It did not answer in time.
    Deadline,
    /// It has ended.
    Gone,
    /// It has so many threads.
    Threads(u64),
    /// It said something that is not the protocol.
    Protocol(String),
}

impl From<TooLong> for Lost {
    fn from(error: TooLong) -> Self {
        Self::Protocol(error.to_string())
    }
}

/// A worker process that runs one mod.
pub struct Process {
    child: Child,
    stream: UnixStream,
    decoder: Decoder,
    stray: Arc<Mutex<Stray>>,
    home: Home,
    /// Set once it was waited for.
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts a worker, in a sandbox where there is one, which then waits for the mod to load.
    ///
    /// # Errors
    /// The directory could not be made or the program not be started.
    pub fn start(
        python: &Path,
        limits: &WorkerLimits,
        sandbox: Option<&SandboxLauncher>,
        memory: &SharedMemory,
    ) -> io::Result<Self> {
        let home = Home::create()?;
        let (stream, theirs) = UnixStream::pair()?;
        let (stray_in, stray_out) = io::pipe()?;
        let work = home.path.join("work");
        let sdk = home.path.join("sdk");
        let numbers = [u64::from(std::process::id()), limits.address_space_bytes, limits.file_size_bytes];
        let mut arguments: Vec<String> = ["-I", "-B", "-X", "utf8"].map(str::to_owned).into();
        arguments.push(sdk.join("bootstrap.py").display().to_string());
        arguments.extend(numbers.map(|number| number.to_string()));
        arguments.extend([limits.open_files.to_string(), home.path.display().to_string()]);
        let mut command = if let Some(launcher) = sandbox {
            // It makes itself the leader of a session, and so of a group.
            launcher.command(python, &home.path, limits, arguments)
        } else {
            let mut command = Command::new(python);
            command.args(arguments).process_group(0);
            command
        };
        let child = command
            .env_clear()
            .envs(library_path())
            .envs([("PATH", "/usr/local/bin:/usr/bin:/bin"), ("LANG", "C.UTF-8")])
            // Numeric libraries would start a thread per core for each mod, and take the cores from the model.
            .envs([("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1")])
            .env("HOME", &work)
            .env("TMPDIR", &work)
            .current_dir(&work)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(memory.descriptor()?))
            .stderr(Stdio::from(stray_out))
            .spawn()?;
        let stray = Arc::new(Mutex::new(Stray::default()));
        let into = Arc::clone(&stray);
        thread::Builder::new().name("mod output".into()).spawn(move || keep_stray(stray_in, &into))?;
        Ok(Self { child, stream, decoder: Decoder::default(), stray, home, ended: None })
    }

    /// The socket, for who may write to it as well.
    ///
    /// # Errors
    /// The server has no descriptor to spare.
    pub fn stream(&self) -> io::Result<UnixStream> {
        self.stream.try_clone()
    }

    /// Processor time that it has used, all threads together; `None` where the system does not say.
    pub fn cpu_time(&self) -> Option<Duration> {
        // User and system time, in hundredths of a second.
        let stat = self.stat()?;
        let mut fields = stat.split_whitespace().skip(11);
        let mut ticks = || fields.next()?.parse::<u64>().ok();
        Some(Duration::from_millis(10 * (ticks()? + ticks()?)))
    }

    /// Whether a signal has stopped it, so that it does nothing until another lets it go on.
    pub fn is_stopped(&self) -> bool {
        self.stat().is_some_and(|stat| stat.trim_start().starts_with('T'))
    }

    /// Its threads; `None` where the system does not say.
    fn threads(&self) -> Option<u64> {
        self.stat()?.split_whitespace().nth(17)?.parse().ok()
    }

    /// What Linux says of it, from its state on: behind the program's name, which may hold anything.
    fn stat(&self) -> Option<String> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).ok()?;
        Some(stat.rsplit_once(')')?.1.to_owned())
    }

    /// Writes a frame.
    ///
    /// # Errors
    /// [`Lost`]; the worker is of no more use.
    pub fn send(&mut self, header: &[u8], body: &[u8], deadline: Instant) -> Result<(), Lost> {
        let frame = frame::encode(header, body);
        let mut rest = &frame[..];
        while !rest.is_empty() {
            self.stream.set_write_timeout(Some(left(deadline)?)).map_err(|_| Lost::Gone)?;
            // A long write waits anew for each part of it, so that a worker that reads slowly could hold it for ever.
            match self.stream.write(&rest[..rest.len().min(PART)]) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(&error)),
            }
        }
        Ok(())
    }

    /// Waits for a frame.
    ///
    /// # Errors
    /// [`Lost`]; the worker is of no more use.
    pub fn receive(&mut self, deadline: Instant) -> Result<Frame, Lost> {
        let mut chunk = [0; 16 * 1024];
        loop {
            if let Some(frame) = self.decoder.next()? {
                return Ok(frame);
            }
            let patience = left(deadline)?.min(COUNT_THREADS);
            self.stream.set_read_timeout(Some(patience)).map_err(|_| Lost::Gone)?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(Lost::Gone),
                Ok(count) => self.decoder.push(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => match (lost(&error), self.threads()) {
                    (Lost::Deadline, Some(threads)) if threads > MOST_THREADS => return Err(Lost::Threads(threads)),
                    // It is the caller's only when none of it is left.
                    (Lost::Deadline, _) => {}
                    (lost, _) => return Err(lost),
                },
            }
        }
    }

    /// Whether the process still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Where Python is at this moment, innermost call first; `None` when it cannot say.
    pub fn whereabouts(&self) -> Option<String> {
        let before = self.stray().total;
        kill(self.pid(), Signal::SIGUSR1).ok()?;
        // One that was stopped answers when it goes on.
        kill(self.pid(), Signal::SIGCONT).ok()?;
        let until = Instant::now() + LAST_WORDS;
        let mut seen = before;
        loop {
            thread::sleep(Duration::from_millis(10));
            let now = self.stray().total;
            if (now > before && now == seen) || Instant::now() > until {
                break;
            }
            seen = now;
        }
        let text = self.stray().since(before);
        let sdk = self.home.path.join("sdk").display().to_string();
        let lines: Vec<&str> = text.lines().filter(|line| !line.contains(&sdk) && !line.contains("<frozen")).collect();
        (lines.len() > 1).then(|| lines.join("\n"))
    }

    /// Kills the process with all it started, and says how it ended and what it wrote last.
    pub fn kill(mut self) -> (Option<ExitStatus>, String) {
        let status = self.end();
        // The thread that keeps stray output may be a moment behind.
        thread::sleep(Duration::from_millis(5));
        let last = self.stray().since(0);
        (status, last)
    }

    fn end(&mut self) -> Option<ExitStatus> {
        if self.ended.is_some() {
            return self.ended;
        }
        // Before it is waited for, so that the id cannot be another group's yet.
        let _ = killpg(self.pid(), Signal::SIGKILL);
        // One that has no group of its own yet.
        let _ = self.child.kill();
        self.ended = self.child.wait().ok();
        self.ended
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    fn stray(&self) -> std::sync::MutexGuard<'_, Stray> {
        self.stray.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended.is_some() {
            return;
        }
        let _ = self.stream.shutdown(Shutdown::Write);
        let until = Instant::now() + GRACE;
        while self.receive(until).is_ok() {}
        self.end();
    }
}

fn left(deadline: Instant) -> Result<Duration, Lost> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(Lost::Deadline) } else { Ok(left) }
}

fn lost(error: &io::Error) -> Lost {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Lost::Deadline,
        _ => Lost::Gone,
    }
}

/// How a process ended, for a person.
pub fn ending(status: Option<ExitStatus>) -> String {
    match status.map(|status| (status.code(), status.signal())) {
        Some((Some(code), _)) => format!("the worker ended with exit code {code}"),
        Some((None, Some(signal))) => {
            let name = Signal::try_from(signal).map_or("unknown", Signal::as_str);
            format!("the worker was ended by signal {signal} ({name})")
        }
        _ => "the worker ended".into(),
    }
}

/// A directory of the worker's own, with the SDK in it.
struct Home {
    path: PathBuf,
    /// Locked for as long as the server lives.
    _lock: File,
}

impl Home {
    fn create() -> io::Result<Self> {
        static SWEPT: Once = Once::new();
        SWEPT.call_once(|| sweep(&std::env::temp_dir()));
        let path = std::env::temp_dir().join(format!("{HOME_PREFIX}{}", uuid::Uuid::now_v7().simple()));
        DirBuilder::new().mode(0o700).create(&path)?;
        let lock = File::create(path.join("lock"))?;
        lock.lock()?;
        let home = Self { path, _lock: lock };
        fs::create_dir(home.path.join("work"))?;
        unpack_sdk(&home.path.join("sdk"))?;
        Ok(home)
    }
}

/// Writes the SDK into a folder, which Python can then import it from.
///
/// # Errors
/// A file could not be written.
pub fn unpack_sdk(folder: &Path) -> io::Result<()> {
    for name in Sdk::iter().filter(|name| is_source(name)) {
        let file = folder.join(&*name);
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)?;
        }
        if let Some(content) = Sdk::get(&name) {
            fs::write(file, content.data)?;
        }
    }
    Ok(())
}

/// Whether a file of the SDK's folder is part of the SDK, and not of how it is packaged.
fn is_source(name: &str) -> bool {
    let path = Path::new(name);
    path.extension().is_some_and(|kind| kind == "py") && !path.starts_with("build") && !path.starts_with("dist")
}

/// Removes the directories that servers left behind which were killed together with their workers.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(HOME_PREFIX) {
            continue;
        }
        // One that is being made has no lock yet, or a lock that nobody holds.
        let age = entry.metadata().and_then(|found| found.modified()).ok().and_then(|at| at.elapsed().ok());
        let is_old = age.is_some_and(|age| age > Duration::from_mins(1));
        if is_old && File::open(entry.path().join("lock")).is_ok_and(|lock| lock.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The end of what was written to the descriptors 1 and 2, past Python's own streams.
#[derive(Default)]
struct Stray {
    bytes: Vec<u8>,
    /// Bytes ever written.
    total: usize,
}

impl Stray {
    fn since(&self, total: usize) -> String {
        let new = self.total.saturating_sub(total).min(self.bytes.len());
        String::from_utf8_lossy(&self.bytes[self.bytes.len() - new..]).trim_end().to_owned()
    }
}

fn keep_stray(mut from: io::PipeReader, into: &Mutex<Stray>) {
    let mut chunk = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut chunk) {
        let mut stray = into.lock().unwrap_or_else(PoisonError::into_inner);
        stray.bytes.extend_from_slice(&chunk[..count]);
        stray.total += count;
        let over = stray.bytes.len().saturating_sub(STRAY);
        stray.bytes.drain(..over);
    }
}

#[cfg(test)]
mod tests {
    use super::{HOME_PREFIX, sweep};
    use std::fs::{self, File};
    use std::time::{Duration, SystemTime};

    #[test]
    fn only_what_was_left_behind_is_swept() {
        let folder = std::env::temp_dir().join(format!("thunder-test-{}", uuid::Uuid::now_v7()));
        let make = |name: &str, with_lock: bool, age: u64| {
            let path = folder.join(name);
            fs::create_dir_all(&path).unwrap();
            let lock = with_lock.then(|| File::create(path.join("lock")).unwrap());
            File::open(&path).unwrap().set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
            (path, lock)
        };
        let (left, _) = make(&format!("{HOME_PREFIX}left"), true, 100);
        let (young, _) = make(&format!("{HOME_PREFIX}young"), true, 1);
        let (unlocked, _) = make(&format!("{HOME_PREFIX}without"), false, 100);
        let (alive, lock) = make(&format!("{HOME_PREFIX}alive"), true, 100);
        let (other, _) = make("other", true, 100);
        lock.as_ref().unwrap().lock().unwrap();
        sweep(&folder);
        assert_eq!([left, young, unlocked, alive, other].map(|path| path.exists()), [false, true, true, true, true]);
        fs::remove_dir_all(folder).unwrap();
    }
}
