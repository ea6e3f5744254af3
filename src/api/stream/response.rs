//! Server messages of the streaming protocol.

use super::error::StreamErrorMessage;
use crate::events::{FinishReason, RunId, TokenId, Usage};
use crate::server::{ApiError, LoadedModel};
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use utoipa::ToSchema;

/// A server message, with its name as `type`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum StreamMessage<'a> {
    Init(InitMessage<'a>),
    Token(TokenMessage<'a>),
    Backtrack(BacktrackMessage<'a>),
    Completion(CompletionMessage<'a>),
    Status(StatusMessage<'a>),
    /// Contains `type` itself, because it is also the body of an HTTP response.
    #[serde(untagged)]
    Error(RunErrorMessage<'a>),
}

/// The start of a run.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct InitMessage<'a> {
    /// The run's `request_id`.
    pub(super) request_id: Cow<'a, str>,
    /// Id of the run; its replay is at `/runs/{run_id}`.
    #[schema(value_type = String)]
    pub(super) run_id: RunId,
    /// Name of the model.
    pub(super) model: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) model_info: Option<&'a StreamModelInfo>,
    /// The `request_id` of the run that `regenerate` replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) replaces: Option<&'a str>,
    /// True if the client resumes the run.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) resumed: bool,
    /// True if the run was loaded from the database.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) stored: bool,
    /// Index after which the messages continue, with `resumed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) index: Option<usize>,
    /// The text up to that index, with `resumed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) generated_text: Option<String>,
}

/// Properties of a model.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct StreamModelInfo {
    /// Architecture of the model.
    version: String,
    /// Context size of a run in tokens.
    max_tokens: u32,
    /// Type of the weights.
    quantization: String,
    /// Number of weights.
    parameters: u64,
}

/// A token. The text is the concatenation of all tokens; a token may be empty while a character is incomplete.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TokenMessage<'a> {
    /// The run's `request_id`.
    pub(super) request_id: &'a str,
    /// Number of tokens and backtracks so far, from 1; 0 for the prompt.
    pub(super) index: usize,
    /// Text of the token.
    pub(super) token: Cow<'a, str>,
    /// Id of the token; with `options.include_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_id: Option<TokenId>,
    /// True if this message repeats the prompt.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) echo: bool,
    /// The text including this token; absent if `options.generated_text` is `delta`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) generated_text: Option<Cow<'a, str>>,
    /// The token, followed by the most probable alternatives; with `options.include_logprobs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) logprobs: Option<Vec<StreamLogprob>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timing: Option<TokenTiming>,
    /// `stop`, `length` or `tool_calls`. Null if the run has not finished, or was stopped or failed; then only its last
    /// message has the reason.
    #[schema(value_type = Option<String>)]
    pub(super) finish_reason: Option<FinishReason>,
    /// True if the run ends with this token and that is already known.
    pub(super) finished: bool,
}

/// A token with its log-probability.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct StreamLogprob {
    /// The token.
    pub(super) token: String,
    /// Natural logarithm of its probability.
    pub(super) logprob: f64,
}

/// Times of a token.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TokenTiming {
    /// Milliseconds since the previous token.
    pub(super) token_ms: f64,
    /// Milliseconds since the start of the run.
    pub(super) total_ms: f64,
}

/// The removal of the last tokens by a mod.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct BacktrackMessage<'a> {
    /// The run's `request_id`.
    pub(super) request_id: &'a str,
    /// Number of tokens and backtracks so far, from 1.
    pub(super) index: usize,
    /// Number of removed tokens.
    pub(super) removed_tokens: usize,
    /// Number of Unicode scalar values to remove from the end of the text; 0 if the tokens have no text.
    pub(super) removed_characters: usize,
    /// The removed text.
    pub(super) removed_text: String,
    /// The remaining text; absent if `options.generated_text` is `delta`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) generated_text: Option<Cow<'a, str>>,
}

/// The end of a run.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CompletionMessage<'a> {
    /// The run's `request_id`.
    pub(super) request_id: Cow<'a, str>,
    /// The complete text.
    pub(super) generated_text: Cow<'a, str>,
    /// `stop`, `length` or `tool_calls`.
    #[schema(value_type = String)]
    pub(super) finish_reason: FinishReason,
    pub(super) usage: StreamUsage,
    /// The stop string that ended the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stop_string: Option<String>,
    /// The tool calls with which a mod ended the run.
    #[schema(value_type = Option<Vec<Object>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_calls: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timing: Option<StreamTiming>,
    /// `client` if a control message stopped the run; the `finish_reason` is `stop`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stopped_by: Option<&'static str>,
    /// True if the run was loaded from the database.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) stored: bool,
}

/// Times of a run.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct StreamTiming {
    /// Milliseconds from the start to the first token.
    pub(super) first_token_ms: Option<f64>,
    /// Milliseconds from the start to the end.
    pub(super) total_ms: f64,
}

/// Token counts of a run.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(super) struct StreamUsage {
    /// Tokens of the prompt.
    prompt_tokens: u32,
    /// Tokens of the answer.
    completion_tokens: u32,
    /// Sum of prompt and answer.
    total_tokens: u32,
}

/// An error. With `request_id` and `generated_text` the run has ended.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct RunErrorMessage<'a> {
    #[serde(flatten)]
    pub(super) error: StreamErrorMessage,
    /// The run's `request_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<Cow<'a, str>>,
    /// The text of the run so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    generated_text: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<StreamUsage>,
    /// True if the run was loaded from the database.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) stored: bool,
}

