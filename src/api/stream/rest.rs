//! `POST /v1/generate`: the same over HTTP, whole or as server-sent events. A client that goes away ends its run.

use super::begin::{Beginning, begin, new_id};
use super::message;
use super::read::Config;
use super::run::Follower;
use crate::api::shared;
use crate::api::{ApiError, App, Caller, StreamError, generation};
use crate::events::Surface;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::stream;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;
use utoipa::ToSchema;

/// What to continue, and how. Every sampling parameter of the other routes is taken too; `parameters` and `options` may also be
/// objects of their own, as in the streaming protocol's config message.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct GenerateRequest {
    /// The model; the server's default one when absent.
    model: Option<String>,
    /// A text, or a list of texts and token ids.
    #[schema(value_type = Object)]
    prompt: Value,
    /// Most tokens of the answer; as many as the context holds when absent.
    max_tokens: Option<u32>,
    /// Temperature, 0 to 100; 0 takes the most probable token.
    temperature: Option<f32>,
    /// Nucleus sampling, 0 to 1.
    top_p: Option<f32>,
    /// Take from that many most probable tokens; 0 for all.
    top_k: Option<i32>,
    /// Penalty on tokens that were there already; 1 is none.
    repetition_penalty: Option<f32>,
    /// Texts that end the answer.
    stop: Option<Vec<String>>,
    /// Tokens that are never drawn, by id or text.
    #[schema(value_type = Option<Vec<Object>>)]
    banned_tokens: Option<Vec<Value>>,
    /// Whether to answer with server-sent events: the messages of the streaming protocol.
    stream: Option<bool>,
    /// The client's id of the run; must be new.
    request_id: Option<String>,
    /// Most time the run may take, in milliseconds.
    timeout_ms: Option<u32>,
    /// Repeat the prompt in `generated_text`.
    echo_prompt: Option<bool>,
    /// Tell each token's id in the stream.
    include_token_ids: Option<bool>,
    /// Tell each token's probability, and those of `top_logprobs` others, in the stream.
    include_logprobs: Option<bool>,
    /// Tell how long it took.
    include_timing: Option<bool>,
    /// `cumulative` or `delta`: whether each token message in the stream repeats all text so far.
    generated_text: Option<String>,
}

/// An answer.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct GenerateResponse {
    /// The run's `request_id`.
    id: String,
    /// The run's id in the trace.
    run_id: String,
    /// The model.
    model: String,
    /// The answer.
    generated_text: Value,
    /// `length`, `stop` or `tool_calls`.
    finish_reason: Value,
    /// `prompt_tokens`, `completion_tokens`, `total_tokens`.
    usage: Value,
    /// `first_token_ms`, `total_ms`, where it was asked for.
    #[serde(skip_serializing_if = "Value::is_null")]
    timing: Value,
    /// The calls, where it ended with some.
    #[serde(skip_serializing_if = "Value::is_null")]
    tool_calls: Value,
}

/// Continues a text. With `"stream": true` the answer is server-sent events: the messages `init`, `status`, `token`, `backtrack`,
/// `completion` and `error` of the streaming protocol, which `/api/v1/asyncapi.json` describes.
#[utoipa::path(post, path = "/v1/generate", tag = "streaming",
    request_body(content = GenerateRequest, content_type = "application/json"),
    responses((status = 200, body = GenerateResponse, description = "The answer, or server-sent events of it"),
              (status = 400, description = "A field is wrong; the message names it"),
              (status = 404, description = "There is no such model"),
              (status = 409, description = "The `request_id` belongs to another run"),
              (status = 422, description = "A mod ended the run with an error, or nothing is left that could be drawn; \
                                            `generated_text` is what was said before"),
              (status = 429, description = "Too many requests; Retry-After says when to try again"),
              (status = 503, description = "The model is being loaded"),
              (status = 507, description = "There is no memory for it; `generated_text` is what was said before"),
              (status = 504, description = "It took longer than `timeout_ms`; `generated_text` is what was said before")))]
pub(super) async fn generate(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, StreamError> {
    let config = Config::read(&shared::parse_json(&body?)?, false)?;
    app.ready()?;
    let beginning = Beginning {
        request_id: config.request_id().map_or_else(new_id, str::to_owned),
        caller: caller.map(|Extension(caller)| caller),
        surface: Surface::Generate,
        replaces: None,
        keep: Duration::ZERO,
    };
    let run = begin(&app, &config, beginning, None).await?;
    let follower = run.follow(0);
    let response = if config.options.stream {
        events(follower, app.config().server.routes.sse_ping_interval)
    } else {
        whole(follower).await?
    };
    Ok(generation::with_run_id(response, run.id))
}

async fn whole(mut follower: Follower) -> Result<Response, ApiError> {
    while let Some(mut message) = follower.next().await {
        let run = follower.run();
        match message["type"].as_str() {
            Some("completion") => {
                let answer = GenerateResponse {
                    id: run.request_id.clone(),
                    run_id: run.id.to_string(),
                    model: run.head.model.clone(),
                    generated_text: message["generated_text"].take(),
                    finish_reason: message["finish_reason"].take(),
                    usage: message["usage"].take(),
                    timing: message.get_mut("timing").map(Value::take).unwrap_or_default(),
                    tool_calls: message.get_mut("tool_calls").map(Value::take).unwrap_or_default(),
                };
                return Ok(Json(answer).into_response());
            }
            Some("error") => {
                let status = match message["error"].as_str() {
                    Some("timeout") => StatusCode::GATEWAY_TIMEOUT,
                    Some("content_filter" | "invalid_request") => StatusCode::UNPROCESSABLE_ENTITY,
                    Some("unavailable") => StatusCode::SERVICE_UNAVAILABLE,
                    Some("memory_pressure") => StatusCode::INSUFFICIENT_STORAGE,
                    _ => StatusCode::INTERNAL_SERVER_ERROR,
                };
                return Ok((status, Json(message)).into_response());
            }
            _ => {}
        }
    }
    Err(ApiError::internal("a run ended without an end"))
}

fn events(follower: Follower, ping: Option<Duration>) -> Response {
    let run = follower.run();
    let first: VecDeque<Value> = std::iter::once(message::init(run, None)).chain(message::echo(run)).collect();
    let events = stream::unfold((first, follower), |(mut first, mut follower)| async move {
        let message = match first.pop_front() {
            Some(message) => message,
            None => follower.next().await?,
        };
        let mut event = Event::default();
        if let Some(kind) = message["type"].as_str() {
            event = event.event(kind);
        }
        if let Some(index) = message["index"].as_u64() {
            event = event.id(index.to_string());
        }
        Some((Ok::<_, Infallible>(event.data(message.to_string())), (first, follower)))
    });
    let headers = [("x-accel-buffering", "no")];
    match ping {
        Some(ping) => (headers, Sse::new(events).keep_alive(KeepAlive::new().interval(ping))).into_response(),
        None => (headers, Sse::new(events)).into_response(),
    }
}

/// Whether the path's errors are written as this protocol's clients read them.
pub(in crate::api) fn is_route(path: &str) -> bool {
    path == "/v1/generate"
}
