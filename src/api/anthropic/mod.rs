//! Anthropic's Messages: the same conversations, written as content blocks.
//!
//! `convert` writes the body as that of a chat completion, so that every parameter of one is a parameter of the other, and
//! `shape` and `stream` write what was heard as blocks and events. `anthropic-version` is taken, whatever it says.

mod convert;
mod shape;
mod stream;

use super::chat::{Asked, Conversation, Refused, Talk, stream::respond};
use super::wire::{self, Fields};
use super::{AnthropicError, ApiError, App, Caller, generation};
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes.
pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(messages)).routes(routes!(count_tokens))
}

/// Whether the path's clients expect Anthropic's errors.
pub(super) fn owns(path: &str) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/")
}

/// Answers a conversation, as Anthropic's route of that name does; with `"stream": true` event by event.
#[utoipa::path(post, path = "/v1/messages", tag = "anthropic",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "A message, or server-sent events of its content blocks"),
              (status = 400, description = "A field is wrong; the message names it"),
              (status = 409, description = "Another run has this `request_id`"),
              (status = 422, description = "A mod ended the run with an error before its first token; 400 where it was written for Quote"),
              (status = 503, description = "The model is being loaded")))]
async fn messages(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    answer(&app, caller, &headers, body).await.unwrap_or_else(|refused| refused.respond(AnthropicError))
}

async fn answer(
    app: &App,
    caller: Option<Extension<Caller>>,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Refused> {
    let body = wire::json(&body.map_err(ApiError::from)?)?;
    let stops = convert::stop_sequences(&body)?;
    let body = convert::to_chat(&body)?;
    let loaded = app.loaded(body.get("model").and_then(Value::as_str)).await?;
    let asked = Asked::read(app, &loaded, &body)?;
    let mut talk = Talk::begin(app, &loaded, asked, headers, caller).await?;
    let run = talk.run();
    let response = if talk.wishes.stream {
        respond(talk, stream::Events::new(stops))
    } else {
        while talk.next().await.map_err(|error| Refused { error, run: Some(run) })?.is_some() {}
        Json(shape::message(&talk, &stops)).into_response()
    };
    Ok(generation::with_run_id(response, run))
}

/// How many tokens the prompt of a message has, without running it.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "anthropic",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{\"input_tokens\": n}`"),
              (status = 400, description = "A field is wrong; the message names it")))]
async fn count_tokens(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, AnthropicError> {
    let body = convert::to_chat(&wire::json(&body?)?)?;
    let loaded = app.loaded(body.get("model").and_then(Value::as_str)).await?;
    let prepared = Conversation::read(&app, Fields::new(&body)?)?.prepare(&loaded)?;
    Ok(Json(json!({ "input_tokens": prepared.tokens.len() })))
}
