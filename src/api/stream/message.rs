//! Server messages of the streaming protocol.

use super::log::LogToken;
use super::run::{RunEnding, StreamedRun};
use crate::api::shared::error::StreamErrorMessage;
use crate::engine::PromptProgress;
use crate::events::{EndCause, Fault, Finish, FinishReason, RunId, TokenId, Usage};
use crate::server::{ApiError, Loaded};
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::time::Duration;
use utoipa::ToSchema;

/// A message to the client.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum StreamMessage<'a> {
    Init(InitMessage<'a>),
    Token(TokenMessage<'a>),
    Backtrack(BacktrackMessage<'a>),
    Completion(CompletionMessage<'a>),
    Error(RunErrorMessage<'a>),
    Status(StatusMessage<'a>),
}

/// The start of a run.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct InitMessage<'a> {
    r#type: &'static str,
    /// The run's `request_id`.
    pub(super) request_id: Cow<'a, str>,
    /// The run's id in the trace: `/runs/{run_id}` replays it.
    #[schema(value_type = String)]
    pub(super) run_id: RunId,
    /// Name of the model.
    pub(super) model: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model_info: Option<&'a StreamModelInfo>,
    /// The `request_id` of the run that `regenerate` replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    replaces: Option<&'a str>,
    /// True if the run is sent again.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) resumed: bool,
    /// True if the run was loaded from the database.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) stored: bool,
    /// Index after which the messages continue; only with `resumed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    /// The text up to there; only with `resumed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    generated_text: Option<String>,
}

/// Properties of a model.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct StreamModelInfo {
    /// The architecture.
    version: String,
    /// Context size of a run in tokens.
    max_tokens: u32,
    /// Type of the weights.
    quantization: String,
    /// Number of weights.
    parameters: u64,
}

/// A token. The tokens together are the text; a token may be empty while a character is incomplete.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TokenMessage<'a> {
    r#type: &'static str,
    /// The run's `request_id`.
    request_id: &'a str,
    /// Number of tokens and backtracks so far, from 1; 0 for the prompt.
    index: usize,
    /// Text of the token.
    token: Cow<'a, str>,
    /// Id of the token; with `options.include_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_id: Option<TokenId>,
    /// True if this message repeats the prompt.
    #[serde(skip_serializing_if = "is_false")]
    echo: bool,
    /// The text including this token; not with `options.generated_text` `delta`.
    #[serde(skip_serializing_if = "Option::is_none")]
    generated_text: Option<Cow<'a, str>>,
    /// The token, followed by the most probable alternatives; with `options.include_logprobs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<StreamLogprob>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<TokenTiming>,
    /// `stop`, `length` or `tool_calls`. Null if the run has not finished, or was stopped or failed; then only its last
    /// message has the reason.
    finish_reason: Option<&'static str>,
    /// True if the run ends with this token and that is already known.
    finished: bool,
}

/// A token with its log-probability.
#[derive(Debug, Serialize, ToSchema)]
struct StreamLogprob {
    /// The token.
    token: String,
    /// Natural logarithm.
    logprob: f64,
}

/// Times of a token.
#[derive(Debug, Serialize, ToSchema)]
struct TokenTiming {
    /// Milliseconds since the previous token.
    token_ms: f64,
    /// Milliseconds since the start of the run.
    total_ms: f64,
}

/// The removal of the end of the text by a mod.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct BacktrackMessage<'a> {
    r#type: &'static str,
    /// The run's `request_id`.
    request_id: &'a str,
    /// Number of tokens and backtracks so far, from 1.
    index: usize,
    /// Number of removed tokens.
    removed_tokens: usize,
    /// Number of Unicode scalar values to remove from the end of the text.
    removed_characters: usize,
    /// The removed text.
    removed_text: String,
    /// The remaining text; not with `options.generated_text` `delta`.
    #[serde(skip_serializing_if = "Option::is_none")]
    generated_text: Option<Cow<'a, str>>,
}

/// The end of a run.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CompletionMessage<'a> {
    r#type: &'static str,
    /// The run's `request_id`.
    request_id: Cow<'a, str>,
    /// The complete text.
    pub(super) generated_text: Cow<'a, str>,
    /// `stop`, `length` or `tool_calls`.
    pub(super) finish_reason: &'static str,
    pub(super) usage: StreamUsage,
    /// The stop string that ended the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_string: Option<String>,
    /// The tool calls with which a mod ended the run.
    #[schema(value_type = Option<Vec<Object>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_calls: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timing: Option<StreamTiming>,
    /// `client` if a control message stopped the run; the `finish_reason` is `stop`.
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped_by: Option<&'static str>,
    /// True if the run was loaded from the database.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) stored: bool,
}

