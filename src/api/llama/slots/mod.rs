//! `/slots` and `/sessions`: the state of slots, their snapshots, and the snapshots stored by number or in files.

mod actions;
mod files;
mod list;
mod request;
mod response;
mod sessions;

use crate::server::{ApiError, App};
use utoipa_axum::router::OpenApiRouter;

/// Checks that the routes of slots and sessions are enabled. Those of files depend on `--slot-save-path` instead.
fn require_slots(app: &App) -> Result<(), ApiError> {
    if app.config().server.routes.slots {
        return Ok(());
    }
    Err(ApiError::not_supported("the routes of slots are disabled; start the server without --no-slots"))
}

/// Returns the routes.
pub(super) fn router() -> OpenApiRouter<App> {
    list::router().merge(actions::router()).merge(sessions::router())
}
