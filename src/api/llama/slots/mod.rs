//! `/slots` and `/sessions`: the state of slots, their snapshots, and the snapshots stored by number or in files.

mod actions;
mod files;
mod list;
mod request;
mod response;
mod sessions;

use crate::server::App;
use utoipa_axum::router::OpenApiRouter;

/// Returns the routes.
pub(super) fn router() -> OpenApiRouter<App> {
    list::router().merge(actions::router()).merge(sessions::router())
}