/// Progress, or confirmation of a control message or feedback.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct StatusMessage<'a> {
    /// `model_loading`, `prompt_processing`, `pause`, `resume`, `modify`, `feedback`, `ping`, or `moved`: another
    /// connection receives the run now.
    #[schema(value_type = String)]
    pub(super) operation: StatusOperation,
    /// Progress in percent.
    #[schema(minimum = 0, maximum = 100)]
    pub(super) progress: u8,
    /// The status as text.
    pub(super) message: Cow<'a, str>,
    /// The run's `request_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) request_id: Option<&'a str>,
    /// Estimated remaining seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) eta_seconds: Option<f64>,
    /// The changed parameters, as sent.
    #[schema(value_type = Option<Object>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) parameters: Option<&'a Map<String, Value>>,
}

/// The subject of a status message.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StatusOperation {
    ModelLoading,
    PromptProcessing,
    Pause,
    Resume,
    Modify,
    Feedback,
    Ping,
    Moved,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

impl StreamMessage<'_> {
    /// Returns the number of tokens and backtracks so far, if the message has it.
    pub(super) const fn index(&self) -> Option<usize> {
        match self {
            Self::Init(InitMessage { index, .. }) => *index,
            Self::Token(TokenMessage { index, .. }) | Self::Backtrack(BacktrackMessage { index, .. }) => Some(*index),
            Self::Completion(_) | Self::Error(_) | Self::Status(_) => None,
        }
    }
}

impl StreamModelInfo {
    /// Returns the properties of a model.
    pub(super) fn new(loaded: &LoadedModel) -> Self {
        let card = loaded.model().card();
        Self {
            version: card.architecture.clone(),
            max_tokens: loaded.engine().context_per_slot(),
            quantization: card.file_type.clone(),
            parameters: card.parameters,
        }
    }
}

impl<'a> InitMessage<'a> {
    /// Returns the message for a new run, without properties of its model.
    pub(super) fn new(request_id: Cow<'a, str>, run_id: RunId, model: Option<Cow<'a, str>>) -> Self {
        Self {
            request_id,
            run_id,
            model,
            model_info: None,
            replaces: None,
            resumed: false,
            stored: false,
            index: None,
            generated_text: None,
        }
    }

    /// Returns the message for a run that is resumed after the message with this index.
    pub(super) fn resumed(self, index: usize, text: String) -> Self {
        Self { resumed: true, index: Some(index), generated_text: Some(text), ..self }
    }

    /// Returns the message for a run that is only in the database.
    pub(super) fn stored(self) -> Self {
        Self { resumed: true, stored: true, ..self }
    }
}

impl<'a> CompletionMessage<'a> {
    /// Returns the end of a run without details. The finish reason of a stopped run is `stop`.
    pub(super) fn new(request_id: Cow<'a, str>, text: Cow<'a, str>, reason: FinishReason, usage: Usage) -> Self {
        let reason = if reason == FinishReason::Cancelled { FinishReason::Stop } else { reason };
        Self {
            request_id,
            generated_text: text,
            finish_reason: reason,
            usage: usage.into(),
            stop_string: None,
            tool_calls: None,
            timing: None,
            stopped_by: None,
            stored: false,
        }
    }
}

impl From<Usage> for StreamUsage {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
        }
    }
}

impl<'a> StatusMessage<'a> {
    /// Returns a status without estimate and parameters.
    pub(super) fn new(
        operation: StatusOperation,
        progress: u8,
        message: impl Into<Cow<'a, str>>,
        request_id: Option<&'a str>,
    ) -> Self {
        Self { operation, progress, message: message.into(), request_id, eta_seconds: None, parameters: None }
    }

    /// Returns a status with progress 100.
    pub(super) fn complete(
        operation: StatusOperation,
        message: impl Into<Cow<'a, str>>,
        request_id: Option<&'a str>,
    ) -> Self {
        Self::new(operation, 100, message, request_id)
    }
}

impl<'a> From<StatusMessage<'a>> for StreamMessage<'a> {
    fn from(status: StatusMessage<'a>) -> Self {
        Self::Status(status)
    }
}

impl<'a> From<RunErrorMessage<'a>> for StreamMessage<'a> {
    fn from(error: RunErrorMessage<'a>) -> Self {
        Self::Error(error)
    }
}

impl<'a> RunErrorMessage<'a> {
    /// Returns the error of a run or of a message.
    pub(super) fn new(error: &ApiError, request_id: Option<&'a str>) -> Self {
        let request_id = request_id.map(Cow::Borrowed);
        Self { error: error.streaming(), request_id, generated_text: None, usage: None, stored: false }
    }

    /// Returns the error of a run with its text so far, so that a client can continue from it.
    pub(super) fn ended(
        error: StreamErrorMessage,
        request_id: Cow<'a, str>,
        text: Cow<'a, str>,
        usage: Option<StreamUsage>,
    ) -> Self {
        Self { error, request_id: Some(request_id), generated_text: Some(text), usage, stored: false }
    }
}

/// Returns the completion of a run that was stopped before it started.
pub(super) fn stopped_before_start(request_id: &str) -> StreamMessage<'_> {
    StreamMessage::Completion(CompletionMessage {
        stopped_by: Some("client"),
        ..CompletionMessage::new(request_id.into(), "".into(), FinishReason::Stop, Usage::default())
    })
}
