//! Handle through which the decode thread submits calls; it never blocks. A call goes to the supervisor's queue. If the
//! supervisor is idle, the frame goes directly to the worker, so that the supervisor need not wake up first. While the
//! decode thread is idle too, it polls for the reply itself, and the supervisor does not wake up at all.

use super::frame;
use super::keeper::{CallJob, Job, reply_of};
use super::memory::SharedMemory;
use super::message::{FromWorker, Said};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Instant;

/// Maximum frame that is read by polling, in bytes.
const SHORT: usize = 4096;

/// Handle of a supervisor.
pub struct Desk {
    jobs: mpsc::Sender<Job>,
    pub shared: Arc<Shared>,
}

/// State shared by handle and supervisor.
pub struct Shared {
    pub memory: SharedMemory,
    /// Runs that use this worker.
    pub runs: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Submitted jobs that are not done.
    waiting: usize,
    /// Link to a worker that is idle, or works on `direct_call`.
    line: Option<Line>,
    /// Call that was sent directly to the worker and is not known to the supervisor; its caller polls for the reply.
    ahead: Option<Box<CallJob>>,
    /// Number of replies found by polling.
    answered: u64,
}

/// Link to a worker that has imported its mod.
struct Line {
    stream: UnixStream,
    /// Number that distinguishes this worker from earlier ones; never 0.
    generation: u64,
}

impl Desk {
    pub fn new(memory: SharedMemory) -> (Self, mpsc::Receiver<Job>) {
        let (jobs, queue) = mpsc::channel();
        let shared = Arc::new(Shared { memory, runs: AtomicUsize::new(0), state: Mutex::default() });
        (Self { jobs, shared }, queue)
    }

    /// Returns true while the supervisor runs.
    pub fn is_open(&self) -> bool {
        // The supervisor owns the other reference while it runs.
        Arc::strong_count(&self.shared) > 1
    }

    /// Submits a job.
    ///
    /// # Errors
    /// The supervisor has ended; returns the job.
    pub fn hand_in(&self, mut job: Job) -> Result<(), Job> {
        // The lock is held at most for the write of one frame to an empty socket.
        let mut state = self.shared.state();
        self.pass_on(&mut state);
        if let (Job::Call(call), 0, Some(line)) = (&mut job, state.waiting, &state.line)
            && call.run.worker.load(Ordering::Acquire) == line.generation
        {
            if send_now(line, &frame::encode(&call.header, &[])).is_ok() {
                call.sent = Some(Instant::now());
            } else {
                state.line = None;
            }
        }
        state.waiting += 1;
        let job = match job {
            Job::Call(call) if call.sent.is_some() && call.done.is_polled() => {
                state.ahead = Some(call);
                return Ok(());
            }
            job => job,
        };
        self.jobs.send(job).map_err(|mpsc::SendError(job)| {
            state.waiting -= 1;
            job
        })
    }

    /// Checks whether the reply to the run's call has arrived, and delivers it if so. Anything other than a complete
    /// reply is left to the supervisor.
    pub fn look(&self, run: u64) {
        let mut state = self.shared.state();
        if state.ahead.as_ref().is_none_or(|call| call.run.number != run) {
            return;
        }
        match state.line.as_ref().map_or(Err(Unclear), answer) {
            Ok(None) => {}
            Err(Unclear) => self.pass_on(&mut state),
            Ok(Some((said, body))) => {
                let Some(call) = state.ahead.take() else { return };
                state.waiting -= 1;
                state.answered += 1;
                drop(state);
                let CallJob { run, event, logits, sent, done, .. } = *call;
                let asked = sent.unwrap_or_else(Instant::now);
                done.reply(reply_of(said, &body, &run, event, &self.shared.memory, logits.as_ref(), asked));
            }
        }
    }

    /// Ends polling for the reply to the run's call.
    pub fn stop_polling(&self, run: u64) {
        let mut state = self.shared.state();
        if state.ahead.as_ref().is_some_and(|call| call.run.number == run) {
            self.pass_on(&mut state);
        }
    }

    /// Forwards the direct call to the supervisor.
    fn pass_on(&self, state: &mut State) {
        if let Some(call) = state.ahead.take() {
            // A supervisor that has ended drops the call, which sends an exception.
            let _ = self.jobs.send(Job::Call(call));
        }
    }
}

impl Shared {
    /// Marks a job as done. `generation` is the current worker's, 0 for none, and `stream` opens a link to it.
    pub fn job_done(&self, generation: u64, stream: impl FnOnce() -> Option<UnixStream>) {
        let mut state = self.state();
        state.waiting = state.waiting.saturating_sub(1);
        if state.line.as_ref().map_or(0, |line| line.generation) != generation {
            state.line = stream().map(|stream| Line { stream, generation });
        }
    }

    /// Returns the number of replies found by polling.
    pub fn answered(&self) -> u64 {
        self.state().answered
    }

    /// Detaches the worker. Returns `false` if a call is on its way to it.
    pub fn take_line(&self) -> bool {
        let mut state = self.state();
        if state.waiting == 0 {
            state.line = None;
        }
        state.waiting == 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends without blocking. If a frame does not fit completely, the worker is ended, which would otherwise wait for the
/// rest.
fn send_now(line: &Line, bytes: &[u8]) -> Result<(), Errno> {
    // Rust programs ignore SIGPIPE, so MSG_NOSIGNAL is not needed.
    match send(line.stream.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Err(Errno::EAGAIN) => Err(Errno::EAGAIN),
        other => {
            let _ = line.stream.shutdown(Shutdown::Both);
            Err(other.err().unwrap_or(Errno::EMSGSIZE))
        }
    }
}

/// The received bytes are not exactly one reply.
struct Unclear;

/// Reads a reply, if one has arrived. Never blocks, and consumes nothing but a complete reply.
fn answer(line: &Line) -> Result<Option<(Said, Vec<u8>)>, Unclear> {
    let socket = line.stream.as_raw_fd();
    let mut bytes = [0; SHORT];
    let count = match recv(socket, &mut bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK) {
        Ok(count) => count,
        Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
        Err(_) => return Err(Unclear),
    };
    let (header, body) = frame::whole(&bytes[..count]).ok_or(Unclear)?;
    let Ok(FromWorker::Reply(said)) = serde_json::from_slice(header) else { return Err(Unclear) };
    let body = body.to_vec();
    match recv(socket, &mut bytes[..count], MsgFlags::MSG_DONTWAIT) {
        Ok(taken) if taken == count => Ok(Some((said, body))),
        _ => Err(Unclear),
    }
}
