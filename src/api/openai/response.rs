//! Parts of responses that completions and chat completions share.

pub(super) use crate::api::shared::generation::OPENAI_NO_LOGPROB as NO_LOGPROB;
use crate::api::shared::generation::{RunTimings, ThunderFields};
use crate::api::shared::llama_completion::LlamaCompletionFields;
use crate::api::shared::settings::GenerationSettings;
use crate::engine::RunMetrics;
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
    pub(super) verbose: Option<LlamaCompletionFields<'a>>,
}

/// Returns the ended answer with llama-server's details, for requests with `verbose`.
pub(super) fn verbose_answer<'a>(
    finish: &'a Finish,
    model: &'a str,
    metrics: &RunMetrics,
    prompt: &'a str,
    settings: &'a GenerationSettings,
) -> LlamaCompletionFields<'a> {
    let predicted = finish.usage.completion_tokens;
    LlamaCompletionFields::new(finish, predicted, metrics, model, prompt, Cow::Borrowed(settings))
}

/// Returns the timings of the slowest answer.
pub(super) fn slowest_timings<'a>(answers: impl Iterator<Item = &'a Finish>) -> Option<RunTimings> {
    answers.max_by_key(|finish| finish.prompt_us + finish.generation_us).map(RunTimings::new)
}

/// Returns OpenAI's name of a finish reason.
pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Stop | FinishReason::Cancelled | FinishReason::Error => "stop",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{RunEnd, system};

    #[test]
    fn timings_are_those_of_the_slowest_answer() {
        let finish = |prompt_us, generation_us| Finish {
            prompt_us,
            generation_us,
            ..RunEnd::empty(system::now(), Usage::default()).finish
        };
        let answers = [finish(1000, 5000), finish(2000, 7000), finish(4000, 1000)];
        let timings = slowest_timings(answers.iter());
        assert_eq!(serde_json::to_value(timings).unwrap()["prompt_ms"], 2.0);
        assert!(slowest_timings([].iter()).is_none());
    }
}
