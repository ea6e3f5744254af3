//! Registry of runs that clients can resume.

use super::run::StreamedRun;
use crate::events::Scope;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Runs by `request_id`; cheap to clone.
#[derive(Clone, Default)]
pub(super) struct StreamedRuns(Arc<Inner>);

#[derive(Default)]
struct Inner {
    runs: Mutex<HashMap<String, Arc<StreamedRun>>>,
    /// Ids reserved for runs that are about to start.
    reserved: Mutex<HashSet<String>>,
}

/// A reserved request id; dropping it releases the id.
pub(super) struct ReservedId<'a> {
    streamed_runs: &'a StreamedRuns,
    id: String,
}

impl StreamedRuns {
    /// Reserves an id for a run that is about to start; returns `None` if another run has it.
    pub(super) fn reserve(&self, id: &str) -> Option<ReservedId<'_>> {
        let mut reserved = self.0.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        if self.find(&Scope::All, id).is_some() || !reserved.insert(id.to_owned()) {
            return None;
        }
        Some(ReservedId { streamed_runs: self, id: id.to_owned() })
    }

    pub(super) fn register(&self, run: &Arc<StreamedRun>) {
        self.lock().insert(run.request_id.clone(), Arc::clone(run));
    }

    pub(super) fn deregister(&self, run: &Arc<StreamedRun>) {
        let mut runs = self.lock();
        if runs.get(&run.request_id).is_some_and(|known| Arc::ptr_eq(known, run)) {
            runs.remove(&run.request_id);
        }
    }

    /// Returns the run with that `request_id` or `run_id`, if the scope covers it.
    pub(super) fn find(&self, scope: &Scope, id: &str) -> Option<Arc<StreamedRun>> {
        let runs = self.lock();
        let found = runs.get(id).or_else(|| runs.values().find(|run| run.id.to_string() == id));
        found.filter(|run| scope.includes(run.properties.owner.as_ref())).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<StreamedRun>>> {
        self.0.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ReservedId<'_> {
    fn drop(&mut self) {
        self.streamed_runs.0.reserved.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}
