//! OpenAI's Responses: the same conversations, written as items.
//!
//! `convert` writes the body as that of a chat completion, `shape` and `stream` write what was heard as items and events. A
//! response is not kept for a later one to refer to, and a request that asks for that is refused rather than answered
//! without its history; the run itself is recorded like any other.

mod convert;
mod shape;
mod stream;

use super::chat::{Asked, Conversation, Refused, Talk, stream::respond};
use super::wire::{self, Fields};
use super::{ApiError, App, Caller, OpenAiError, generation};
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes, with `/v1` and without.
pub(super) fn router() -> OpenApiRouter<App> {
    use axum::routing::post;
    OpenApiRouter::new()
        .routes(routes!(create))
        .routes(routes!(input_tokens))
        .route("/responses", post(create))
        .route("/responses/input_tokens", post(input_tokens))
}

/// Answers a conversation, as OpenAI's route of that name does; with `"stream": true` event by event.
#[utoipa::path(post, path = "/v1/responses", tag = "openai",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "A response, or server-sent events of its items"),
              (status = 400, description = "A field is wrong; `error.param` names it"),
              (status = 422, description = "A mod ended the run with an error before its first token"),
              (status = 503, description = "The model is being loaded")))]
async fn create(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    answer(&app, caller, &headers, body).await.unwrap_or_else(|refused| refused.respond(OpenAiError))
}

async fn answer(
    app: &App,
    caller: Option<Extension<Caller>>,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Refused> {
    let asked = wire::json(&body.map_err(ApiError::from)?)?;
    let body = convert::to_chat(&asked)?;
    let loaded = app.loaded(body.get("model").and_then(Value::as_str)).await?;
    let echo = shape::Echo::of(&asked);
    let mut talk = Talk::begin(app, &loaded, Asked::read(app, &loaded, &body)?, headers, caller).await?;
    let run = talk.run();
    let response = if talk.wishes.stream {
        respond(talk, stream::Events::new(echo))
    } else {
        while talk.next().await.map_err(|error| Refused { error, run: Some(run) })?.is_some() {}
        Json(shape::response(&talk, &echo)).into_response()
    };
    Ok(generation::with_run_id(response, run))
}

/// How many tokens the prompt of a response has, without running it.
#[utoipa::path(post, path = "/v1/responses/input_tokens", tag = "openai",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{\"input_tokens\": n, \"object\": \"response.input_tokens\"}`"),
              (status = 400, description = "A field is wrong; `error.param` names it")))]
async fn input_tokens(State(app): State<App>, body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, OpenAiError> {
    let body = convert::to_chat(&wire::json(&body?)?)?;
    let loaded = app.loaded(body.get("model").and_then(Value::as_str)).await?;
    let prepared = Conversation::read(&app, Fields::new(&body)?)?.prepare(&loaded)?;
    Ok(Json(json!({ "input_tokens": prepared.tokens.len(), "object": "response.input_tokens" })))
}
