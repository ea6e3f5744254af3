//! One worker process: start, messages and end.

use super::call_log::CallLog;
use super::exit_status::describe_exit;
use super::frame::{self, Decoder, Frame, FrameTooLong};
use super::job::RunContext;
use super::limits::{EXTRA_NICE, MAX_THREADS};
use super::message::FromWorker;
use super::sandbox::{SandboxLauncher, library_path};
use super::stray_output::{self, StrayOutput};
use super::worker_dir::WorkerDir;
use super::{WorkerLimits, shared_memory::SharedMemory};
use crate::mods::{ModException, ModLogLine};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use rustix::process::{WaitId, WaitIdOptions, getpriority_process, setpriority_process, waitid};
use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time for a worker to dump its stack before it is killed.
const STACK_DUMP_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for a worker to end by itself once it is no longer needed.
const EXIT_TIMEOUT: Duration = Duration::from_millis(300);
/// Interval at which the threads of a worker are counted during a call.
const THREAD_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum bytes of one write.
const WRITE_CHUNK_BYTES: usize = 16 * 1024;
/// Maximum bytes with which a worker describes its mods: names, descriptions and configurations.
const MAX_LOADED_BYTES: usize = 1 << 20;

/// Reason why a worker can no longer be used.
#[derive(Debug)]
pub enum WorkerFailure {
    /// The worker exceeded its deadline.
    Deadline,
    /// The worker has ended.
    Ended,
    /// The worker has too many threads.
    Threads(u64),
    /// The worker violated the protocol.
    Protocol(String),
}

impl From<FrameTooLong> for WorkerFailure {
    fn from(error: FrameTooLong) -> Self {
        Self::Protocol(error.to_string())
    }
}

/// A worker process that runs one mod.
pub struct WorkerProcess {
    limits: WorkerLimits,
    child: Child,
    stream: UnixStream,
    decoder: Decoder,
    /// Time of the last check of the number of threads.
    threads_checked: Instant,
    stray_output: Arc<Mutex<StrayOutput>>,
    worker_dir: WorkerDir,
    /// Exit status, once known.
    ended: Option<ExitStatus>,
}

