//! A response and its items.

use super::logprobs::TextTokens;
use crate::api::shared::chat::ChatStream;
use crate::api::shared::generation::{ThunderFields, TokenProbabilities};
use crate::api::shared::settings::EmptyList;
use crate::events::FinishReason;
use crate::server::ErrorCode;
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use utoipa::ToSchema;

/// A response.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ResponseObject {
    /// `resp_` and the id of the run.
    pub(super) id: String,
    /// Always `response`.
    object: &'static str,
    /// Seconds since 1970.
    created_at: i64,
    /// Seconds since 1970; null until it is complete.
    completed_at: Option<i64>,
    pub(super) status: ResponseStatus,
    /// Always false.
    background: bool,
    /// Null unless the status is `failed`.
    error: Option<ResponseError>,
    incomplete_details: Option<IncompleteDetails>,
    /// Name of the model.
    model: String,
    pub(super) output: Vec<OutputItem>,
    /// Null while the response is in progress.
    usage: Option<ResponseUsage>,
    /// The run of the response.
    thunder: ThunderFields,
    #[serde(flatten)]
    pub(super) echo: EchoedFields,
}

/// Status of a response or an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum ResponseStatus {
    /// More output follows.
    InProgress,
    /// The output is complete.
    Completed,
    /// The maximum number of tokens was reached.
    Incomplete,
    /// The run failed while the response was streamed; without a stream, the error takes the place of the response.
    Failed,
}

/// The reason why a response failed.
#[derive(Debug, Serialize, ToSchema)]
struct ResponseError {
    /// A machine-readable code; `server_error` if there is no specific one.
    code: &'static str,
    message: String,
}

/// The reason why a response is incomplete.
#[derive(Debug, Serialize, ToSchema)]
struct IncompleteDetails {
    /// Always `max_output_tokens`.
    reason: &'static str,
}

/// Token counts of a response.
#[derive(Debug, Serialize, ToSchema)]
struct ResponseUsage {
    input_tokens: u32,
    input_tokens_details: InputTokenDetails,
    output_tokens: u32,
    output_tokens_details: ReasoningTokenDetails,
    total_tokens: u32,
}

/// Details of the prompt's tokens.
#[derive(Debug, Serialize, ToSchema)]
struct InputTokenDetails {
    /// Tokens from the cache.
    cached_tokens: u32,
}

/// Details of the output's tokens.
#[derive(Debug, Serialize, ToSchema)]
struct ReasoningTokenDetails {
    /// Tokens of the reasoning.
    reasoning_tokens: u32,
}

/// Request fields that the response repeats as sent, or their defaults.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct EchoedFields {
    #[schema(value_type = Option<String>)]
    instructions: Value,
    #[schema(value_type = Option<u32>)]
    max_output_tokens: Value,
    #[schema(value_type = Object)]
    metadata: Value,
    #[schema(value_type = bool)]
    parallel_tool_calls: Value,
    #[schema(value_type = Option<String>)]
    previous_response_id: Value,
    #[schema(value_type = Object)]
    reasoning: Value,
    /// False if the response is not stored.
    #[schema(value_type = bool)]
    pub(super) store: Value,
    #[schema(value_type = Option<f64>)]
    temperature: Value,
    #[schema(value_type = Object)]
    text: Value,
    tool_choice: Value,
    #[schema(value_type = Vec<Object>)]
    tools: Value,
    #[schema(value_type = Option<f64>)]
    top_p: Value,
    #[schema(value_type = String)]
    truncation: Value,
    #[schema(value_type = Option<String>)]
    user: Value,
}

