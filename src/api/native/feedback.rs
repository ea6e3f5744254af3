//! `/api/v1/runs/{id}/feedback`: feedback of people and programs on a run.

use crate::api::extract::Path;
use crate::api::shared::fields::invalid_value;
use crate::api::shared::{self, Fields};
use crate::api::{ApiError, App, Caller, Problem};
use crate::events::Scope;
use crate::store::{Feedback, NewFeedback};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Maximum length of the text in characters.
const LONGEST: usize = 10_000;

/// Feedback on a run.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub struct FeedbackRequest {
    /// Rating from -1 (bad) to 1 (good).
    rating: f32,
    /// Comment, up to 10 000 characters.
    text: Option<String>,
    /// Index of the token in the answer that it refers to, from 0.
    position: Option<u32>,
}

/// The feedback on a run.
#[derive(Debug, Serialize, ToSchema)]
pub struct FeedbackList {
    /// Oldest first.
    #[schema(value_type = Vec<Object>)]
    feedback: Vec<Feedback>,
}

/// Parses feedback; `rating` is required.
///
/// # Errors
/// A field is missing or invalid; the error names it.
pub(in crate::api) fn read(fields: Fields<'_>) -> Result<NewFeedback, ApiError> {
    let rating = fields.number("rating", -1.0..=1.0)?;
    let rating =
        rating.ok_or_else(|| ApiError::invalid("rating", "`rating` is missing; send a number between -1 and 1"))?;
    let text = fields.text("text")?.map(str::to_owned);
    if let Some(text) = text.as_ref().filter(|text| text.chars().count() > LONGEST) {
        let expected = format!("a string of at most {LONGEST} characters");
        return Err(invalid_value("text", &expected, &text.chars().take(40).collect::<String>().into()));
    }
    let position = fields.integer("position", 0..=i64::from(i32::MAX))?.map(|position| position as u32);
    Ok(NewFeedback { rating, text, position, user_label: None })
}

/// Stores feedback on a run, which may have just started.
///
/// # Errors
/// Unknown run, or the database is unavailable.
pub(in crate::api) async fn keep(
    app: &App,
    id: &str,
    mut given: NewFeedback,
    caller: &Caller,
) -> Result<Feedback, ApiError> {
    given.user_label.clone_from(&caller.label);
    let run = app.find_run(&caller.scope, id).await?;
    let kept = app.store()?.add_feedback(&caller.scope, run.run_id, &given, app.now()).await?;
    kept.ok_or_else(|| ApiError::not_found("run", id))
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
    (status = 201, description = "The stored feedback, same fields as in the list", content_type = "application/json"), (status = 400, body = Problem), (status = 404, body = Problem)))]
pub async fn add(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<Feedback>), ApiError> {
    let body = shared::parse_json(&body?)?;
    let given = read(Fields::new(&body)?)?;
    let kept = keep(&app, &id, given, &caller).await?;
    Ok((StatusCode::CREATED, Json(kept)))
}
