//! The native routes under `/api/v1`: runs and everything recorded of them, and the mods that runs can name.
//!
//! One file a resource. Each route reads the store, or the hub of running runs, and writes what it found; nothing is
//! kept here. A run is named by its `run_id` or by the client's `request_id`.

mod alternatives;
mod attention;
mod columns;
mod events;
mod failure;
mod follow;
mod live;
mod map;
mod mods;
mod runs;

use super::{ApiError, App};
use crate::store::RunSummary;
use std::ops::Range;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes.
pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(runs::list))
        .routes(routes!(live::changes))
        .routes(routes!(runs::show, runs::delete))
        .routes(routes!(columns::show))
        .routes(routes!(events::list))
        .routes(routes!(alternatives::list))
        .routes(routes!(attention::show))
        .routes(routes!(mods::list))
}

/// The run of that id or request id.
async fn find(app: &App, id: &str) -> Result<RunSummary, ApiError> {
    app.store()?.find(id).await?.ok_or_else(|| ApiError::not_found("run", id))
}

/// The events `from..to` of a query, either end open.
fn event_range(from: Option<i32>, to: Option<i32>) -> Result<Range<i32>, ApiError> {
    let range = from.unwrap_or(0)..to.unwrap_or(i32::MAX);
    if range.start < 0 || range.end < range.start {
        let detail = format!("from and to must be 0 <= from <= to, got {} and {}", range.start, range.end);
        return Err(ApiError::invalid("from", detail));
    }
    Ok(range)
}
