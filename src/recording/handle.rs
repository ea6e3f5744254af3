use super::Signal;
use crate::events::{RunId, Scope, Tenant};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{mpsc, oneshot, watch};

/// The engine's side of the recorder: its channel and the registries that both share; cheap to clone. A handle created from a
/// channel alone gives no durability acks.
#[derive(Debug, Clone)]
pub struct RecorderHandle {
    /// Receives the signals of every recorded run.
    pub signals: mpsc::Sender<Signal>,
    /// Requests for durability acks; `None` if the recorder cannot give any.
    pub durability_acks: Option<DurabilityAcks>,
    /// List of recorded runs that are not stored yet; `None` if they are never read back.
    pub unstored: Option<UnstoredRuns>,
}

impl From<mpsc::Sender<Signal>> for RecorderHandle {
    fn from(signals: mpsc::Sender<Signal>) -> Self {
        Self { signals, durability_acks: None, unstored: None }
    }
}

/// Reason why a run will never be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotStored {
    /// Neither the database nor the disk accepts it.
    #[error("neither the database nor the disk accepts it")]
    NoRoom,
    /// Neither the database nor the disk accepts it, and too many runs wait in memory.
    #[error("neither the database nor the disk accepts it, and memory is full")]
    MemoryFull,
    /// A part of the run was lost.
    #[error("a part of it could neither be stored nor spooled")]
    PartLost,
    /// The database rejected a part of the run, which is kept in a file.
    #[error("the database rejected a part of it, which is kept in a file of the spool folder")]
    Rejected,
    /// The run was removed while it was generated.
    #[error("it was removed")]
    Removed,
    /// The recorder failed on the run.
    #[error("the recorder failed on it")]
    RecorderFailed,
}

/// Result of a durability request: the run is stored on disk, or the reason why it never will be.
pub type DurabilityAck = oneshot::Receiver<Result<(), NotStored>>;

type AckSenders = HashMap<RunId, oneshot::Sender<Result<(), NotStored>>>;

/// The runs for which a client waits for a durability ack; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct DurabilityAcks(Arc<Mutex<AckSenders>>);

impl DurabilityAcks {
    /// Requests an ack for a run that has not started. The ack arrives after the run's end, or as soon as storing
    /// fails.
    #[must_use]
    pub fn request(&self, run_id: RunId) -> DurabilityAck {
        let (sender, ack) = oneshot::channel();
        let mut senders = self.lock();
        // Remove requests without a receiver: their runs were rejected.
        senders.retain(|_, sender| !sender.is_closed());
        senders.insert(run_id, sender);
        ack
    }

    /// Returns true if an ack is requested for the run.
    #[must_use]
    pub fn is_requested(&self, run_id: RunId) -> bool {
        self.lock().contains_key(&run_id)
    }

    /// Sends the ack: success, or the reason why the run will never be stored.
    pub fn resolve(&self, run_id: RunId, outcome: Result<(), NotStored>) {
        if let Some(sender) = self.lock().remove(&run_id) {
            // The receiver may be dropped.
            let _ = sender.send(outcome);
        }
    }

    fn lock(&self) -> MutexGuard<'_, AckSenders> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The recorded runs of this process that are not completely stored; cheap to clone.
///
/// The engine inserts a run before any client knows its id, and the recorder removes it after storing its last row. So
/// readers can tell which runs are missing or incomplete in the database.
#[derive(Debug, Clone, Default)]
pub struct UnstoredRuns(Arc<Mutex<HashMap<RunId, UnstoredEntry>>>);

#[derive(Debug)]
struct UnstoredEntry {
    request_id: String,
    owner: Option<Tenant>,
    is_over: Arc<AtomicBool>,
    /// Dropped with the entry, which wakes the waiting tasks.
    removed: watch::Sender<()>,
}

/// A run of [`UnstoredRuns`].
#[derive(Debug)]
pub struct UnstoredRun {
    /// Id of the run.
    pub run_id: RunId,
    is_over: Arc<AtomicBool>,
    removed: watch::Receiver<()>,
}

impl UnstoredRuns {
    /// Adds a run. `is_over` is set before the client receives the end of the run.
    pub fn insert(&self, run_id: RunId, request_id: String, owner: Option<Tenant>, is_over: Arc<AtomicBool>) {
        self.lock().insert(run_id, UnstoredEntry { request_id, owner, is_over, removed: watch::Sender::new(()) });
    }

    /// Removes a run that is completely stored, or whose remaining data was lost.
    pub fn remove(&self, run_id: RunId) {
        self.lock().remove(&run_id);
    }

    /// Returns the run with this id, if `scope` covers it.
    #[must_use]
    pub fn get(&self, scope: &Scope, run_id: RunId) -> Option<UnstoredRun> {
        let runs = self.lock();
        runs.get(&run_id)
            .filter(|entry| scope.includes(entry.owner.as_ref()))
            .map(|entry| entry.to_unstored_run(run_id))
    }

    /// Returns the run with this `run_id`, and all runs with this `request_id`, as far as `scope` covers them.
    #[must_use]
    pub fn find(&self, scope: &Scope, id: &str) -> Vec<UnstoredRun> {
        let run_id: Option<RunId> = id.parse().ok();
        let runs = self.lock();
        let found = runs.iter().filter(|(known, entry)| {
            (Some(**known) == run_id || entry.request_id == id) && scope.includes(entry.owner.as_ref())
        });
        found.map(|(&run_id, entry)| entry.to_unstored_run(run_id)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, UnstoredEntry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnstoredEntry {
    fn to_unstored_run(&self, run_id: RunId) -> UnstoredRun {
        UnstoredRun { run_id, is_over: Arc::clone(&self.is_over), removed: self.removed.subscribe() }
    }
}

impl UnstoredRun {
    /// Returns true once the client may have received the end of the run.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Waits until the run is stored or lost.
    pub async fn wait_until_stored(mut self) {
        // No value is ever sent: the error of the dropped sender wakes the receiver.
        while self.removed.changed().await.is_ok() {}
    }
}
