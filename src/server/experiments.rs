//! The experiments that this server runs.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use uuid::Uuid;

/// The experiments that this server runs, each with a channel that cancels it.
#[derive(Debug, Default)]
pub(crate) struct ActiveExperiments(Mutex<HashMap<Uuid, watch::Sender<bool>>>);

impl ActiveExperiments {
    /// Adds an experiment. The receiver becomes true when it is cancelled. Returns `None` if it is active already.
    pub(crate) fn add(&self, id: Uuid) -> Option<watch::Receiver<bool>> {
        let mut active = self.lock();
        if active.contains_key(&id) {
            return None;
        }
        let (cancel, cancelled) = watch::channel(false);
        active.insert(id, cancel);
        Some(cancelled)
    }

    /// Removes an experiment that has ended.
    pub(crate) fn remove(&self, id: Uuid) {
        self.lock().remove(&id);
    }

    /// Cancels an experiment, if it is active.
    pub(crate) fn cancel(&self, id: Uuid) {
        if let Some(cancel) = self.lock().get(&id) {
            cancel.send_replace(true);
        }
    }

    /// Returns true if this server runs the experiment.
    pub(crate) fn is_active(&self, id: Uuid) -> bool {
        self.lock().contains_key(&id)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, watch::Sender<bool>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
