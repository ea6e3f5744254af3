use super::{RunId, Signal};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{mpsc, oneshot, watch};

/// The way to the recorder; cheap to clone. A channel alone will do where no run must be kept.
#[derive(Debug, Clone)]
pub struct Recorder {
    /// Takes the signals of every recorded run.
    pub signals: mpsc::Sender<Signal>,
    /// The runs that must be kept, where somebody can promise that.
    pub promises: Option<DurabilityAcks>,
    /// List of recorded runs that are not stored yet; `None` if they are never read back.
    pub unstored: Option<UnstoredRuns>,
}

impl From<mpsc::Sender<Signal>> for Recorder {
    fn from(signals: mpsc::Sender<Signal>) -> Self {
        Self { signals, promises: None, unstored: None }
    }
}

/// Tells that a run is safe on a disk, or why it will never be.
pub type DurabilityAck = oneshot::Receiver<Result<(), String>>;

type Given = HashMap<RunId, oneshot::Sender<Result<(), String>>>;

/// The runs that must be kept; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct DurabilityAcks(Arc<Mutex<Given>>);

impl DurabilityAcks {
    /// Asks that a run which has not begun be kept whole. The answer comes after its end, or as soon as it cannot be.
    #[must_use]
    pub fn make(&self, run_id: RunId) -> DurabilityAck {
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

/// The recorded runs of this process that are not stored as a whole yet; cheap to clone.
///
/// The engine inserts a run before any client knows its id, and the recorder removes it with its last row. A reader
/// thus knows which runs the database may not have, or not whole.
#[derive(Debug, Clone, Default)]
pub struct UnstoredRuns(Arc<Mutex<HashMap<RunId, Entry>>>);

#[derive(Debug)]
struct Entry {
    request_id: String,
    is_over: Arc<AtomicBool>,
    /// Dropped with the entry, which wakes those who wait.
    removed: watch::Sender<()>,
}

/// A run of [`UnstoredRuns`].
#[derive(Debug)]
pub struct UnstoredRun {
    /// Its id.
    pub run_id: RunId,
    is_over: Arc<AtomicBool>,
    removed: watch::Receiver<()>,
}

impl UnstoredRuns {
    /// Adds a run. `is_over` is set before its client receives the end.
    pub fn insert(&self, run_id: RunId, request_id: String, is_over: Arc<AtomicBool>) {
        self.lock().insert(run_id, Entry { request_id, is_over, removed: watch::Sender::new(()) });
    }

    /// Removes a run: all of it is stored, or the rest never will be.
    pub fn remove(&self, run_id: RunId) {
        self.lock().remove(&run_id);
    }

    /// Returns the run with that id.
    #[must_use]
    pub fn get(&self, run_id: RunId) -> Option<UnstoredRun> {
        self.lock().get(&run_id).map(|entry| entry.run(run_id))
    }

    /// Returns the run with that `run_id`, and all runs with that `request_id`.
    #[must_use]
    pub fn find(&self, id: &str) -> Vec<UnstoredRun> {
        let run_id: Option<RunId> = id.parse().ok();
        let runs = self.lock();
        let found = runs.iter().filter(|(known, entry)| Some(**known) == run_id || entry.request_id == id);
        found.map(|(&run_id, entry)| entry.run(run_id)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn run(&self, run_id: RunId) -> UnstoredRun {
        UnstoredRun { run_id, is_over: Arc::clone(&self.is_over), removed: self.removed.subscribe() }
    }
}

impl UnstoredRun {
    /// Returns true when its client may know that it has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Waits until it is stored, or never will be.
    pub async fn stored(mut self) {
        // Nothing is ever sent: the error of a dropped sender is the news.
        while self.removed.changed().await.is_ok() {}
    }
}
