//! The events of a response's stream.

use super::response::{OutputItem, OutputPart, ResponseObject};
use crate::api::shared::generation::{PromptProgressResponse, RunTimings, TokenProbabilities};
use crate::server::ErrorCode;
use serde::Serialize;
use utoipa::ToSchema;

/// An event with its number in the stream.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ResponseStreamEvent<'a> {
    #[serde(flatten)]
    pub(super) event: ResponseEvent<'a>,
    /// Number of the event, from 0.
    pub(super) sequence_number: u64,
}

/// An event of a response's stream.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type")]
pub(super) enum ResponseEvent<'a> {
    /// The start of the stream.
    #[serde(rename = "response.created")]
    Created { response: &'a ResponseObject },
    /// The response without output; repeated with the progress of the prompt, if requested.
    #[serde(rename = "response.in_progress")]
    InProgress {
        response: &'a ResponseObject,
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt_progress: Option<PromptProgressResponse>,
        #[serde(skip_serializing_if = "Option::is_none")]
        timings: Option<RunTimings>,
    },
    /// The start of an item.
    #[serde(rename = "response.output_item.added")]
    OutputItemAdded { output_index: usize, item: &'a OutputItem },
    /// The end of an item.
    #[serde(rename = "response.output_item.done")]
    OutputItemDone { output_index: usize, item: &'a OutputItem },
    /// The start of an item's content.
    #[serde(rename = "response.content_part.added")]
    ContentPartAdded { item_id: &'a str, output_index: usize, content_index: usize, part: OutputPart<'a> },
    /// The end of an item's content.
    #[serde(rename = "response.content_part.done")]
    ContentPartDone { item_id: &'a str, output_index: usize, content_index: usize, part: OutputPart<'a> },
    /// More reasoning.
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningTextDelta {
        item_id: &'a str,
        output_index: usize,
        delta: &'a str,
        content_index: usize,
        #[serde(skip_serializing_if = "Option::is_none")]
        timings: Option<RunTimings>,
    },
    /// More text.
    #[serde(rename = "response.output_text.delta")]
    OutputTextDelta {
        item_id: &'a str,
        output_index: usize,
        delta: &'a str,
        content_index: usize,
        /// Log-probabilities of its tokens, if requested.
        logprobs: Vec<TokenProbabilities>,
        #[serde(skip_serializing_if = "Option::is_none")]
        timings: Option<RunTimings>,
    },
    /// More of a call's arguments.
    #[serde(rename = "response.function_call_arguments.delta")]
    FunctionCallArgumentsDelta {
        item_id: &'a str,
        output_index: usize,
        delta: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        timings: Option<RunTimings>,
    },
    /// The complete reasoning.
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningTextDone { item_id: &'a str, output_index: usize, content_index: usize, text: &'a str },
    /// The complete text.
    #[serde(rename = "response.output_text.done")]
    OutputTextDone {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
        /// Log-probabilities of its tokens, if requested.
        logprobs: Vec<TokenProbabilities>,
    },
    /// The complete arguments of a call.
    #[serde(rename = "response.function_call_arguments.done")]
    FunctionCallArgumentsDone { item_id: &'a str, output_index: usize, name: &'a str, arguments: &'a str },
    /// A mod removed output that was already sent.
    #[serde(rename = "thunder.retract")]
    Retract {
        /// Characters to remove from the text.
        chars: usize,
        /// Characters to remove from the reasoning.
        reasoning_chars: usize,
        /// Tool calls to remove.
        tool_calls: usize,
    },
    /// The complete response.
    #[serde(rename = "response.completed")]
    Completed { response: &'a ResponseObject, timings: Option<RunTimings> },
    /// The response, if the maximum number of tokens was reached.
    #[serde(rename = "response.incomplete")]
    Incomplete { response: &'a ResponseObject, timings: Option<RunTimings> },
    /// The response of a failed run; the last event.
    #[serde(rename = "response.failed")]
    Failed { response: &'a ResponseObject },
    /// The run failed; `response.failed` follows.
    #[serde(rename = "error")]
    Error {
        #[schema(value_type = Option<String>)]
        code: Option<ErrorCode>,
        message: String,
        param: Option<String>,
    },
}
