//! `/api/v1/runs/{id}/feedback`: feedback on a run from users and programs.

use crate::api::shared::{self, Fields, feedback};
use crate::events::Scope;
use crate::server::extract::Path;
use crate::server::{ApiError, App, Caller, Problem};
use crate::store::Feedback;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Feedback on a run.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub struct FeedbackRequest {
    /// Rating from -1 (bad) to 1 (good).
    rating: f32,
    /// Comment, up to 10,000 characters.
    text: Option<String>,
    /// Index of the answer's token that the feedback refers to, from 0.
    position: Option<u32>,
}

/// The feedback on a run.
#[derive(Debug, Serialize, ToSchema)]
pub struct FeedbackList {
    /// Oldest first.
    feedback: Vec<Feedback>,
}

/// Lists the feedback on a run.
#[utoipa::path(get, path = "/api/v1/runs/{id}/feedback", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`")), responses(
    (status = 200, body = FeedbackList), (status = 404, body = Problem)))]
pub async fn list(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
) -> Result<Json<FeedbackList>, ApiError> {
    let run = app.find_run(&scope, &id).await?;
    Ok(Json(FeedbackList { feedback: app.store()?.feedback(&scope, run.run_id).await? }))
}

/// Adds feedback on a run; the dashboard shows it with the run.
#[utoipa::path(post, path = "/api/v1/runs/{id}/feedback", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`")), request_body = FeedbackRequest, responses(
    (status = 201, body = Feedback), (status = 400, body = Problem), (status = 404, body = Problem)))]
pub async fn add(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<Feedback>), ApiError> {
    let body = shared::parse_json(&body?)?;
    let feedback = feedback::parse(Fields::new(&body)?)?;
    let stored = feedback::store(&app, &id, feedback, &caller).await?;
    Ok((StatusCode::CREATED, Json(stored)))
}