/// Times of a run.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct StreamTiming {
    /// Milliseconds from the start to the first token.
    first_token_ms: Option<f64>,
    /// Milliseconds from the start to the end.
    total_ms: f64,
}

/// Token counts of a run.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(super) struct StreamUsage {
    /// Tokens of the prompt.
    prompt_tokens: u32,
    /// Tokens of the answer.
    completion_tokens: u32,
    /// Sum of both.
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
    r#type: &'static str,
    /// `model_loading`, `prompt_processing`, `pause`, `resume`, `modify`, `feedback`, `ping`, or `moved`: another
    /// connection receives the run now.
    operation: &'a str,
    /// Percent.
    #[schema(minimum = 0, maximum = 100)]
    progress: u8,
    /// Text for people.
    message: Cow<'a, str>,
    /// The run's `request_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
    /// Estimated remaining seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) eta_seconds: Option<f64>,
    /// The changed parameters, as sent.
    #[schema(value_type = Option<Object>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) parameters: Option<&'a Map<String, Value>>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

impl StreamMessage<'_> {
    /// Returns the type of the message.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Init(_) => "init",
            Self::Token(_) => "token",
            Self::Backtrack(_) => "backtrack",
            Self::Completion(_) => "completion",
            Self::Error(_) => "error",
            Self::Status(_) => "status",
        }
    }

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
    pub(super) fn new(loaded: &Loaded) -> Self {
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
    /// Returns the message for a run that is only stored.
    pub(super) fn stored(request_id: Cow<'a, str>, run_id: RunId, model: Option<Cow<'a, str>>) -> Self {
        Self {
            r#type: "init",
            request_id,
            run_id,
            model,
            model_info: None,
            replaces: None,
            resumed: true,
            stored: true,
            index: None,
            generated_text: None,
        }
    }
}

/// Returns the init message. For a resumed run, `index` entries were sent before, and `text` is their text.
pub(super) fn init<'a>(run: &'a StreamedRun, resumed: Option<(usize, &str)>) -> StreamMessage<'a> {
    StreamMessage::Init(InitMessage {
        model_info: Some(&run.head.model_info),
        replaces: run.head.replaces.as_deref(),
        resumed: resumed.is_some(),
        stored: false,
        index: resumed.map(|(index, _)| index),
        generated_text: resumed.map(|(_, text)| echoed(run, text).into_owned()),
        ..InitMessage::stored(run.request_id.as_str().into(), run.id, Some(run.head.model.as_str().into()))
    })
}

/// Returns the message that repeats the prompt, if requested.
pub(super) fn echo(run: &StreamedRun) -> Option<StreamMessage<'_>> {
    let (options, prompt) = (run.head.options, run.head.prompt_text.as_str());
    (options.echo_prompt && options.stream).then(|| {
        StreamMessage::Token(TokenMessage {
            r#type: "token",
            request_id: &run.request_id,
            index: 0,
            token: prompt.into(),
            token_id: None,
            echo: true,
            generated_text: options.cumulative.then(|| prompt.into()),
            logprobs: None,
            timing: None,
            finish_reason: None,
            finished: false,
        })
    })
}

