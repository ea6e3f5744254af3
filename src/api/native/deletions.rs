//! `/api/v1/deletions`: deletions of runs, which can be undone.

use super::find_runs;
use crate::events::{RunId, Scope};
use crate::server::extract::{Json, Path};
use crate::server::{ApiError, App, Problem};
use crate::store::Deletion;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The runs to delete.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeletionRequest {
    /// `run_id` or `request_id` of each run, 1 to 100.
    #[schema(min_items = 1, max_items = 100)]
    runs: Vec<String>,
}

/// The deletions that can be undone.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeletionList {
    /// Oldest first.
    deletions: Vec<Deletion>,
}

/// The runs of an undone deletion.
#[derive(Debug, Serialize, ToSchema)]
pub struct RestoredRuns {
    /// Ids of the runs, oldest first.
    #[schema(value_type = Vec<String>)]
    runs: Vec<RunId>,
}

/// Deletes runs: all of them, or none after an error. They are hidden immediately, can be restored for 30 seconds, and
/// are then removed with everything recorded about them.
#[utoipa::path(post, path = "/api/v1/deletions", tag = "runs", request_body = DeletionRequest, responses(
    (status = 201, body = Deletion),
    (status = 400, body = Problem),
    (status = 404, body = Problem, description = "Unknown run"),
    (status = 409, body = Problem, description = "A run is active")))]
pub async fn create(
    State(app): State<App>,
    scope: Scope,
    Json(request): Json<DeletionRequest>,
) -> Result<(StatusCode, axum::Json<Deletion>), ApiError> {
    let runs = find_runs(&app, &scope, &request.runs).await?;
    let deletion = app.store()?.schedule_deletion(&scope, &runs, app.now()).await?;
    Ok((StatusCode::CREATED, axum::Json(deletion)))
}

/// Lists the deletions that can be undone.
#[utoipa::path(get, path = "/api/v1/deletions", tag = "runs", responses((status = 200, body = DeletionList)))]
pub async fn list(State(app): State<App>, scope: Scope) -> Result<axum::Json<DeletionList>, ApiError> {
    Ok(axum::Json(DeletionList { deletions: app.store()?.deletions(&scope, app.now()).await? }))
}

/// Undoes a deletion: its runs are visible again.
#[utoipa::path(delete, path = "/api/v1/deletions/{id}", tag = "runs",
    params(("id" = String, Path, description = "`deletion_id`")), responses(
    (status = 200, body = RestoredRuns),
    (status = 404, body = Problem, description = "Unknown deletion, or its 30 seconds are over")))]
pub async fn undo(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
) -> Result<axum::Json<RestoredRuns>, ApiError> {
    let runs = match id.parse() {
        Ok(deletion_id) => app.store()?.undo_deletion(&scope, deletion_id, app.now()).await?,
        Err(_) => Vec::new(),
    };
    if runs.is_empty() { Err(ApiError::not_found("deletion", id)) } else { Ok(axum::Json(RestoredRuns { runs })) }
}
