//! Redirects from a run to its neighbors in the filtered list.

use super::view::run_href;
use crate::events::{RunId, Scope};
use crate::server::{ApiError, App};
use crate::store::RunQuery;
use crate::ui::error;
use crate::ui::shell::runs_href;
use axum::extract::{Path, Query, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Redirect, Response};
use serde::Deserialize;

/// Maximum number of pages of the list that are searched for a neighbor.
const MAX_PAGES: usize = 10;

/// Query parameters of the redirects.
#[derive(Debug, Default, Deserialize)]
pub(in crate::ui) struct NeighborParams {
    #[serde(default)]
    q: String,
}

#[derive(Debug, Clone, Copy)]
enum Direction {
    Older,
    Newer,
}

/// `GET /runs/{id}/older`: redirects to the next older run in the list filtered by `q`.
pub(in crate::ui) async fn older(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(params): Query<NeighborParams>,
    headers: HeaderMap,
) -> Response {
    redirect_to_neighbor(&app, &scope, &id, &params.q, Direction::Older)
        .await
        .unwrap_or_else(|error| error::render(&headers, &error))
}

/// `GET /runs/{id}/newer`: redirects to the next newer run in the list filtered by `q`.
pub(in crate::ui) async fn newer(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(params): Query<NeighborParams>,
    headers: HeaderMap,
) -> Response {
    redirect_to_neighbor(&app, &scope, &id, &params.q, Direction::Newer)
        .await
        .unwrap_or_else(|error| error::render(&headers, &error))
}

/// Redirects to the neighbor of a run, or to the list if the run has no neighbor.
async fn redirect_to_neighbor(
    app: &App,
    scope: &Scope,
    id: &str,
    q: &str,
    direction: Direction,
) -> Result<Response, ApiError> {
    let run = app.find_run(scope, id).await?.run_id;
    let neighbor = match direction {
        Direction::Older => older_in_pages(app, scope, q, run).await?,
        Direction::Newer => app.store()?.newer_run(scope, q, run).await?,
    };
    let href = neighbor.map_or_else(|| runs_href(q), |run| run_href(run, q));
    Ok(Redirect::to(&href).into_response())
}

/// Returns the next older run.
async fn older_in_pages(app: &App, scope: &Scope, q: &str, run: RunId) -> Result<Option<RunId>, ApiError> {
    let store = app.store()?;
    let mut before = Some(run);
    for _ in 0..MAX_PAGES {
        let page = store.runs(scope, &RunQuery { q: q.to_owned(), before, limit: 1 }).await?;
        before = page.next;
        if let Some(run) = page.runs.into_iter().next() {
            return Ok(Some(run.run_id));
        }
        if before.is_none() {
            break;
        }
    }
    Ok(None)
}
