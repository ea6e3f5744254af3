//! A thread that computes token masks while the model runs.

use std::sync::mpsc::{Sender, channel};

type Job = Box<dyn FnOnce() + Send>;

/// A handle that sends work to the thread; cheap to clone. The thread ends with the last handle.
#[derive(Debug, Clone)]
pub(super) struct MaskWorker(Option<Sender<Job>>);

impl MaskWorker {
    /// Starts the thread. If that fails, masks are computed on demand only.
    pub(super) fn start() -> Self {
        let (sender, jobs) = channel::<Job>();
        let thread = std::thread::Builder::new().name("thunder-masks".into()).spawn(move || {
            for job in jobs {
                job();
            }
        });
        Self(thread.is_ok().then_some(sender))
    }

    /// Runs the job on the thread; drops it if there is none.
    pub(super) fn send(&self, job: impl FnOnce() + Send + 'static) {
        if let Some(sender) = &self.0 {
            // If the thread has stopped, the decode thread computes the mask when it is needed.
            let _ = sender.send(Box::new(job));
        }
    }
}
