//! The runs that a client may come back to.

use super::run::Run;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Runs by their `request_id`.
#[derive(Default)]
pub(in crate::api) struct Streams(Mutex<HashMap<String, Arc<Run>>>);

impl Streams {
    pub(super) fn enter(&self, run: &Arc<Run>) {
        self.lock().insert(run.request_id.clone(), Arc::clone(run));
    }

    pub(super) fn leave(&self, run: &Arc<Run>) {
        let mut runs = self.lock();
        if runs.get(&run.request_id).is_some_and(|known| Arc::ptr_eq(known, run)) {
            runs.remove(&run.request_id);
        }
    }

    /// The run of that id, by the client's name for it or by ours.
    pub(super) fn find(&self, id: &str) -> Option<Arc<Run>> {
        let runs = self.lock();
        runs.get(id).or_else(|| runs.values().find(|run| run.id.to_string() == id)).cloned()
    }

    /// Whether a run of that id goes on, or ended a little while ago.
    pub(in crate::api) fn knows(&self, id: &str) -> bool {
        self.find(id).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Run>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