/// Returns a token message; `text` is the text including the token.
pub(super) fn token<'a>(run: &'a StreamedRun, index: usize, token: LogToken, text: &'a str) -> StreamMessage<'a> {
    let options = run.head.options;
    let LogToken { text: own, id, logprobs, elapsed, at, last } = token;
    let logprob = |(token, logprob): (String, f32)| StreamLogprob { token, logprob: logprob.into() };
    // For a run that was stopped or failed, only the last message has the reason.
    let reason = last.filter(|reason| !matches!(reason, FinishReason::Cancelled | FinishReason::Error));
    StreamMessage::Token(TokenMessage {
        r#type: "token",
        request_id: &run.request_id,
        index,
        token: own.into(),
        token_id: id.filter(|_| options.token_ids),
        echo: false,
        generated_text: options.cumulative.then(|| echoed(run, text)),
        logprobs: options.logprobs.map(|count| logprobs.into_iter().take(count.max(1)).map(logprob).collect()),
        timing: options.timing.then(|| TokenTiming { token_ms: ms(elapsed), total_ms: ms(at) }),
        finish_reason: reason.map(FinishReason::as_str),
        finished: reason.is_some(),
    })
}

/// Returns a backtrack message; `text` is the remaining text.
pub(super) fn backtrack<'a>(
    run: &'a StreamedRun,
    index: usize,
    (removed_characters, removed_tokens): (usize, usize),
    removed_text: String,
    text: &'a str,
) -> StreamMessage<'a> {
    StreamMessage::Backtrack(BacktrackMessage {
        r#type: "backtrack",
        request_id: &run.request_id,
        index,
        removed_tokens,
        removed_characters,
        removed_text,
        generated_text: run.head.options.cumulative.then(|| echoed(run, text)),
    })
}

/// Returns the last message of a run: its completion, or the error that ended it with the text so far.
pub(super) fn last<'a>(run: &'a StreamedRun, over: &RunEnding, text: &'a str) -> StreamMessage<'a> {
    let text = echoed(run, text);
    let failed = |error: StreamErrorMessage, text, usage: Option<Usage>| {
        let id = run.request_id.as_str().into();
        StreamMessage::Error(RunErrorMessage::ended(error, id, text, usage.map(StreamUsage::from)))
    };
    match &over.outcome {
        Ok(end) => {
            let finish = &end.finish;
            let counts = Some(finish.usage);
            match (finish.reason, finish.cause) {
                (FinishReason::Cancelled, Some(EndCause::Timeout)) => {
                    failed(timed_out(run.head.options.timeout), text, counts)
                }
                (FinishReason::Cancelled, Some(EndCause::ClientStop | EndCause::Regenerate)) => {
                    StreamMessage::Completion(completion(run, over, finish, text).stopped_by_client())
                }
                (FinishReason::Cancelled, _) => failed(cancelled_error(finish.message.as_deref()), text, counts),
                (FinishReason::Error, _) => {
                    failed(run_error(finish.fault, finish.cause, finish.message.as_deref()), text, counts)
                }
                _ => StreamMessage::Completion(completion(run, over, finish, text)),
            }
        }
        Err(error) => failed(error.streaming(), text, None),
    }
}

fn completion<'a>(
    run: &'a StreamedRun,
    over: &RunEnding,
    finish: &Finish,
    text: Cow<'a, str>,
) -> CompletionMessage<'a> {
    let timing = || StreamTiming {
        first_token_ms: finish.first_token_us.map(|us| ms(Duration::from_micros(us))),
        total_ms: ms(over.total),
    };
    CompletionMessage {
        stop_string: finish.stop_string.clone(),
        tool_calls: finish.tool_calls.clone(),
        timing: run.head.options.timing.then(timing),
        ..CompletionMessage::new(run.request_id.as_str().into(), text, finish.reason, finish.usage)
    }
}

impl<'a> CompletionMessage<'a> {
    /// Returns the end of a run without details.
    pub(super) fn new(request_id: Cow<'a, str>, text: Cow<'a, str>, reason: FinishReason, usage: Usage) -> Self {
        // A stopped run has `stop`.
        let reason = if reason == FinishReason::Cancelled { FinishReason::Stop } else { reason };
        Self {
            r#type: "completion",
            request_id,
            generated_text: text,
            finish_reason: reason.as_str(),
            usage: usage.into(),
            stop_string: None,
            tool_calls: None,
            timing: None,
            stopped_by: None,
            stored: false,
        }
    }

