//! A chat completion and the chunks of its stream.

use crate::api::openai::response::{
    AnswerId, ChunkDetails, CompletionHead, CompletionTokenDetails, CompletionUsage, NO_LOGPROB, slowest_timings,
    verbose_answer,
};
use crate::api::shared::chat::{ChatDelta, ChatStream, ToolCallRef};
use crate::api::shared::generation::{
    CollectedTokens, ProbabilityFormatter, PromptProgressResponse, RunTimings, ThunderFields, TokenProbabilities,
};
use crate::api::shared::llama_completion::LlamaCompletionFields;
use crate::engine::MeasuredToken;
use serde::Serialize;
use utoipa::ToSchema;

/// A chat completion.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ChatCompletion<'a> {
    #[serde(flatten)]
    head: CompletionHead<'a>,
    choices: Vec<ChatChoice<'a>>,
    usage: CompletionUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<RunTimings>,
    #[serde(rename = "__verbose", skip_serializing_if = "Option::is_none")]
    verbose: Option<LlamaCompletionFields<'a>>,
    /// The runs of the choices.
    thunder: ThunderFields,
}

/// One answer of a chat completion.
#[derive(Debug, Serialize, ToSchema)]
struct ChatChoice<'a> {
    index: usize,
    message: ChatMessage<'a>,
    logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`.
    finish_reason: &'static str,
}

/// The message of an answer.
#[derive(Debug, Serialize, ToSchema)]
struct ChatMessage<'a> {
    /// Always `assistant`.
    role: &'static str,
    /// The text; null if the answer has only tool calls.
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning_content: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChatToolCall<'a>>,
}

/// A tool call.
#[derive(Debug, Serialize, ToSchema)]
struct ChatToolCall<'a> {
    id: &'a str,
    /// Always `function`.
    r#type: &'static str,
    function: ChatFunctionCall<'a>,
}

/// The function of a tool call.
#[derive(Debug, Serialize, ToSchema)]
struct ChatFunctionCall<'a> {
    name: &'a str,
    /// JSON.
    arguments: &'a str,
}

/// Log-probabilities of an answer's tokens.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ChatLogprobs {
    content: Vec<TokenProbabilities>,
    /// Always null.
    refusal: Option<String>,
}

/// A chunk of a chat completion.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ChatCompletionChunk<'a> {
    #[serde(flatten)]
    head: CompletionHead<'a>,
    /// One choice, or none in the chunk with the token counts.
    choices: Vec<ChatChunkChoice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_progress: Option<PromptProgressResponse>,
    #[serde(flatten)]
    pub(super) details: ChunkDetails<'a>,
}

/// A part of one answer.
#[derive(Debug, Serialize, ToSchema)]
struct ChatChunkChoice<'a> {
    index: usize,
    delta: ChatChunkDelta<'a>,
    logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls` in the last part.
    finish_reason: Option<&'static str>,
}

/// An addition to an answer.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ChatChunkDelta<'a> {
    /// The start of the answer, and progress of the prompt.
    Start {
        /// Always `assistant`.
        role: &'static str,
        /// Always null.
        content: Option<&'a str>,
    },
    /// More reasoning.
    Reasoning {
        /// The addition.
        reasoning_content: &'a str,
    },
    /// More text.
    Content {
        /// The addition.
        content: &'a str,
    },
    /// A part of a tool call.
    ToolCall {
        /// The part.
        #[schema(value_type = Vec<ToolCallChunk>)]
        tool_calls: [ToolCallChunk<'a>; 1],
    },
    /// The end of the answer.
    End {},
}

/// A part of a tool call.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ToolCallChunk<'a> {
    /// Index of the call.
    index: usize,
    /// Id of the call, in its first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    /// `function` in the first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionChunk<'a>,
}

/// A part of a tool call's function.
#[derive(Debug, Serialize, ToSchema)]
struct FunctionChunk<'a> {
    /// Name of the function, in the first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    /// An addition to the arguments.
    arguments: &'a str,
}

impl<'a> ChatChunkDelta<'a> {
    pub(super) const START: Self = Self::Start { role: "assistant", content: None };

