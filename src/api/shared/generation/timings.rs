//! Times and progress of a run in llama-server's format.

use crate::engine::{PromptProgress, PromptTiming};
use crate::events::{EvictedMessage, Finish, ModFailures, Usage};
use serde::Serialize;
use utoipa::ToSchema;

/// Token counts and times of a run.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct RunTimings {
    /// Prompt tokens from the cache.
    cache_n: u32,
    /// Prompt tokens that were decoded.
    prompt_n: u32,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    /// Generated tokens. The first is produced with the prompt, so the rates cover only the tokens after it.
    predicted_n: u32,
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
    /// Tokens evicted because the context was full.
    #[serde(skip_serializing_if = "Option::is_none")]
    evicted_n: Option<u32>,
    /// Messages evicted because the context was full.
    #[serde(skip_serializing_if = "Option::is_none")]
    evicted: Option<Vec<EvictedMessage>>,
    /// Draft tokens of speculative decoding; absent if there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_n: Option<u32>,
    /// Accepted draft tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_n_accepted: Option<u32>,
    /// Explanation of the finish reason, such as a time limit; absent if it needs none.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    /// Mods with failed calls; absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mod_failures: Vec<ModFailures>,
}

impl RunTimings {
    /// Returns the timings of a run, with the messages evicted because the context was full.
    pub(crate) fn new(finish: &Finish) -> Self {
        Self::with_predicted(finish, finish.usage.completion_tokens)
    }

    /// Returns the timings with `predicted` as the number of generated tokens, including the one that ended the answer.
    pub(crate) fn with_predicted(finish: &Finish, predicted: u32) -> Self {
        let usage = Usage { completion_tokens: predicted, ..finish.usage };
        let evicts = finish.evicted_tokens > 0;
        let drafts = Some(finish.drafts).filter(|drafts| drafts.drafted > 0);
        Self {
            evicted_n: evicts.then_some(finish.evicted_tokens),
            evicted: evicts.then(|| finish.evicted.clone()),
            draft_n: drafts.map(|drafts| drafts.drafted),
            draft_n_accepted: drafts.map(|drafts| drafts.accepted),
            // The finish reason alone does not show that a time limit was reached or a mod was disabled.
            message: finish.message.clone(),
            mod_failures: finish.mod_failures.clone(),
            ..Self::from_counts(usage, finish.prompt_decoded, finish.prompt_us, finish.generation_us)
        }
    }

    /// Returns the timings of an active run that has generated `generated` tokens.
    pub(crate) fn partial(prompt: &PromptTiming, generated: u32) -> Self {
        let usage = Usage { prompt_tokens: prompt.tokens, cached_tokens: prompt.cached, completion_tokens: generated };
        let decoded = prompt.tokens.saturating_sub(prompt.cached);
        Self::from_counts(usage, decoded, prompt.elapsed_us, prompt.at.elapsed().as_micros() as u64)
    }

    /// Returns the timings while the prompt is evaluated; all are 0 before the first decode.
    pub(crate) fn from_prompt(progress: PromptProgress) -> Self {
        let usage = Usage { prompt_tokens: progress.total, cached_tokens: progress.cached, completion_tokens: 0 };
        let decoded = progress.processed.saturating_sub(progress.cached);
        Self::from_counts(usage, decoded, if decoded > 0 { progress.elapsed_us } else { 0 }, 0)
    }

    /// Returns the timings for these counts, and times in microseconds.
    fn from_counts(usage: Usage, prompt_n: u32, prompt_us: u64, generation_us: u64) -> Self {
        let (prompt_ms, predicted_ms) = (prompt_us as f64 / 1e3, generation_us as f64 / 1e3);
        let per_second = |count: u32, ms: f64| if ms > 0.0 { f64::from(count) * 1e3 / ms } else { 0.0 };
        let per_token = |count: u32, ms: f64| if count > 0 { ms / f64::from(count) } else { 0.0 };
        let steps = usage.completion_tokens.saturating_sub(1);
        Self {
            cache_n: usage.cached_tokens,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: per_token(prompt_n, prompt_ms),
            prompt_per_second: per_second(prompt_n, prompt_ms),
            predicted_n: usage.completion_tokens,
            predicted_ms,
            predicted_per_token_ms: per_token(steps, predicted_ms),
            predicted_per_second: per_second(steps, predicted_ms),
            evicted_n: None,
            evicted: None,
            draft_n: None,
            draft_n_accepted: None,
            message: None,
            mod_failures: Vec::new(),
        }
    }
}

/// Progress of a prompt.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct PromptProgressResponse {
    /// Tokens of the prompt.
    total: u32,
    /// Tokens from the cache.
    cache: u32,
    /// Tokens processed so far, including those from the cache.
    processed: u32,
    time_ms: f64,
}

impl From<PromptProgress> for PromptProgressResponse {
    fn from(progress: PromptProgress) -> Self {
        let PromptProgress { total, cached, processed, elapsed_us } = progress;
        Self { total, cache: cached, processed, time_ms: elapsed_us as f64 / 1e3 }
    }
}
