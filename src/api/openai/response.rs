//! Parts of responses that completions and chat completions share.

pub(super) use crate::api::shared::generation::OPENAI_NO_LOGPROB as NO_LOGPROB;
use crate::api::shared::generation::{self, RunTimings, ThunderFields};
use crate::api::shared::llama_completion::{LlamaCompletionEnd, LlamaCompletionStart, StopType};
use crate::api::shared::settings::GenerationSettings;
use crate::events::{Finish, FinishReason, RunId, Usage};
use serde::{Serialize, Serializer};
use std::borrow::Cow;
use utoipa::ToSchema;

/// Fingerprint of the server. Clients of llama-server expect it to start with `b`, like a build number.
const FINGERPRINT: &str = concat!("b0-thunder-", env!("CARGO_PKG_VERSION"));

/// The id of an answer: a prefix and the id of its run.
#[derive(Debug, Clone, Copy)]
pub(super) struct AnswerId(pub(super) &'static str, pub(super) RunId);

impl Serialize for AnswerId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}{}", self.0, self.1))
    }
}

/// Fields that completions, chat completions and their chunks share.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CompletionHead<'a> {
    /// A prefix, such as `chatcmpl-`, and the id of the first run.
    #[schema(value_type = String)]
    id: AnswerId,
    /// `chat.completion`, `chat.completion.chunk` or `text_completion`.
    object: &'static str,
    /// Seconds since 1970.
    created: i64,
    /// Name of the model.
    model: &'a str,
    system_fingerprint: &'static str,
}

impl<'a> CompletionHead<'a> {
    /// Returns the fields for the type `object`.
    pub(super) const fn new(object: &'static str, id: AnswerId, created: i64, model: &'a str) -> Self {
        Self { id, object, created, model, system_fingerprint: FINGERPRINT }
    }
}

/// Token counts of a completion.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct CompletionUsage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokenDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) completion_tokens_details: Option<CompletionTokenDetails>,
}

/// Details of the prompt's tokens.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct PromptTokenDetails {
    /// Tokens from the cache.
    cached_tokens: u32,
}

/// Details of the answer's tokens.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct CompletionTokenDetails {
    /// Tokens of the reasoning.
    pub(super) reasoning_tokens: u32,
}

impl From<Usage> for CompletionUsage {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: PromptTokenDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: None,
        }
    }
}

/// Fields that only some chunks of a stream have.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct ChunkDetails<'a> {
    /// The runs of the choices in the first and last chunk, or a retraction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) thunder: Option<ThunderFields>,
    /// Only in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<CompletionUsage>,
    /// In the last chunk, and with `timings_per_token` in every chunk. With several choices, timings of the slowest
    /// one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timings: Option<RunTimings>,
    /// Only in the last chunk.
    #[serde(rename = "__verbose", skip_serializing_if = "Option::is_none")]
    pub(super) verbose: Option<VerboseAnswer<'a>>,
}

/// The answer with llama-server's details, for requests with `verbose`.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct VerboseAnswer<'a> {
    #[serde(flatten)]
    start: LlamaCompletionStart<'a>,
    tokens_cached: u32,
    #[serde(flatten)]
    end: LlamaCompletionEnd<'a>,
    timings: RunTimings,
}

impl<'a> VerboseAnswer<'a> {
    /// Returns the details of an ended answer.
    pub(super) fn new(
        finish: &'a Finish,
        model: &'a str,
        id_slot: Option<u32>,
        prompt: &'a str,
        settings: &'a GenerationSettings,
    ) -> Self {
        let usage = finish.usage;
        // The KV cache lacks the last token, because it is not decoded. An end-of-turn token is not counted at all.
        let uncached = u32::from(StopType::from_finish(finish) != StopType::Eos && usage.completion_tokens > 0)
            + generation::shifted_tokens(finish);
        Self {
            start: LlamaCompletionStart {
                index: 0,
                content: &finish.text,
                tokens: Vec::new(),
                id_slot: id_slot.map(i64::from),
                stop: true,
                model,
                tokens_predicted: usage.completion_tokens,
                tokens_evaluated: usage.prompt_tokens,
            },
            tokens_cached: (usage.prompt_tokens + usage.completion_tokens).saturating_sub(uncached),
            end: LlamaCompletionEnd::new(finish, Cow::Borrowed(settings), prompt, finish.truncated),
            timings: RunTimings::new(finish),
        }
    }
}

/// Returns OpenAI's name of a finish reason.
pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Stop | FinishReason::Cancelled | FinishReason::Error => "stop",
    }
}
