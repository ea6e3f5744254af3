use super::{RunId, Signal};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{mpsc, oneshot};

/// The way to the recorder; cheap to clone. A channel alone will do where no run must be kept.
#[derive(Debug, Clone)]
pub struct Recorder {
    /// Takes the signals of every recorded run.
    pub signals: mpsc::Sender<Signal>,
    /// The runs that must be kept, where somebody can promise that.
    pub promises: Option<Promises>,
}

impl From<mpsc::Sender<Signal>> for Recorder {
    fn from(signals: mpsc::Sender<Signal>) -> Self {
        Self { signals, promises: None }
    }
}

/// Tells that a run is safe on a disk, or why it will never be.
pub type Promise = oneshot::Receiver<Result<(), String>>;

type Given = HashMap<RunId, oneshot::Sender<Result<(), String>>>;

/// The runs that must be kept; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Promises(Arc<Mutex<Given>>);

impl Promises {
    /// Asks that a run which has not begun be kept whole. The answer comes after its end, or as soon as it cannot be.
    #[must_use]
    pub fn make(&self, run_id: RunId) -> Promise {
        let (sender, promise) = oneshot::channel();
        let mut promises = self.lock();
        // those that nobody waits for any more were made for runs that were refused
        promises.retain(|_, sender| !sender.is_closed());
        promises.insert(run_id, sender);
        promise
    }

    /// Whether a run must be kept.
    #[must_use]
    pub fn has(&self, run_id: RunId) -> bool {
        self.lock().contains_key(&run_id)
    }

    /// The run is kept, or will never be, and why.
    pub fn settle(&self, run_id: RunId, outcome: Result<(), String>) {
        if let Some(sender) = self.lock().remove(&run_id) {
            // whoever asked may have gone
            let _ = sender.send(outcome);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Given> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
