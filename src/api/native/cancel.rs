//! `/api/v1/runs/{id}/cancel`: cancels an active run of this or another server.

use crate::events::{EndCause, RunId, RunStatus, Scope};
use crate::server::extract::Path;
use crate::server::peers::{ForwardHeaders, find_peer, find_recent, forward};
use crate::server::{ApiError, App, Problem};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

/// Reason recorded with a cancelled run.
const REASON: &str = "cancelled by a client";

/// Result of a cancellation.
#[derive(Debug, Serialize, ToSchema)]
pub struct CancelResponse {
    /// Id of the run.
    #[schema(value_type = String)]
    run_id: RunId,
    /// Number of tokens generated.
    generated: u32,
}

/// Cancels a run on the server that generates it. The events recorded until then are kept.
#[utoipa::path(post, path = "/api/v1/runs/{id}/cancel", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`")), responses(
    (status = 202, body = CancelResponse), (status = 404, body = Problem),
    (status = 409, body = Problem, description = "The run has ended"),
    (status = 503, body = Problem, description = "The server that generates the run cannot be reached")))]
pub async fn cancel(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    headers: ForwardHeaders,
) -> Result<Response, ApiError> {
    // Runs of this server can be cancelled while the database does not respond.
    for run_id in app.store()?.recorded_here(&scope, &id) {
        if let Some(response) = stop(&app, run_id).await {
            return Ok(response);
        }
    }
    let run = find_recent(&app, &scope, &id).await?;
    let run_id = run.run_id;
    if let Some(response) = stop(&app, run_id).await {
        return Ok(response);
    }
    if let Some(peer) = find_peer(&app, &scope, run_id, &headers).await? {
        let path = format!("/api/v1/runs/{run_id}/cancel");
        return forward(&app, &peer, (Method::POST, &path), &headers, Bytes::new()).await;
    }
    let reason = if run.status == RunStatus::Running { "is not active on any server" } else { "has ended" };
    Err(ApiError::conflict(format!("run '{id}' {reason}")))
}

/// Cancels a run of this server. Returns `None` if no engine generates it.
async fn stop(app: &App, run_id: RunId) -> Option<Response> {
    for entry in app.models().list() {
        if let Some(loaded) = entry.in_memory()
            && let Ok(progress) = loaded.engine().control(run_id).stop(EndCause::Cancel, REASON).await
        {
            let response = CancelResponse { run_id, generated: progress.generated };
            return Some((StatusCode::ACCEPTED, Json(response)).into_response());
        }
    }
    None
}
