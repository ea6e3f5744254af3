//! A thread that works out masks while the model runs.

use std::sync::mpsc::{Sender, channel};

type Job = Box<dyn FnOnce() + Send>;

/// Hands work to the thread; cheap to clone. The thread ends with the last one.
#[derive(Debug, Clone)]
pub(super) struct MaskWorker(Option<Sender<Job>>);

impl MaskWorker {
    /// Starts the thread. Where none can be had, nothing is done ahead.
    pub(super) fn start() -> Self {
        let (sender, jobs) = channel::<Job>();
        let thread = std::thread::Builder::new().name("thunder-masks".into()).spawn(move || {
            for job in jobs {
                job();
            }
        });
        Self(thread.is_ok().then_some(sender))
    }

    pub(super) fn give(&self, job: impl FnOnce() + Send + 'static) {
        if let Some(sender) = &self.0 {
            // A thread that died does nothing ahead either; the decode thread then does the work when it is due.
            let _ = sender.send(Box::new(job));
        }
    }
}
