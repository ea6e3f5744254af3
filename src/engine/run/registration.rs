//! Registration of a run until it ends: reserves its request id, counts it as a run of the engine, and reports its end
//! if the decode thread panics.

use super::request_ids::ActiveRequestId;
use crate::engine::recording::durability::PanicGuard;
use std::sync::Arc;

/// Registration of one run.
pub struct Registration {
    /// Reserves the request id.
    active_id: Option<ActiveRequestId>,
    panic_guard: PanicGuard,
    /// The engine counts the clones of this reference.
    _run_counter: Arc<()>,
}

impl Registration {
    /// Registers a run.
    pub fn new(active_id: ActiveRequestId, panic_guard: PanicGuard, run_counter: Arc<()>) -> Self {
        Self { active_id: Some(active_id), panic_guard, _run_counter: run_counter }
    }

    /// Releases the request id. Called before the end is sent to the client, which may then use the id again
    /// immediately.
    pub fn release_id(&mut self) {
        self.active_id = None;
    }

    /// Ends the registration of a run whose end is recorded.
    pub fn end(self) {
        self.panic_guard.disarm();
    }
}
