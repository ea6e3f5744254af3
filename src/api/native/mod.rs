//! The native routes under `/api/v1`: runs and everything recorded of them.
//!
//! One file a resource. Each route reads the store, or the hub of running runs, and writes what it found; nothing is
//! kept here. A run is named by its `run_id` or by the client's `request_id`.

mod alternatives;
mod attention;
mod columns;
mod events;
mod failure;
pub(super) mod feedback;
mod follow;
mod live;
mod map;
mod position;
mod reruns;
mod runs;

use super::{ApiError, App};
use crate::events::RunId;
use crate::store::RunSummary;
use std::ops::Range;
use std::time::{Duration, Instant};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes.
pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(runs::list))
        .routes(routes!(reruns::run))
        .routes(routes!(live::changes))
        .routes(routes!(runs::show, runs::delete))
        .routes(routes!(feedback::list, feedback::add))
        .routes(routes!(columns::show))
        .routes(routes!(events::list))
        .routes(routes!(alternatives::list))
        .routes(routes!(attention::show))
}

/// How long a run that has just begun may take to be stored.
const FIRST_FLUSH: Duration = Duration::from_secs(2);
/// How often it is looked for in that time.
const LOOK: Duration = Duration::from_millis(25);

/// The run of that id or request id. Waits for a run that has begun and is not stored yet.
async fn find(app: &App, id: &str) -> Result<RunSummary, ApiError> {
    let (store, live) = (app.store()?, app.live()?);
    let began = Instant::now();
    loop {
        // Looked at first: a run that ends in between is stored by then.
        let begun = id.parse::<RunId>().is_ok_and(|id| live.running().contains(&id));
        if let Some(run) = store.find(id).await? {
            return Ok(run);
        }
        if !begun {
            return Err(ApiError::not_found("run", id));
        }
        if began.elapsed() > FIRST_FLUSH {
            return Err(ApiError::unavailable(format!("run {id} has begun and is not stored yet")).retry_after(1));
        }
        tokio::time::sleep(LOOK).await;
    }
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