    /// Returns the addition of a delta; `None` for the end of a tool call, which this format does not report.
    pub(super) fn new(delta: &'a ChatDelta) -> Option<Self> {
        let call = |index, id, r#type, function| Self::ToolCall {
            tool_calls: [ToolCallChunk { index, id, r#type, function }],
        };
        Some(match delta {
            ChatDelta::Reasoning(text) => Self::Reasoning { reasoning_content: text },
            ChatDelta::Content(text) => Self::Content { content: text },
            ChatDelta::ToolCall { index, id, name } => {
                call(*index, Some(id), Some("function"), FunctionChunk { name: Some(name), arguments: "" })
            }
            ChatDelta::ToolArguments { index, text } => {
                call(*index, None, None, FunctionChunk { name: None, arguments: text })
            }
            ChatDelta::ToolCallEnd(_) => return None,
            ChatDelta::Retract(_) => Self::Content { content: "" },
        })
    }
}

impl<'a> ChatCompletion<'a> {
    /// Returns the complete response.
    pub(super) fn new(chat: &'a ChatStream, tokens: &[CollectedTokens]) -> Self {
        let choice = |(index, tokens): (usize, &CollectedTokens)| ChatChoice {
            index,
            message: ChatMessage::new(chat, index),
            logprobs: logprobs(chat, tokens),
            finish_reason: chat.reason(index).as_str(),
        };
        Self {
            head: head(chat, "chat.completion"),
            choices: tokens.iter().enumerate().map(choice).collect(),
            usage: usage(chat),
            timings: timings(chat),
            verbose: verbose(chat),
            thunder: thunder(chat),
        }
    }
}

impl<'a> ChatMessage<'a> {
    fn new(chat: &'a ChatStream, answer: usize) -> Self {
        let parsed = chat.message(answer);
        let call = |ToolCallRef { id, name, arguments }| ChatToolCall {
            id,
            r#type: "function",
            function: ChatFunctionCall { name, arguments },
        };
        let tool_calls: Vec<_> = chat.calls(answer).into_iter().map(call).collect();
        Self {
            role: "assistant",
            content: (tool_calls.is_empty() || !parsed.content.is_empty()).then_some(parsed.content.as_str()),
            reasoning_content: &parsed.reasoning,
            tool_calls,
        }
    }
}

impl<'a> ChatCompletionChunk<'a> {
    /// Returns a chunk with an addition to one answer.
    pub(super) fn delta(
        chat: &'a ChatStream,
        index: usize,
        delta: ChatChunkDelta<'a>,
        logprobs: Option<ChatLogprobs>,
    ) -> Self {
        Self::with_choices(chat, vec![ChatChunkChoice { index, delta, logprobs, finish_reason: None }])
    }

    /// Returns the last chunk of one answer.
    pub(super) fn end(chat: &'a ChatStream, index: usize, logprobs: Option<ChatLogprobs>) -> Self {
        let finish_reason = Some(chat.reason(index).as_str());
        Self::with_choices(
            chat,
            vec![ChatChunkChoice { index, delta: ChatChunkDelta::End {}, logprobs, finish_reason }],
        )
    }

    /// Returns the chunk with the token counts.
    pub(super) fn usage(chat: &'a ChatStream) -> Self {
        let mut chunk = Self::with_choices(chat, Vec::new());
        chunk.details.usage = Some(usage(chat));
        chunk
    }

    fn with_choices(chat: &'a ChatStream, choices: Vec<ChatChunkChoice<'a>>) -> Self {
        Self {
            head: head(chat, "chat.completion.chunk"),
            choices,
            prompt_progress: None,
            details: ChunkDetails::default(),
        }
    }

    /// Adds the fields that only the last chunk of a stream has.
    pub(super) fn with_final_fields(mut self, chat: &'a ChatStream) -> Self {
        (self.details.timings, self.details.verbose) = (timings(chat), verbose(chat));
        self
    }
}

fn head<'a>(chat: &'a ChatStream, object: &'static str) -> CompletionHead<'a> {
    CompletionHead::new(object, AnswerId("chatcmpl-", chat.run()), chat.created, &chat.model)
}

/// Returns the token counts.
fn usage(chat: &ChatStream) -> CompletionUsage {
    let mut usage = CompletionUsage::from(chat.usage());
    usage.completion_tokens_details = Some(CompletionTokenDetails { reasoning_tokens: chat.reasoning_tokens() });
    usage
}

/// Returns the timings of the slowest answer.
fn timings(chat: &ChatStream) -> Option<RunTimings> {
    slowest_timings((0..chat.len()).filter_map(|answer| chat.finish(answer)))
}

/// Returns the ids of the runs and the path of their replay.
pub(super) fn thunder(chat: &ChatStream) -> ThunderFields {
    ThunderFields::runs(chat.runs()).with_slot(chat.slot(0))
}

/// Returns llama-server's details of the first answer, if requested.
fn verbose(chat: &ChatStream) -> Option<LlamaCompletionFields<'_>> {
    let (finish, details) = (chat.finish(0)?, chat.options.verbose.as_ref()?);
    Some(verbose_answer(finish, &chat.model, chat.metrics(0), &details.prompt, &details.settings))
}

/// Returns the log-probabilities of these tokens if the client requested them.
pub(super) fn logprobs(chat: &ChatStream, tokens: &[MeasuredToken]) -> Option<ChatLogprobs> {
    let formatter = ProbabilityFormatter {
        vocabulary: &chat.vocabulary,
        top: chat.options.logprobs.filter(|_| !tokens.is_empty())?,
        after_sampler: chat.options.after_sampler,
        no_logprob: NO_LOGPROB,
    };
    let content = tokens.iter().map(|token| formatter.sampled_token(token)).collect();
    Some(ChatLogprobs { content, refusal: None })
}