impl WorkerProcess {
    /// Starts a worker, in a sandbox if one is given. The worker then waits for the source of the mod.
    ///
    /// # Errors
    /// The directory could not be created, or the program could not be started.
    pub fn start(
        python: &Path,
        limits: &WorkerLimits,
        sandbox: Option<&SandboxLauncher>,
        memory: &SharedMemory,
    ) -> io::Result<Self> {
        let worker_dir = WorkerDir::create()?;
        let (stream, theirs) = UnixStream::pair()?;
        let (stray_reader, stray_writer) = io::pipe()?;
        let work = worker_dir.path().join("work");
        let sdk = worker_dir.path().join("sdk");
        let numbers = [u64::from(std::process::id()), limits.address_space_bytes, limits.file_size_bytes];
        let mut arguments: Vec<String> = ["-I", "-B", "-X", "utf8"].map(str::to_owned).into();
        arguments.push(sdk.join("bootstrap.py").display().to_string());
        arguments.extend(numbers.map(|number| number.to_string()));
        arguments.extend([limits.open_files.to_string(), worker_dir.path().display().to_string()]);
        let mut command = if let Some(launcher) = sandbox {
            // The launcher becomes the leader of a session, and thereby of a process group.
            launcher.command(python, worker_dir.path(), limits, arguments)
        } else {
            let mut command = Command::new(python);
            command.args(arguments).process_group(0);
            command
        };
        let stray_output = Arc::new(Mutex::new(StrayOutput::new(stray_reader.try_clone()?)?));
        let into = Arc::clone(&stray_output);
        // Started before the process, which would remain a zombie if this failed.
        thread::Builder::new().name("mod output".into()).spawn(move || stray_output::collect(&stray_reader, &into))?;
        let child = command
            .env_clear()
            .envs(library_path())
            .envs([("PATH", "/usr/local/bin:/usr/bin:/bin"), ("LANG", "C.UTF-8")])
            // Numeric libraries would start a thread per core for each mod, and compete with the model.
            .envs([("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1")])
            .env("HOME", &work)
            .env("TMPDIR", &work)
            .envs(sandbox.map(|_| ("THUNDER_SANDBOX", "1")))
            .current_dir(&work)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(memory.descriptor()?))
            .stderr(Stdio::from(stray_writer))
            .spawn()?;
        // The threads of a decode wait for each other, so one that shares its core with a worker delays all.
        let nice = getpriority_process(None).unwrap_or(0) + EXTRA_NICE;
        if let Err(error) = setpriority_process(Some(rustix::process::Pid::from_child(&child)), nice) {
            tracing::debug!(%error, "cannot lower the priority of a mod's worker");
        }
        let (decoder, threads_checked) = (Decoder::default(), Instant::now());
        Ok(Self {
            limits: limits.clone(),
            child,
            stream,
            decoder,
            threads_checked,
            stray_output,
            worker_dir,
            ended: None,
        })
    }

    /// Returns a second handle of the socket.
    ///
    /// # Errors
    /// The server has no free descriptor.
    pub fn stream(&self) -> io::Result<UnixStream> {
        self.stream.try_clone()
    }

    /// Returns the CPU time used by all threads; `None` if the system does not report it. Takes a microsecond.
    #[cfg(target_os = "linux")]
    pub fn cpu_time(&self) -> Option<Duration> {
        let clock = nix::time::ClockId::pid_cpu_clock_id(self.pid()).ok()?;
        clock.now().ok().map(Duration::from)
    }

    /// Returns `None`, because the system does not report the CPU time of another process.
    #[cfg(not(target_os = "linux"))]
    pub fn cpu_time(&self) -> Option<Duration> {
        None
    }

    /// Returns true if a signal has stopped the process.
    fn is_stopped(&self) -> bool {
        self.stat().is_some_and(|stat| stat.trim_start().starts_with('T'))
    }

    /// Returns the number of threads if it exceeds the maximum.
    pub fn excess_threads(&self) -> Option<u64> {
        let threads = self.stat()?.split_whitespace().nth(17)?.parse().ok()?;
        (threads > MAX_THREADS).then_some(threads)
    }

    /// Checks the number of threads if the last check was long enough ago.
    fn check_threads(&mut self) -> Result<(), WorkerFailure> {
        if self.threads_checked.elapsed() < THREAD_CHECK_INTERVAL {
            return Ok(());
        }
        self.threads_checked = Instant::now();
        self.excess_threads().map_or(Ok(()), |threads| Err(WorkerFailure::Threads(threads)))
    }

    /// Returns Linux's process status from the state field on. The field before it is the program's name, which may
    /// contain any characters.
    fn stat(&self) -> Option<String> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).ok()?;
        Some(stat.rsplit_once(')')?.1.to_owned())
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// [`WorkerFailure`]; the worker can no longer be used.
    pub fn send(&mut self, header: &[u8], body: &[u8], deadline: Instant) -> Result<(), WorkerFailure> {
        let frame = frame::encode(header, body);
        let mut rest = &frame[..];
        while !rest.is_empty() {
            self.stream.set_write_timeout(Some(time_left(deadline)?)).map_err(|_| WorkerFailure::Ended)?;
            // The timeout applies to each part of the frame, the deadline to the whole frame, so that a worker that
            // reads slowly cannot block the server forever.
            match self.stream.write(&rest[..rest.len().min(WRITE_CHUNK_BYTES)]) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failure(&error)),
            }
        }
        Ok(())
    }

    /// Waits for the next message that is not a log line, with its body. Log lines are added to `logs`.
    ///
    /// # Errors
    /// [`WorkerFailure`]; the worker can no longer be used.
    pub fn receive_message(
        &mut self,
        deadline: Instant,
        logs: &mut CallLog,
        run: Option<&RunContext>,
    ) -> Result<(FromWorker, Vec<u8>), WorkerFailure> {
        loop {
            let Frame { header, body } = self.receive(deadline)?;
            let message =
                serde_json::from_slice(&header).map_err(|error| WorkerFailure::Protocol(error.to_string()))?;
            match message {
                FromWorker::Loaded { .. } if header.len() > MAX_LOADED_BYTES => {
                    let size = header.len();
                    let error = format!("its mods are described in {size} bytes; the maximum is {MAX_LOADED_BYTES}");
                    return Err(WorkerFailure::Protocol(error));
                }
                FromWorker::Log { level, message } => {
                    logs.add(ModLogLine { level, message }, run, self.limits.run_log_bytes);
                }
                other => return Ok((other, body)),
            }
        }
    }

    /// Waits for a frame.
    ///
    /// # Errors
    /// [`WorkerFailure`]; the worker can no longer be used.
    fn receive(&mut self, deadline: Instant) -> Result<Frame, WorkerFailure> {
        let mut chunk = [0; 16 * 1024];
        loop {
            self.check_threads()?;
            if let Some(frame) = self.decoder.next()? {
                return Ok(frame);
            }
            let limit = time_left(deadline)?.min(THREAD_CHECK_INTERVAL);
            self.stream.set_read_timeout(Some(limit)).map_err(|_| WorkerFailure::Ended)?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(WorkerFailure::Ended),
                Ok(count) => self.decoder.push(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => match failure(&error) {
                    // The deadline is exceeded only when no time is left.
                    WorkerFailure::Deadline => {}
                    failure => return Err(failure),
                },
            }
        }
    }

    /// Marks the end of a call: its output does not explain a later failure.
    pub fn end_call(&self) {
        self.stray_output().end_call();
    }

    /// Returns the worker if it runs.
    ///
    /// # Errors
    /// The end of a worker that ended between two calls, in words.
    pub fn if_alive(self) -> Result<Self, String> {
        if self.is_alive() {
            return Ok(self);
        }
        let (status, last) = self.kill();
        Err(format!("{} between two calls: {last:?}", describe_exit(status)))
    }

    /// Returns true while the process runs. Keeps the status of an ended process until [`WorkerProcess::kill`], so that
    /// no other process gets its id before its group is killed.
    fn is_alive(&self) -> bool {
        let id = WaitId::Pid(rustix::process::Pid::from_child(&self.child));
        matches!(waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT), Ok(None))
    }

    /// Returns the current Python stack, innermost call first; `None` if the process does not report it.
    fn stack_dump(&self) -> Option<String> {
        let before = self.stray_output().total;
        kill(self.pid(), Signal::SIGUSR1).ok()?;
        // A stopped process must be continued to handle the signal.
        kill(self.pid(), Signal::SIGCONT).ok()?;
        let until = Instant::now() + STACK_DUMP_TIMEOUT;
        let text = loop {
            thread::sleep(Duration::from_millis(5));
            let text = self.stray_output().since(before);
            // The outermost call is that of a module; longer stacks end with dots.
            let is_complete = [" in <module>", "  ..."].iter().any(|end| text.ends_with(end));
            if is_complete || Instant::now() > until {
                break text;
            }
        };
        let sdk = self.worker_dir.path().join("sdk").display().to_string();
        let lines: Vec<&str> = text.lines().filter(|line| !line.contains(&sdk) && !line.contains("<frozen")).collect();
        (lines.len() > 1).then(|| lines.join("\n"))
    }

    /// Stops all threads of the process and its group until [`WorkerProcess::resume`].
    pub fn suspend(&self) {
        // Fails only if the process has ended, which the next message reports.
        let _ = killpg(self.pid(), Signal::SIGSTOP);
    }

    /// Continues a process that [`WorkerProcess::suspend`] stopped.
    pub fn resume(&self) {
        // Same as above.
        let _ = killpg(self.pid(), Signal::SIGCONT);
    }

    /// Kills a worker that failed and describes the failure. `time_limit` is that of the exceeded deadline.
    pub fn fail(self, failure: &WorkerFailure, time_limit: Duration) -> ModException {
        match failure {
            WorkerFailure::Deadline => {
                let cause = if self.is_stopped() { "; a signal has stopped the worker" } else { "" };
                let traceback = self.stack_dump();
                self.kill();
                let message = format!("deadline of {} ms exceeded{cause}", time_limit.as_millis());
                ModException { message, traceback }
            }
            WorkerFailure::Threads(threads) => {
                self.kill();
                ModException::new(format!("the worker had {threads} threads; the maximum is {MAX_THREADS}"))
            }
            WorkerFailure::Ended => {
                let (status, last) = self.kill();
                ModException { message: describe_exit(status), traceback: Some(last).filter(|last| !last.is_empty()) }
            }
            WorkerFailure::Protocol(error) => {
                let (_, last) = self.kill();
                let message = format!("the worker violated the protocol: {error}");
                ModException { message, traceback: Some(last).filter(|last| !last.is_empty()) }
            }
        }
    }

    /// Kills the process with its whole group. Returns the exit status and the stray output since the last call.
    pub fn kill(mut self) -> (Option<ExitStatus>, String) {
        let status = self.end();
        let mut output = self.stray_output();
        output.read();
        (status, output.since_last_call())
    }

    fn end(&mut self) -> Option<ExitStatus> {
        if self.ended.is_some() {
            return self.ended;
        }
        // Signalled before the wait, so that the id cannot belong to another group yet.
        let _ = killpg(self.pid(), Signal::SIGKILL);
        // The process may not have its own group yet.
        let _ = self.child.kill();
        self.ended = self.child.wait().ok();
        self.ended
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    fn stray_output(&self) -> std::sync::MutexGuard<'_, StrayOutput> {
        self.stray_output.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        if self.ended.is_some() {
            return;
        }
        let _ = self.stream.shutdown(Shutdown::Write);
        let until = Instant::now() + EXIT_TIMEOUT;
        while self.receive(until).is_ok() {}
        self.end();
    }
}

fn time_left(deadline: Instant) -> Result<Duration, WorkerFailure> {
    let time_left = deadline.saturating_duration_since(Instant::now());
    if time_left.is_zero() { Err(WorkerFailure::Deadline) } else { Ok(time_left) }
}

fn failure(error: &io::Error) -> WorkerFailure {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => WorkerFailure::Deadline,
        _ => WorkerFailure::Ended,
    }
}
