//! Request ids of active runs. A mod keeps its state by request id, and its workers serve every engine of the process.
//! Therefore no two active runs of the process may have the same id.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

static ACTIVE: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

/// A request id that is reserved for one run until this is dropped.
#[derive(Debug)]
pub struct ActiveRequestId(String);

impl ActiveRequestId {
    /// Reserves an id. Returns `None` while another run has it.
    pub fn reserve(id: &str) -> Option<Self> {
        active().insert(id.to_owned()).then(|| Self(id.to_owned()))
    }
}

impl Drop for ActiveRequestId {
    fn drop(&mut self) {
        active().remove(&self.0);
    }
}

fn active() -> MutexGuard<'static, HashSet<String>> {
    ACTIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::ActiveRequestId;

    #[test]
    fn id_is_free_after_its_run_ends() {
        let first = ActiveRequestId::reserve("request-ids-test");
        assert!(first.is_some() && ActiveRequestId::reserve("request-ids-test").is_none());
        drop(first);
        assert!(ActiveRequestId::reserve("request-ids-test").is_some());
    }
}
