//! Parts of responses that chat completions and completions share.

use crate::api::shared::generation::{self, RunTimings};
use crate::api::shared::settings::GenerationSettings;
use crate::events::{Finish, FinishReason, RunId, TokenId, Usage};
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

/// Fingerprint of the server. Clients of llama-server look for the `b` of its build numbers.
const FINGERPRINT: &str = concat!("b0-thunder-", env!("CARGO_PKG_VERSION"));

/// OpenAI's value for a token without a probability.
pub(super) const NO_LOGPROB: f32 = -9999.0;

/// The id of an answer: a prefix and the id of its run.
#[derive(Debug, Clone, Copy)]
pub(super) struct AnswerId(pub(super) &'static str, pub(super) RunId);

impl Serialize for AnswerId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}{}", self.0, self.1))
    }
}

/// Fields that completions, chat completions and their chunks have in common.
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

/// The answer with llama-server's details, for requests with `verbose`.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct VerboseAnswer<'a> {
    index: u32,
    content: &'a str,
    /// Always empty.
    #[schema(value_type = Vec<i32>)]
    tokens: [TokenId; 0],
    id_slot: Option<u32>,
    /// Always true.
    stop: bool,
    model: &'a str,
    tokens_predicted: u32,
    tokens_evaluated: u32,
    tokens_cached: u32,
    generation_settings: &'a GenerationSettings,
    /// Text of the prompt.
    prompt: &'a str,
    has_new_line: bool,
    /// True if the context was full.
    truncated: bool,
    /// `limit`, `eos` or `word`.
    stop_type: &'static str,
    /// The stop string that ended the answer, or "".
    stopping_word: &'a str,
    timings: RunTimings,
}

impl<'a> VerboseAnswer<'a> {
    /// Returns the details of an ended answer.
    pub(super) fn new(
        finish: &'a Finish,
        model: &'a str,
        id_slot: Option<u32>,
        prompt: &'a str,
        generation_settings: &'a GenerationSettings,
    ) -> Self {
        let (stop_type, stopping_word) = match finish.reason {
            FinishReason::Length => ("limit", ""),
            _ => finish.stop_string.as_deref().map_or(("eos", ""), |word| ("word", word)),
        };
        let usage = finish.usage;
        // The KV cache lacks the last token, because it is not decoded. An end-of-turn token is not counted at all.
        let uncached =
            u32::from(stop_type != "eos" && usage.completion_tokens > 0) + generation::shifted_tokens(finish);
        Self {
            index: 0,
            content: &finish.text,
            tokens: [],
            id_slot,
            stop: true,
            model,
            tokens_predicted: usage.completion_tokens,
            tokens_evaluated: usage.prompt_tokens,
            tokens_cached: (usage.prompt_tokens + usage.completion_tokens).saturating_sub(uncached),
            generation_settings,
            prompt,
            has_new_line: finish.text.contains('\n'),
            truncated: finish.truncated,
            stop_type,
            stopping_word,
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
