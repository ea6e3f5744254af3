//! Where the decode thread hands calls in. It never waits here: a call goes to the keeper's queue, and when the keeper
//! has nothing else to do, its frame goes straight to the worker, so that the keeper need not wake up first.

use super::frame;
use super::keeper::Job;
use super::memory::SharedMemory;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Instant;

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
    /// The way to a worker that does nothing.
    line: Option<Line>,
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
        self.jobs.send(job).map_err(|mpsc::SendError(job)| {
            state.waiting -= 1;
            job
        })
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
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    match send(line.stream.as_raw_fd(), bytes, flags) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Err(Errno::EAGAIN) => Err(Errno::EAGAIN),
        other => {
            let _ = line.stream.shutdown(Shutdown::Both);
            Err(other.err().unwrap_or(Errno::EMSGSIZE))
        }
    }
}
