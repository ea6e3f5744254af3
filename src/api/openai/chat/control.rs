//! What is said to an answer that is being written: end the thought.

use crate::api::wire::{self, fields::wrong};
use crate::api::{ApiError, App, OpenAiError, wire::Fields};
use crate::engine::EndThinking;
use crate::events::RunId;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// Whether it was done.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Done {
    success: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'static str>,
}

/// Ends the thought of an answer that is being written, as its budget would. `id` is the answer's, and its request must have
/// said `"reasoning_control": true` or had a budget. An answer that does not think goes on as it was.
#[utoipa::path(post, path = "/v1/chat/completions/control", tag = "openai",
    request_body(content = Value, content_type = "application/json", example = json!({"id": "chatcmpl-…", "action": "reasoning_end"})),
    responses((status = 200, body = Done), (status = 400, description = "A field is wrong; `error.param` names it")))]
pub(super) async fn control(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Done>, OpenAiError> {
    let body = wire::json(&body?)?;
    let fields = Fields::new(&body)?;
    let id = fields.text("id")?.filter(|id| !id.is_empty());
    let id = id.ok_or_else(|| ApiError::invalid("id", "id is missing; it takes the id of an answer"))?;
    match fields.get("action") {
        Some(Value::String(action)) if action == "reasoning_end" => {}
        other => return Err(wrong("action", "\"reasoning_end\"", other.unwrap_or(&Value::Null)).into()),
    }
    let message = match end_thought(&app, id).await {
        Some(EndThinking::Ended) => None,
        Some(EndThinking::NotThinking) => Some("the answer is not thinking"),
        Some(EndThinking::NoBudget) => Some("the request did not say \"reasoning_control\": true"),
        None => Some("no answer with this id is being written"),
    };
    Ok(Json(Done { success: message.is_none(), message }))
}

async fn end_thought(app: &App, id: &str) -> Option<EndThinking> {
    // The ids of all dialects end with the run's.
    let run = ["chatcmpl-", "resp_", "msg_"].iter().find_map(|prefix| id.strip_prefix(prefix)).unwrap_or(id);
    let run: RunId = run.parse().ok()?;
    for entry in app.models().list() {
        if let Some(loaded) = entry.ready()
            && let Ok(thought) = loaded.engine().control(run).end_thinking().await
        {
            return Some(thought);
        }
    }
    None
}
