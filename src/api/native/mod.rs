//! The native routes under `/api/v1`: runs and everything recorded about them.
//!
//! One file per resource. Routes read the store or the updates of active runs and keep no state. A run is identified by
//! its `run_id` or by the client's `request_id`.

mod alternatives;
mod attention;
mod cancel;
mod columns;
mod control_vectors;
mod deletions;
mod events;
mod experiments;
mod family;
mod feedback;
mod filters;
mod forks;
mod hidden_states;
mod images;
mod live;
mod notes;
mod recorded_request;
mod reruns;
mod runs;
mod statistics;
mod tags;

use crate::events::{RunId, Scope};
use crate::server::{Access, ApiError, App, Protocol};
use std::ops::Range;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the native routes.
pub(super) fn protocol() -> Protocol {
    let routes = OpenApiRouter::new()
        .routes(routes!(runs::list))
        .routes(routes!(control_vectors::list))
        .routes(routes!(live::changes))
        .routes(routes!(tags::change))
        .routes(routes!(deletions::list, deletions::create))
        .routes(routes!(deletions::undo))
        .routes(routes!(filters::list, filters::save))
        .routes(routes!(filters::remove))
        .routes(routes!(statistics::show))
        .routes(routes!(runs::show, runs::delete))
        .routes(routes!(cancel::cancel))
        .routes(routes!(feedback::list, feedback::add))
        .routes(routes!(notes::list, notes::set))
        .routes(routes!(columns::show))
        .routes(routes!(images::show))
        .routes(routes!(experiments::show, experiments::remove))
        .routes(routes!(experiments::cancel))
        .routes(routes!(experiments::csv::export))
        .routes(routes!(experiments::parquet::export))
        .routes(routes!(experiments::score))
        .routes(routes!(family::show))
        .routes(routes!(events::list))
        .routes(routes!(alternatives::list))
        .routes(routes!(attention::show));
    let runs = OpenApiRouter::new()
        .routes(routes!(reruns::run))
        .routes(routes!(forks::fork))
        .routes(routes!(hidden_states::compute))
        .routes(routes!(experiments::list, experiments::create))
        .routes(routes!(experiments::resume));
    Protocol::native(&["/api"]).routes(Access::Key, routes).routes(Access::Run, runs)
}

/// Returns the ids of the runs that the field `runs` of a request names.
async fn find_runs(app: &App, scope: &Scope, names: &[String]) -> Result<Vec<RunId>, ApiError> {
    /// Maximum runs of one request.
    const MAX_RUNS: usize = 100;
    if !(1..=MAX_RUNS).contains(&names.len()) {
        return Err(ApiError::invalid("runs", format!("`runs` must have 1 to {MAX_RUNS} ids, got {}", names.len())));
    }
    let mut runs = Vec::with_capacity(names.len());
    for name in names {
        runs.push(app.find_run(scope, name).await?.run_id);
    }
    Ok(runs)
}

/// Parses the events `from..to` of a query; both ends are optional.
fn event_range(from: Option<i32>, to: Option<i32>) -> Result<Range<i32>, ApiError> {
    let range = from.unwrap_or(0)..to.unwrap_or(i32::MAX);
    if range.start < 0 || range.end < range.start {
        let detail = format!("`from` and `to` must satisfy 0 <= from <= to, got {} and {}", range.start, range.end);
        return Err(ApiError::invalid("from", detail));
    }
    Ok(range)
}
