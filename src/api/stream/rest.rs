//! `POST /v1/generate`: the streaming protocol over HTTP, with one response or with server-sent events. A disconnect
//! ends the run.

use super::config::RunConfig;
use super::error::StreamError;
use super::message;
use super::registry::StreamedRuns;
use super::response::{StreamMessage, StreamTiming, StreamUsage};
use super::run::Follower;
use super::start::{NewRun, new_id, start};
use crate::api::shared;
use crate::api::shared::generation::{self, RunClient};
use crate::api::shared::sse::{self, EventSource, PendingEvents, ServerEvent};
use crate::events::{FinishReason, RunId, Surface};
use crate::server::ApiError;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use utoipa::ToSchema;

/// Prompt and parameters of a generation. All sampling parameters of the other routes are accepted too; `parameters`
/// and `options` may be objects as in the streaming protocol's config message.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct GenerateRequest {
    /// Name of the model; default is the server's default model.
    model: Option<String>,
    /// A string, or a list of strings and token ids.
    #[schema(value_type = Value)]
    prompt: Value,
    /// Maximum tokens of the answer; default is the rest of the context.
    max_tokens: Option<u32>,
    /// Temperature, 0 to 100; 0 selects the most probable token.
    temperature: Option<f32>,
    /// Nucleus sampling, 0 to 1.
    top_p: Option<f32>,
    /// Number of most probable tokens to sample from; 0 for all.
    top_k: Option<i32>,
    /// Penalty on repeated tokens; 1 disables it.
    repetition_penalty: Option<f32>,
    /// Strings that end the answer.
    stop: Option<Vec<String>>,
    /// Tokens that are never sampled, by id or text.
    #[schema(value_type = Option<Vec<Value>>)]
    banned_tokens: Option<Vec<Value>>,
    /// Respond with server-sent events: the messages of the streaming protocol.
    stream: Option<bool>,
    /// The client's id of the run; must be unique.
    request_id: Option<String>,
    /// Maximum duration of the run in milliseconds.
    timeout_ms: Option<u32>,
    /// Repeat the prompt in `generated_text`.
    echo_prompt: Option<bool>,
    /// Send each token's id in the stream.
    include_token_ids: Option<bool>,
    /// Send the probability of each token and of `top_logprobs` alternatives in the stream.
    include_logprobs: Option<bool>,
    /// Send timings.
    include_timing: Option<bool>,
    /// `cumulative` repeats the text so far in token messages; `delta` omits it.
    generated_text: Option<String>,
}

/// The response to a generation request.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct GenerateResponse<'a> {
    /// The run's `request_id`.
    id: &'a str,
    /// Id of the run.
    #[schema(value_type = String)]
    run_id: RunId,
    /// Name of the model.
    model: &'a str,
    /// Text of the answer.
    generated_text: &'a str,
    /// `length`, `stop` or `tool_calls`.
    #[schema(value_type = String)]
    finish_reason: FinishReason,
    usage: StreamUsage,
    /// Times, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<StreamTiming>,
    /// The tool calls that ended the run, if any.
    #[schema(value_type = Option<Vec<Object>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Value>,
}

/// Completes a prompt. With `"stream": true` the response is server-sent events: the messages `init`, `status`,
/// `token`, `backtrack`, `completion` and `error` of the streaming protocol, which `/api/v1/asyncapi.json` describes.
#[utoipa::path(post, path = "/v1/generate", tag = "streaming",
    request_body(content = GenerateRequest, content_type = "application/json"),
    responses((status = 200, body = GenerateResponse, description = "The answer, or server-sent events"),
              (status = 400, description = "A field is invalid; the message names it"),
              (status = 404, description = "Unknown model"),
              (status = 409, description = "The `request_id` belongs to another run"),
              (status = 422, description = "A mod ended the run with an error, or no token can be sampled; \
                                            `generated_text` is the text so far"),
              (status = 429, description = "Too many requests; Retry-After is the time until a retry"),
              (status = 503, description = "The model is loading"),
              (status = 507, description = "Memory is exhausted; `generated_text` is the text so far"),
              (status = 504, description = "The run exceeded `timeout_ms`; `generated_text` is the text so far")))]
pub(super) async fn generate(
    client: RunClient,
    streamed_runs: Extension<StreamedRuns>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, StreamError> {
    let config = RunConfig::parse(&shared::parse_json(&body?)?, false)?;
    client.app.check_ready()?;
    let ping = client.app.config().server.sse_ping_interval;
    let new_run = NewRun {
        request_id: config.request_id().map_or_else(new_id, str::to_owned),
        client,
        streamed_runs: streamed_runs.0,
        surface: Surface::Generate,
        replaces: None,
        grace_period: Duration::ZERO,
    };
    let run = start(&config, new_run, None).await?;
    let follower = run.follow(0);
    let response = if config.options.stream { event_stream(follower, ping) } else { collect(follower).await? };
    Ok(generation::with_run_id(response, run.id))
}

async fn collect(mut follower: Follower) -> Result<Response, ApiError> {
    let run = Arc::clone(follower.run());
    while let Some(message) = follower.next().await {
        match message {
            StreamMessage::Completion(completion) => {
                let answer = GenerateResponse {
                    id: &run.request_id,
                    run_id: run.id,
                    model: &run.properties.model,
                    generated_text: &completion.generated_text,
                    finish_reason: completion.finish_reason,
                    usage: completion.usage,
                    timing: completion.timing,
                    tool_calls: completion.tool_calls,
                };
                return Ok(Json(answer).into_response());
            }
            StreamMessage::Error(message) => {
                return Ok((message.error.status(), Json(message)).into_response());
            }
            _ => {}
        }
    }
    Err(ApiError::internal("a run ended without a last message"))
}

fn event_stream(follower: Follower, ping: Option<Duration>) -> Response {
    let run = follower.run();
    let first = [Some(message::init(run, None)), message::echo(run)];
    let pending = first.iter().flatten().map(event).collect();
    sse::respond(follower, pending, sse::comments(ping))
}

impl EventSource for Follower {
    async fn advance(&mut self, pending: &mut PendingEvents) -> bool {
        let message = self.next().await;
        pending.extend(message.as_ref().map(event));
        message.is_some()
    }
}

/// Returns the event of a message, with the message's type as name.
fn event(message: &StreamMessage<'_>) -> ServerEvent {
    let event = ServerEvent::typed(message);
    match message.index() {
        Some(index) => event.id(index as i64),
        None => event,
    }
}
