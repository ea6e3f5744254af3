//! The state of a model for the list of models and its events.

use crate::server::{Entry, ModelState};
use serde_json::{Value, json};

/// Returns a model's state for the list and the events.
pub(crate) fn status(entry: &Entry) -> Value {
    match &entry.state {
        _ if entry.is_asleep() => json!({ "value": "sleeping" }),
        ModelState::Unloaded => json!({ "value": "unloaded" }),
        ModelState::Loading(done) => json!({ "value": "loading", "progress": done }),
        ModelState::Ready(_) => json!({ "value": "loaded" }),
        ModelState::Unloading => json!({ "value": "unloading" }),
        ModelState::Failed(reason) => json!({ "value": "unloaded", "failed": true, "reason": reason }),
    }
}