impl EchoedFields {
    pub(super) fn from_body(body: &Value) -> Self {
        let sent_or = |name: &str, default: Value| {
            let present = body.get(name).filter(|value| !value.is_null());
            present.cloned().unwrap_or(default)
        };
        let object = |members: &[(&str, Value)]| {
            let members = members.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
            Value::Object(members.collect::<Map<_, _>>())
        };
        Self {
            instructions: sent_or("instructions", Value::Null),
            max_output_tokens: sent_or("max_output_tokens", Value::Null),
            metadata: sent_or("metadata", object(&[])),
            parallel_tool_calls: sent_or("parallel_tool_calls", true.into()),
            previous_response_id: sent_or("previous_response_id", Value::Null),
            reasoning: sent_or("reasoning", object(&[("effort", Value::Null), ("summary", Value::Null)])),
            store: sent_or("store", true.into()),
            temperature: sent_or("temperature", Value::Null),
            text: sent_or("text", object(&[("format", object(&[("type", "text".into())]))])),
            tool_choice: sent_or("tool_choice", "auto".into()),
            tools: sent_or("tools", Value::Array(Vec::new())),
            top_p: sent_or("top_p", Value::Null),
            truncation: sent_or("truncation", "disabled".into()),
            user: sent_or("user", Value::Null),
        }
    }
}

/// A part of the output.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputItem {
    /// Text.
    Message {
        id: String,
        status: ResponseStatus,
        /// Always `assistant`.
        role: &'static str,
        content: Vec<OutputPart<'static>>,
    },
    /// Reasoning.
    Reasoning {
        id: String,
        /// Always empty.
        #[schema(value_type = Vec<String>)]
        summary: EmptyList,
        content: Vec<OutputPart<'static>>,
        /// Always null.
        encrypted_content: Option<String>,
        status: ResponseStatus,
    },
    /// A call of a function.
    FunctionCall {
        id: String,
        status: ResponseStatus,
        /// Id of the call; the output of the function refers to it.
        call_id: String,
        /// Name of the function.
        name: String,
        /// JSON.
        arguments: String,
    },
}

/// A part of an item's content.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputPart<'a> {
    /// Text of a message.
    OutputText {
        /// The text.
        text: Cow<'a, str>,
        /// Always empty.
        #[schema(value_type = Vec<String>)]
        annotations: EmptyList,
        /// Log-probabilities of the text's tokens, if requested.
        logprobs: Vec<TokenProbabilities>,
    },
    /// Text of the reasoning.
    ReasoningText {
        /// The text.
        text: Cow<'a, str>,
    },
}

impl<'a> OutputPart<'a> {
    pub(super) fn text(text: impl Into<Cow<'a, str>>, logprobs: Vec<TokenProbabilities>) -> Self {
        Self::OutputText { text: text.into(), annotations: [], logprobs }
    }

    pub(super) fn reasoning(text: impl Into<Cow<'a, str>>) -> Self {
        Self::ReasoningText { text: text.into() }
    }
}

impl ResponseObject {
    /// Returns the complete response.
    pub(super) fn complete(chat: &ChatStream, tokens: &TextTokens, echo: EchoedFields) -> Self {
        let parsed = chat.message(0);
        let status = status(chat);
        let mut output = Vec::new();
        let calls = chat.calls(0);
        // Only the last item can be cut.
        let status_before = |has_next: bool| if has_next { ResponseStatus::Completed } else { status };
        if !parsed.reasoning.is_empty() {
            let status = status_before(!parsed.content.is_empty() || !calls.is_empty());
            output.push(OutputItem::reasoning(chat, 0, Some(parsed.reasoning.clone()), status));
        }
        if !parsed.content.is_empty() || (calls.is_empty() && output.is_empty()) {
            let part = OutputPart::text(parsed.content.clone(), tokens.logprobs(chat, 0..tokens.assigned()));
            output.push(OutputItem::message(chat, 0, Some(part), status_before(!calls.is_empty())));
        }
        for (number, call) in calls.into_iter().enumerate() {
            let status = call_status(call.arguments);
            output.push(OutputItem::function_call(chat, number, call.id, call.name, call.arguments, status));
        }
        let details = IncompleteDetails { reason: "max_output_tokens" };
        let ended = chat.finish(0).filter(|_| status == ResponseStatus::Completed);
        let usage = chat.usage();
        Self {
            completed_at: ended
                .map(|finish| chat.created + ((finish.prompt_us + finish.generation_us) / 1_000_000) as i64),
            status,
            incomplete_details: (status == ResponseStatus::Incomplete).then_some(details),
            output,
            usage: Some(ResponseUsage {
                input_tokens: usage.prompt_tokens,
                input_tokens_details: InputTokenDetails { cached_tokens: usage.cached_tokens },
                output_tokens: usage.completion_tokens,
                output_tokens_details: ReasoningTokenDetails { reasoning_tokens: chat.reasoning_tokens() },
                total_tokens: usage.prompt_tokens + usage.completion_tokens,
            }),
            ..Self::in_progress(chat, echo)
        }
    }