    /// Returns the end of a run that the client stopped.
    pub(super) fn stopped_by_client(self) -> Self {
        Self { stopped_by: Some("client"), ..self }
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

/// Returns a status message about progress or a completed control message.
pub(super) fn status<'a>(
    operation: &'a str,
    progress: u8,
    message: impl Into<Cow<'a, str>>,
    request_id: Option<&'a str>,
) -> StatusMessage<'a> {
    let message = message.into();
    StatusMessage { r#type: "status", operation, progress, message, request_id, eta_seconds: None, parameters: None }
}

/// Returns the prompt's progress.
pub(super) fn prompt_progress(run: &StreamedRun, progress: PromptProgress) -> StreamMessage<'_> {
    let PromptProgress { total, cached, processed, elapsed_us } = progress;
    let percent = u64::from(processed) * 100 / u64::from(total.max(1));
    let text = format!("processing the prompt: {processed} of {total} tokens");
    let mut status = status("prompt_processing", percent as u8, text, Some(&run.request_id));
    if processed > cached {
        let left = elapsed_us as f64 / 1e6 * f64::from(total - processed) / f64::from(processed - cached);
        status.eta_seconds = Some((left * 10.0).round() / 10.0);
    }
    StreamMessage::Status(status)
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
pub(super) fn never_started(request_id: &str) -> CompletionMessage<'_> {
    CompletionMessage::new(request_id.into(), "".into(), FinishReason::Stop, Usage::default()).stopped_by_client()
}

/// Returns the error of a failed run.
pub(super) fn run_error(fault: Option<Fault>, cause: Option<EndCause>, message: Option<&str>) -> StreamErrorMessage {
    let message = message.unwrap_or("the run failed");
    match (fault, cause) {
        (Some(Fault::Mod | Fault::QuoteMod), _) => StreamErrorMessage::new("content_filter", message, None),
        (Some(Fault::Request), _) => StreamErrorMessage::new("invalid_request", message, None),
        (None, Some(EndCause::OutOfMemory)) => StreamErrorMessage::new("memory_pressure", message, Some("retry")),
        (None, _) => StreamErrorMessage::new("internal_error", message, None),
    }
}

/// Returns the error of a run that exceeded its time limit.
pub(super) fn timed_out(limit: Option<Duration>) -> StreamErrorMessage {
    let message = match limit {
        Some(limit) => format!("the run exceeded its time limit of {} ms", limit.as_millis()),
        None => "the run exceeded its time limit".to_owned(),
    };
    StreamErrorMessage::new("timeout", message, Some("retry"))
}

/// Returns the error of a run that the server cancelled.
pub(super) fn cancelled_error(message: Option<&str>) -> StreamErrorMessage {
    StreamErrorMessage::new("unavailable", message.unwrap_or("the run was cancelled"), Some("retry"))
}

fn echoed<'a>(run: &StreamedRun, text: &'a str) -> Cow<'a, str> {
    if run.head.options.echo_prompt { format!("{}{text}", run.head.prompt_text).into() } else { text.into() }
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_kind_follows_the_fault() {
        let kind = |fault, cause, message: &str| {
            let error = serde_json::to_value(run_error(fault, cause, Some(message))).unwrap();
            (error["error"].as_str().unwrap().to_owned(), error["recoverable"].as_bool().unwrap())
        };
        assert_eq!(kind(Some(Fault::Mod), None, "out of memory, says a mod"), ("content_filter".into(), false));
        assert_eq!(kind(Some(Fault::Request), None, "no token can be drawn"), ("invalid_request".into(), false));
        assert_eq!(kind(None, Some(EndCause::OutOfMemory), "no room"), ("memory_pressure".into(), true));
        assert_eq!(
            kind(None, Some(EndCause::DecodeFailed), "out of memory, says a log"),
            ("internal_error".into(), false)
        );
        assert_eq!(kind(None, None, "the KV state is damaged"), ("internal_error".into(), false));
    }
}
