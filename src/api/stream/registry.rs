//! The runs that a client may come back to.

use super::run::Run;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Runs by their `request_id`.
#[derive(Default)]
pub(in crate::api) struct Streams {
    runs: Mutex<HashMap<String, Arc<Run>>>,
    /// Names of runs that are about to begin.
    taken: Mutex<HashSet<String>>,
}

/// A name that no other run can have, as long as it lives.
pub(super) struct Name<'a> {
    streams: &'a Streams,
    id: String,
}

impl Streams {
    /// Keeps a name for a run that is about to begin; `None` when another run has it.
    pub(super) fn take(&self, id: &str) -> Option<Name<'_>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if self.find(id).is_some() || !taken.insert(id.to_owned()) {
            return None;
        }
        Some(Name { streams: self, id: id.to_owned() })
    }

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

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Run>>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Name<'_> {
    fn drop(&mut self) {
        self.streams.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}
