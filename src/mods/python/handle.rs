//! Non-blocking handle through which the decode thread submits calls. A call goes to the supervisor's queue. If the
//! worker is idle, the frame of the call is sent to the worker directly, so that the call does not wait for the
//! supervisor to wake up. If the decode thread is idle, too, it polls for the reply, and the supervisor does not wake
//! up at all.

use super::frame;
use super::job::{CallJob, Job};
use super::message::{FromWorker, WorkerReply};
use super::shared_memory::SharedMemory;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// Maximum frame that is read by polling, in bytes.
const MAX_POLLED_FRAME: usize = 4096;

/// Handle of a supervisor.
pub struct SupervisorHandle {
    jobs: mpsc::Sender<Job>,
    pub shared: Arc<WorkerShared>,
}

/// State shared by handle and supervisor.
pub struct WorkerShared {
    pub memory: SharedMemory,
    /// Runs that use this worker.
    pub runs: AtomicUsize,
    /// True after the end of the supervisor.
    is_closed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Submitted jobs that are not done.
    waiting: usize,
    /// Link to the current worker; `None` if there is none, or if it cannot be reached.
    link: Option<WorkerLink>,
    /// Call that was sent directly to the worker and not to the supervisor; its caller polls for the reply.
    direct_call: Option<Box<CallJob>>,
    /// Time of the calls whose replies were found by polling.
    direct_call_time: Duration,
}

/// Link to a worker that has imported its mod.
struct WorkerLink {
    stream: UnixStream,
    /// Number that distinguishes this worker from earlier ones; never 0.
    generation: u64,
}

impl SupervisorHandle {
    pub fn new(memory: SharedMemory) -> (Self, mpsc::Receiver<Job>) {
        let (jobs, queue) = mpsc::channel();
        let shared = Arc::new(WorkerShared {
            memory,
            runs: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
            state: Mutex::default(),
        });
        (Self { jobs, shared }, queue)
    }

    /// Returns true while the supervisor runs.
    pub fn is_open(&self) -> bool {
        !self.shared.is_closed.load(Ordering::Acquire)
    }

    /// Submits a job.
    ///
    /// # Errors
    /// The supervisor has ended; returns the job.
    pub fn submit(&self, mut job: Job) -> Result<(), Job> {
        // The lock is held while one frame is written to an empty socket, which does not block.
        let mut state = self.shared.state();
        self.forward_to_supervisor(&mut state);
        if let (Job::Call(call), 0, Some(link)) = (&mut job, state.waiting, &state.link)
            && call.run.introduced_to.load(Ordering::Acquire) == link.generation
        {
            if try_send(link, &frame::encode(&call.header, &[])).is_ok() {
                call.sent_directly_at = Some(Instant::now());
            } else {
                state.link = None;
            }
        }
        state.waiting += 1;
        let job = match job {
            Job::Call(call) if call.sent_directly_at.is_some() && call.done.is_polled() => {
                state.direct_call = Some(call);
                return Ok(());
            }
            job => job,
        };
        self.jobs.send(job).map_err(|mpsc::SendError(job)| {
            state.waiting -= 1;
            job
        })
    }

    /// Delivers the reply to the run's call if it has arrived. The supervisor handles everything other than a complete
    /// reply.
    pub fn poll_reply(&self, run: u64) {
        let mut state = self.shared.state();
        if state.direct_call.as_ref().is_none_or(|call| call.run.number != run) {
            return;
        }
        match state.link.as_ref().map_or(Err(NotAReply), try_read_reply) {
            Ok(None) => {}
            Err(NotAReply) => self.forward_to_supervisor(&mut state),
            Ok(Some((reply, body))) => {
                let Some(call) = state.direct_call.take() else { return };
                state.waiting -= 1;
                let sent_at = call.sent_directly_at.unwrap_or_else(Instant::now);
                state.direct_call_time += sent_at.elapsed();
                drop(state);
                let reply = call.to_reply(reply, &body, &self.shared.memory, sent_at);
                call.done.reply(reply);
            }
        }
    }

    /// Ends polling for the reply to the run's call.
    pub fn stop_polling(&self, run: u64) {
        let mut state = self.shared.state();
        if state.direct_call.as_ref().is_some_and(|call| call.run.number == run) {
            self.forward_to_supervisor(&mut state);
        }
    }

    /// Forwards the direct call to the supervisor.
    fn forward_to_supervisor(&self, state: &mut State) {
        if let Some(call) = state.direct_call.take() {
            // A supervisor that has ended drops the call, which sends an exception.
            let _ = self.jobs.send(Job::Call(call));
        }
    }
}

impl WorkerShared {
    /// Marks the supervisor as ended.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Marks a job as done. `generation` is the current worker's, 0 for none, and `stream` opens a link to it.
    pub fn job_done(&self, generation: u64, stream: impl FnOnce() -> Option<UnixStream>) {
        let mut state = self.state();
        state.waiting = state.waiting.saturating_sub(1);
        if state.link.as_ref().map_or(0, |link| link.generation) != generation {
            state.link = stream().map(|stream| WorkerLink { stream, generation });
        }
    }

    /// Returns the time of the calls whose replies were found by polling.
    pub fn direct_call_time(&self) -> Duration {
        self.state().direct_call_time
    }

    /// Detaches the worker. Returns `false` if a call is on its way to it.
    pub fn detach_worker(&self) -> bool {
        let mut state = self.state();
        if state.waiting == 0 {
            state.link = None;
        }
        state.waiting == 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends without blocking. If only a part of a frame fits, ends the worker, which would otherwise wait for the rest.
fn try_send(link: &WorkerLink, bytes: &[u8]) -> Result<(), Errno> {
    // Rust programs ignore SIGPIPE, so MSG_NOSIGNAL is not needed.
    match send(link.stream.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Err(Errno::EAGAIN) => Err(Errno::EAGAIN),
        other => {
            let _ = link.stream.shutdown(Shutdown::Both);
            Err(other.err().unwrap_or(Errno::EMSGSIZE))
        }
    }
}

/// The received bytes are not exactly one reply.
struct NotAReply;

/// Reads a reply, if one has arrived. Never blocks, and consumes nothing but a complete reply.
fn try_read_reply(link: &WorkerLink) -> Result<Option<(WorkerReply, Vec<u8>)>, NotAReply> {
    let socket = link.stream.as_raw_fd();
    let mut bytes = [0; MAX_POLLED_FRAME];
    let count = match recv(socket, &mut bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK) {
        Ok(count) => count,
        Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
        Err(_) => return Err(NotAReply),
    };
    let (header, body) = frame::split_frame(&bytes[..count]).ok_or(NotAReply)?;
    let Ok(FromWorker::Reply(reply)) = serde_json::from_slice(header) else { return Err(NotAReply) };
    let body = body.to_vec();
    match recv(socket, &mut bytes[..count], MsgFlags::MSG_DONTWAIT) {
        Ok(taken) if taken == count => Ok(Some((reply, body))),
        _ => Err(NotAReply),
    }
}
