//! Chats and generations in Ollama's format. All durations are in nanoseconds.

use crate::api::shared::chat::{ChatStream, ToolCallRef};
use crate::api::shared::generation::{ThunderFields, TokenProbabilities};
use crate::api::shared::sse::to_json;
use crate::events::{FinishReason, TokenId, system};
use chrono::SecondsFormat;
use serde::Serialize;
use serde_json::{Map, Value};
use std::time::{Duration, Instant};
use utoipa::ToSchema;

/// A chat answer, or a line of its stream.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OllamaChatResponse {
    /// Name of the model.
    model: String,
    /// Time of the line.
    created_at: String,
    message: OllamaMessage,
    /// Log-probabilities of the tokens of the answer, or of the addition, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<TokenProbabilities>,
    /// True in the last line.
    done: bool,
    #[serde(flatten)]
    end: OllamaEnd,
    #[serde(skip_serializing_if = "Option::is_none")]
    thunder: Option<ThunderFields>,
}

/// A generation, or a line of its stream.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OllamaGenerateResponse {
    /// Name of the model.
    model: String,
    /// Time of the line.
    created_at: String,
    /// The text, or in a stream an addition to it.
    response: String,
    /// The reasoning, or in a stream an addition to it.
    #[serde(skip_serializing_if = "String::is_empty")]
    thinking: String,
    /// Log-probabilities of the tokens of the answer, or of the addition, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<TokenProbabilities>,
    /// True in the last line.
    done: bool,
    /// Tokens of prompt and answer, for the next request; absent with `raw`.
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<Vec<TokenId>>,
    #[serde(flatten)]
    end: OllamaEnd,
    #[serde(skip_serializing_if = "Option::is_none")]
    thunder: Option<ThunderFields>,
}

/// A message, or an addition to it.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct OllamaMessage {
    /// Always `assistant`.
    #[schema(value_type = String)]
    pub(super) role: Assistant,
    /// The text.
    pub(super) content: String,
    /// The reasoning.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) thinking: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<OllamaToolCall>,
}

/// The role of an answer.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Assistant {
    #[default]
    Assistant,
}

/// A tool call.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OllamaToolCall {
    /// Id of the call.
    id: String,
    function: OllamaFunctionCall,
}

/// The tool and the arguments of a call.
#[derive(Debug, Serialize, ToSchema)]
struct OllamaFunctionCall {
    /// Index of the call, from 0.
    index: usize,
    /// Name of the tool.
    name: String,
    /// The arguments.
    #[schema(value_type = Object)]
    arguments: Map<String, Value>,
}

/// Fields of the last line of an answer; absent in all other lines.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct OllamaEnd {
    /// `stop`, `length`, `load` or `unload`.
    #[serde(skip_serializing_if = "Option::is_none")]
    done_reason: Option<&'static str>,
    /// Duration of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    total_duration: Option<u64>,
    /// Time spent loading the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    load_duration: Option<u64>,
    /// Tokens of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_eval_count: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_eval_duration: Option<u64>,
    /// Tokens of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_count: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_duration: Option<u64>,
}

/// Times of a request, for its response.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestTimes {
    pub(super) started: Instant,
    pub(super) load: Duration,
}

/// The format of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OllamaFormat {
    Chat,
    Generate,
}

/// The content of a line of a stream, or of a complete answer.
#[derive(Debug, Default)]
pub(super) struct OllamaLine {
    pub(super) message: OllamaMessage,
    pub(super) logprobs: Vec<TokenProbabilities>,
    /// The end of the answer, in its last line.
    pub(super) end: Option<OllamaEnd>,
    /// See [`OllamaGenerateResponse::context`].
    pub(super) context: Option<Vec<TokenId>>,
    pub(super) thunder: Option<ThunderFields>,
}

impl OllamaEnd {
    /// Returns the end of a request that generated nothing.
    pub(super) fn without_answer(done_reason: &'static str) -> Self {
        Self { done_reason: Some(done_reason), ..Self::default() }
    }

    /// Returns the end of an answer.
    pub(super) fn new(chat: &ChatStream, times: RequestTimes) -> Self {
        let Some(finish) = chat.finish(0) else { return Self::without_answer("stop") };
        Self {
            done_reason: Some(if finish.reason == FinishReason::Length { "length" } else { "stop" }),
            total_duration: Some(nanoseconds(times.started.elapsed())),
            load_duration: Some(nanoseconds(times.load)),
            prompt_eval_count: Some(finish.usage.prompt_tokens),
            prompt_eval_duration: Some(finish.prompt_us.saturating_mul(1000)),
            eval_count: Some(finish.usage.completion_tokens),
            eval_duration: Some(finish.generation_us.saturating_mul(1000)),
        }
    }
}

/// Returns a duration in nanoseconds.
pub(super) fn nanoseconds(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

impl OllamaToolCall {
    /// Returns a call; `None` if the answer was cut off inside its arguments.
    pub(super) fn new(index: usize, call: &ToolCallRef<'_>) -> Option<Self> {
        let arguments = serde_json::from_str(call.arguments).ok()?;
        let function = OllamaFunctionCall { index, name: call.name.to_owned(), arguments };
        Some(Self { id: call.id.to_owned(), function })
    }
}

impl OllamaFormat {
    /// Returns a line as JSON.
    pub(super) fn line(self, model: &str, line: OllamaLine) -> String {
        let OllamaLine { message, logprobs, end, context, thunder } = line;
        let (model, created_at) = (model.to_owned(), system::now().to_rfc3339_opts(SecondsFormat::Nanos, true));
        let done = end.is_some();
        let end = end.unwrap_or_default();
        match self {
            Self::Chat => to_json(&OllamaChatResponse { model, created_at, message, logprobs, done, end, thunder }),
            Self::Generate => to_json(&OllamaGenerateResponse {
                model,
                created_at,
                response: message.content,
                thinking: message.thinking,
                logprobs,
                done,
                context,
                end,
                thunder,
            }),
        }
    }
}
