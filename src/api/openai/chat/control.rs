//! Control of an answer during its generation: ends its reasoning.

use crate::api::shared::Fields;
use crate::api::shared::error::OpenAiError;
use crate::api::shared::{self, fields::invalid_value};
use crate::engine::EndReasoningOutcome;
use crate::events::{RunId, Scope};
use crate::server::peers::{ForwardHeaders, find_peer, find_recent, forward};
use crate::server::{ApiError, App};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::Method;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// An action on an active answer.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct ChatControlRequest {
    /// The answer's id.
    id: String,
    /// Always `reasoning_end`.
    action: String,
}

/// Result of a control request.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ControlResponse {
    success: bool,
    /// The cause of a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'static str>,
}

/// Ends the reasoning of an active answer, as if its budget were spent. `id` is the answer's id. Its request must have
/// set `"reasoning_control": true` or a reasoning budget. An answer that is not reasoning is not changed.
#[utoipa::path(post, path = "/v1/chat/completions/control", tag = "openai",
    request_body(content = ChatControlRequest, content_type = "application/json", example = json!({"id": "chatcmpl-…", "action": "reasoning_end"})),
    responses((status = 200, body = ControlResponse), (status = 400, description = "A field is invalid; `error.param` names it")))]
pub(super) async fn control(
    State(app): State<App>,
    scope: Scope,
    headers: ForwardHeaders,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, OpenAiError> {
    let bytes = body?;
    let body = shared::parse_json(&bytes)?;
    let fields = Fields::new(&body)?;
    let id = fields.text("id")?.filter(|id| !id.is_empty());
    let id = id.ok_or_else(|| ApiError::invalid("id", "`id` is missing; send the id of an answer"))?;
    match fields.get("action") {
        Some(Value::String(action)) if action == "reasoning_end" => {}
        other => return Err(invalid_value("action", "\"reasoning_end\"", other.unwrap_or(&Value::Null)).into()),
    }
    // In all protocols the answer's id ends with the run's id.
    let run = ["chatcmpl-", "resp_", "msg_"].iter().find_map(|prefix| id.strip_prefix(prefix)).unwrap_or(id);
    let run: Option<RunId> = run.parse().ok();
    let outcome = match run {
        Some(run) => end_reasoning(&app, &scope, run).await?,
        None => None,
    };
    if let (None, Some(run)) = (&outcome, run)
        && find_recent(&app, &scope, &run.to_string()).await.is_ok()
        && let Some(peer) = find_peer(&app, &scope, run, &headers).await?
    {
        return Ok(forward(&app, &peer, (Method::POST, "/v1/chat/completions/control"), &headers, bytes).await?);
    }
    let message = match outcome {
        Some(EndReasoningOutcome::Ended) => None,
        Some(EndReasoningOutcome::NotReasoning) => Some("the answer is not reasoning"),
        Some(EndReasoningOutcome::NoBudget) => Some("the request did not set \"reasoning_control\": true"),
        None => Some("no active answer has this id"),
    };
    Ok(Json(ControlResponse { success: message.is_none(), message }).into_response())
}

async fn end_reasoning(app: &App, scope: &Scope, run: RunId) -> Result<Option<EndReasoningOutcome>, ApiError> {
    // Checks the owner. An active run is unstored, because not all of it is in the database yet.
    if *scope != Scope::All && app.store()?.unstored(scope, run).is_none() {
        return Ok(None);
    }
    for entry in app.models().list() {
        if let Some(loaded) = entry.in_memory()
            && let Ok(outcome) = loaded.engine().control(run).end_reasoning().await
        {
            return Ok(Some(outcome));
        }
    }
    Ok(None)
}
