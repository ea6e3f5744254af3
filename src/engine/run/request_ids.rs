//! Request ids of active runs. Each active run of the process has its own id, since the workers of mods serve all
//! engines of the process and find the state of a run by its request id.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

static ACTIVE: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

/// Reservation of a request id for one run; dropping it releases the id.
#[derive(Debug)]
pub struct ActiveRequestId(String);

impl ActiveRequestId {
    /// Reserves an id. Returns `None` if another run has it.
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
