//! Anthropic's Messages API: chat requests and answers in content blocks.
//!
//! `request` converts the body to that of a chat completion, so that every parameter of a chat completion is accepted.
//! `response` and `stream` convert the answer to content blocks and events. Any `anthropic-version` is accepted.

mod error;
mod messages;
mod request;
mod response;
mod stream;
mod tools;

use super::shared;
use crate::api::shared::chat::{ChatStream, prepare_chat, stream_answers};
use crate::api::shared::generation::{self, RunClient};
use crate::events::Surface;
use crate::server::{Access, App, Protocol};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use error::AnthropicError;
use request::MessagesBody;
use response::{CountTokensResponse, MessageEvent, MessageResponse};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the Messages routes.
pub(super) fn protocol() -> Protocol {
    Protocol::new(AnthropicError::render, &["/v1/messages"])
        .routes(Access::Run, OpenApiRouter::new().routes(routes!(messages)))
        .routes(Access::Key, OpenApiRouter::new().routes(routes!(count_tokens)))
}

/// Generates a message from a conversation, like Anthropic's Messages API. `"stream": true` returns server-sent events.
#[utoipa::path(post, path = "/v1/messages", tag = "anthropic",
    request_body(content = MessagesBody, content_type = "application/json"),
    responses((status = 200, description = "A message, or server-sent events of its content blocks",
                  content((MessageResponse = "application/json"), (MessageEvent = "text/event-stream"))),
              (status = 400, description = "A field is invalid; the message names it"),
              (status = 409, description = "Another run has this `request_id`"),
              (status = 422, description = "A mod ended the run with an error before its first token; 400 if the mod was written for Quote"),
              (status = 503, description = "The model is loading")))]
async fn messages(client: RunClient, body: Result<Bytes, BytesRejection>) -> Result<Response, AnthropicError> {
    let body = shared::parse_json(&body?)?;
    let stop_sequences = request::stop_sequences(&body)?;
    let (body, names) = request::to_chat(&body)?;
    let started = ChatStream::parse_and_start(&client, &body, Surface::Anthropic).await;
    let mut chat = started.map_err(|error| names.restore(error))?;
    let run = chat.run();
    let response = if chat.options.stream {
        stream_answers(chat, stream::MessageEventWriter::new(stop_sequences))
    } else {
        while chat.next().await?.is_some() {}
        Json(MessageResponse::complete(&chat, &stop_sequences)).into_response()
    };
    Ok(generation::with_run_id(response, run))
}

/// Counts the prompt tokens of a request without running it.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "anthropic",
    request_body(content = MessagesBody, content_type = "application/json"),
    responses((status = 200, body = CountTokensResponse),
              (status = 400, description = "A field is invalid; the message names it")))]
async fn count_tokens(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<CountTokensResponse>, AnthropicError> {
    let (body, names) = request::to_chat(&shared::parse_json(&body?)?)?;
    let prepared = prepare_chat(&app, &body).await.map_err(|error| names.restore(error))?;
    Ok(Json(CountTokensResponse { input_tokens: prepared.tokens.len() }))
}
