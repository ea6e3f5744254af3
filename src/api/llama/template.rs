//! Renders chat prompts without running them: their text or token count.

use crate::api::shared::body::ChatCompletionRequest;
use crate::api::shared::chat::{Conversation, InputTokensResponse, PreparedChat};
use crate::api::shared::error::{LlamaError, OpenAiError};
use crate::api::shared::{Fields, parse_for_model};
use crate::server::{ApiError, App};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(apply_template))
}

/// Returns the routes that count tokens, with and without the `/v1` prefix.
pub(super) fn input_tokens_router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(input_tokens))
        .route("/chat/completions/input_tokens", axum::routing::post(input_tokens))
}

/// The prompt of a conversation.
#[derive(Debug, Serialize, ToSchema)]
struct ApplyTemplateResponse {
    /// Text of the prompt.
    prompt: String,
}

/// Renders `messages` with the model's chat template and returns the prompt. Accepts the fields of a chat completion.
#[utoipa::path(post, path = "/apply-template", tag = "llama-server",
    request_body(content = ChatCompletionRequest, content_type = "application/json"),
    responses((status = 200, body = ApplyTemplateResponse),
              (status = 400, description = "The template rejected the messages")))]
async fn apply_template(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<ApplyTemplateResponse>, LlamaError> {
    Ok(Json(ApplyTemplateResponse { prompt: prepare(&app, &body?).await?.text }))
}

/// Counts the prompt tokens of a chat completion.
#[utoipa::path(post, path = "/v1/chat/completions/input_tokens", tag = "openai",
    request_body(content = ChatCompletionRequest, content_type = "application/json"),
    responses((status = 200, body = InputTokensResponse),
              (status = 400, description = "The template rejected the messages")))]
async fn input_tokens(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<InputTokensResponse>, OpenAiError> {
    Ok(Json(InputTokensResponse::new(&prepare(&app, &body?).await?)))
}

/// Parses and renders a conversation.
async fn prepare(app: &App, body: &[u8]) -> Result<PreparedChat, ApiError> {
    let (body, loaded) = parse_for_model(app, body).await?;
    Conversation::parse(app, Fields::new(&body)?)?.prepare(&loaded)
}
