//! Chat completions, with reasoning and tool calls separated from text.

mod control;
mod response;
mod stream;

use crate::api::shared;
use crate::api::shared::body::ChatCompletionRequest;
use crate::api::shared::chat::{ChatStream, stream_answers};
use crate::api::shared::error::OpenAiError;
use crate::api::shared::generation::{self, CollectedTokens, RunClient};
use crate::events::Surface;
use crate::server::App;
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use response::{ChatCompletion, ChatCompletionChunk};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the routes, with and without the `/v1` prefix.
pub(super) fn router() -> OpenApiRouter<App> {
    use axum::routing::post;
    OpenApiRouter::new().routes(routes!(completions)).route("/chat/completions", post(completions))
}

/// Returns the routes that control active runs, with and without the `/v1` prefix.
pub(super) fn control_router() -> OpenApiRouter<App> {
    use axum::routing::post;
    OpenApiRouter::new().routes(routes!(control::control)).route("/chat/completions/control", post(control::control))
}

/// Generates a chat completion, like OpenAI's API. `"stream": true` returns server-sent events.
///
/// `tools` are offered to the model; `tool_choice` `"required"` or a function's name forces a call. `response_format`,
/// `json_schema` or `grammar` constrain the text. Reasoning is returned as `reasoning_content`.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "openai",
    request_body(content = ChatCompletionRequest, content_type = "application/json"),
    responses((status = 200, description = "A chat completion, or server-sent events of its chunks",
                  content((ChatCompletion = "application/json"), (ChatCompletionChunk = "text/event-stream"))),
              (status = 400, description = "A field is invalid; `error.param` names it"),
              (status = 409, description = "Another run has this `request_id`"),
              (status = 422, description = "A mod ended the run with an error before its first token; 400 if the mod was written for Quote"),
              (status = 503, description = "The model is loading")))]
async fn completions(client: RunClient, body: Result<Bytes, BytesRejection>) -> Result<Response, OpenAiError> {
    let body = shared::parse_json(&body?)?;
    let mut chat = ChatStream::parse_and_start(&client, &body, Surface::Openai).await?;
    let run = chat.run();
    let response = if chat.options.stream {
        stream_answers(chat, stream::ChatChunkWriter::default())
    } else {
        let mut tokens = vec![CollectedTokens::default(); chat.len()];
        while let Some(update) = chat.next().await? {
            tokens[update.answer].update(update.retracted_tokens, update.tokens);
        }
        Json(ChatCompletion::new(&chat, &tokens)).into_response()
    };
    Ok(generation::with_run_id(response, run))
}
