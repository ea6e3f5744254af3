//! Renders chat prompts without a run: returns their text or token count.

use crate::api::shared::body::ChatCompletionRequest;
use crate::api::shared::chat::{Conversation, InputTokensResponse, PreparedChat};
use crate::api::shared::error::{LlamaError, OpenAiError};
use crate::api::shared::{Fields, ModelBody};
use crate::server::{ApiError, App};
use axum::Json;
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
async fn apply_template(body: Result<ModelBody, ApiError>) -> Result<Json<ApplyTemplateResponse>, LlamaError> {
    Ok(Json(ApplyTemplateResponse { prompt: prepare(body?).await?.text }))
}

/// Counts the prompt tokens of a chat completion.
#[utoipa::path(post, path = "/v1/chat/completions/input_tokens", tag = "openai",
    request_body(content = ChatCompletionRequest, content_type = "application/json"),
    responses((status = 200, body = InputTokensResponse),
              (status = 400, description = "The template rejected the messages")))]
async fn input_tokens(body: Result<ModelBody, ApiError>) -> Result<Json<InputTokensResponse>, OpenAiError> {
    Ok(Json(InputTokensResponse::new(&prepare(body?).await?)))
}

/// Parses and renders a conversation.
async fn prepare(ModelBody { app, body, loaded }: ModelBody) -> Result<PreparedChat, ApiError> {
    Conversation::parse(&app, Fields::new(&body)?.with_server_defaults(&app))?.prepare(&loaded).await
}
