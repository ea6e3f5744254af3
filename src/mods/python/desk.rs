//! Where the decode thread hands calls in. It never waits here: a call goes to the keeper's queue, and when the keeper
//! has nothing else to do, its frame goes straight to the worker, so that the keeper need not wake up first. While the
//! decode thread has nothing else to do either, it looks for the answer itself, and the keeper does not wake up at all.

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

/// Longest frame that is read at the desk, in bytes.
const SHORT: usize = 4096;

/// The way to a keeper.
pub struct Desk {
    jobs: mpsc::Sender<Job>,
    pub shared: Arc<Shared>,
}

/// What desk and keeper both know.
pub struct Shared {
    pub memory: SharedMemory,
    /// Runs that use this worker.
    pub runs: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Jobs that were handed in and are not done.
    waiting: usize,
    /// The way to a worker that does nothing, or what `ahead` asked.
    line: Option<Line>,
    /// A call that the worker has and the keeper has not: whoever made it looks for the answer.
    ahead: Option<Box<CallJob>>,
    /// Calls whose answer was found so.
    answered: u64,
}

/// A worker that has imported its mod.
struct Line {
    stream: UnixStream,
    /// Tells this worker from those before it; never 0.
    generation: u64,
}

impl Desk {
    pub fn new(memory: SharedMemory) -> (Self, mpsc::Receiver<Job>) {
        let (jobs, queue) = mpsc::channel();
        let shared = Arc::new(Shared { memory, runs: AtomicUsize::new(0), state: Mutex::default() });
        (Self { jobs, shared }, queue)
    }

    /// Whether the keeper still works.
    pub fn is_open(&self) -> bool {
        // The keeper holds the other reference for as long as it works.
        Arc::strong_count(&self.shared) > 1
    }

    /// Hands a job in.
    ///
    /// # Errors
    /// The keeper has ended; the job comes back.
    pub fn hand_in(&self, mut job: Job) -> Result<(), Job> {
        // Nobody holds this lock for longer than one frame takes into an empty socket.
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

    /// Looks whether the call of that run is answered, and delivers the answer if so. What is not simply an answer is left
    /// to the keeper.
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

    /// Nobody looks for the answer to that run's call any more.
    pub fn stop_polling(&self, run: u64) {
        let mut state = self.shared.state();
        if state.ahead.as_ref().is_some_and(|call| call.run.number == run) {
            self.pass_on(&mut state);
        }
    }

    /// Lets the keeper have the call that it does not know of yet.
    fn pass_on(&self, state: &mut State) {
        if let Some(call) = state.ahead.take() {
            // A keeper that has ended drops the call, which answers it.
            let _ = self.jobs.send(Job::Call(call));
        }
    }
}

impl Shared {
    /// A job is done. `generation` is that of the worker there is, 0 for none, and `stream` the way to it.
    pub fn job_done(&self, generation: u64, stream: impl FnOnce() -> Option<UnixStream>) {
        let mut state = self.state();
        state.waiting = state.waiting.saturating_sub(1);
        if state.line.as_ref().map_or(0, |line| line.generation) != generation {
            state.line = stream().map(|stream| Line { stream, generation });
        }
    }

    /// Calls that were answered without the keeper, ever.
    pub fn answered(&self) -> u64 {
        self.state().answered
    }

    /// Takes the worker away from the desk; `false` when a call is on its way to it.
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

/// Sends without ever waiting. A frame that does not fit ends the worker, which would otherwise wait for its rest.
fn send_now(line: &Line, bytes: &[u8]) -> Result<(), Errno> {
    // There is no SIGPIPE to keep away: Rust's programs ignore it.
    match send(line.stream.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Err(Errno::EAGAIN) => Err(Errno::EAGAIN),
        other => {
            let _ = line.stream.shutdown(Shutdown::Both);
            Err(other.err().unwrap_or(Errno::EMSGSIZE))
        }
    }
}

/// Not an answer, or not the whole of it.
struct Unclear;

/// What the worker has said, if it has said anything. Never waits, and takes nothing but a whole answer.
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