    /// Returns the response of a failed run, without its output.
    pub(super) fn failed(chat: &ChatStream, echo: EchoedFields, code: Option<ErrorCode>, message: &str) -> Self {
        let code = code.map_or("server_error", ErrorCode::as_str);
        Self {
            status: ResponseStatus::Failed,
            error: Some(ResponseError { code, message: message.to_owned() }),
            ..Self::in_progress(chat, echo)
        }
    }

    /// Returns a response without output.
    pub(super) fn in_progress(chat: &ChatStream, echo: EchoedFields) -> Self {
        Self {
            id: format!("resp_{}", chat.run().0.simple()),
            object: "response",
            created_at: chat.created,
            completed_at: None,
            status: ResponseStatus::InProgress,
            background: false,
            error: None,
            incomplete_details: None,
            model: chat.model.clone(),
            output: Vec::new(),
            usage: None,
            thunder: ThunderFields::run(chat.run()),
            echo,
        }
    }
}

fn status(chat: &ChatStream) -> ResponseStatus {
    match chat.finish(0).map(|finish| finish.reason) {
        None => ResponseStatus::InProgress,
        Some(FinishReason::Length) => ResponseStatus::Incomplete,
        Some(_) => ResponseStatus::Completed,
    }
}

/// Returns the status of a call whose arguments end with these.
pub(super) fn call_status(arguments: &str) -> ResponseStatus {
    let is_complete = serde_json::from_str::<serde::de::IgnoredAny>(arguments).is_ok();
    if is_complete { ResponseStatus::Completed } else { ResponseStatus::Incomplete }
}

/// Returns the id of an item. `number` counts the items of its kind: a streamed answer may have several messages between
/// its reasoning and calls, which are one message of the complete response.
fn id(chat: &ChatStream, kind: &str, number: usize) -> String {
    format!("{kind}_{}_{number}", chat.run().0.simple())
}

impl OutputItem {
    /// Returns a reasoning item; `None` as its text means that the item has just started.
    pub(super) fn reasoning(chat: &ChatStream, number: usize, text: Option<String>, status: ResponseStatus) -> Self {
        Self::Reasoning {
            id: id(chat, "rs", number),
            summary: [],
            encrypted_content: None,
            status,
            content: text.into_iter().map(OutputPart::reasoning).collect(),
        }
    }

    /// Returns a message item; `None` as its text means that the item has just started.
    pub(super) fn message(
        chat: &ChatStream,
        number: usize,
        text: Option<OutputPart<'static>>,
        status: ResponseStatus,
    ) -> Self {
        Self::Message { id: id(chat, "msg", number), status, role: "assistant", content: text.into_iter().collect() }
    }

    /// Returns a function call item.
    pub(super) fn function_call(
        chat: &ChatStream,
        number: usize,
        call: &str,
        name: &str,
        arguments: &str,
        status: ResponseStatus,
    ) -> Self {
        Self::FunctionCall {
            id: id(chat, "fc", number),
            status,
            call_id: call.to_owned(),
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        }
    }

    /// Returns the id of the item.
    pub(super) fn id(&self) -> &str {
        match self {
            Self::Message { id, .. } | Self::Reasoning { id, .. } | Self::FunctionCall { id, .. } => id,
        }
    }
}

/// The result of deleting a stored response.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DeletedResponse {
    pub(super) id: String,
    /// Always `response`.
    pub(super) object: &'static str,
    /// Always true.
    pub(super) deleted: bool,
}

/// A page of input items.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct InputItemsResponse {
    /// Always `list`.
    pub(super) object: &'static str,
    /// Id of the first item of the page.
    #[schema(value_type = Option<String>)]
    pub(super) first_id: Value,
    /// Id of the last item of the page.
    #[schema(value_type = Option<String>)]
    pub(super) last_id: Value,
    pub(super) has_more: bool,
    /// The items as sent, with id, type and status.
    #[schema(value_type = Vec<Object>)]
    pub(super) data: Vec<Value>,
}
