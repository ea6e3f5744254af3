//! Fields of llama-server's completion, which OpenAI's routes also return for requests with `verbose`.

use super::generation::RunTimings;
use super::settings::GenerationSettings;
use crate::engine::RunMetrics;
use crate::events::{Finish, FinishReason, TokenId};
use serde::Serialize;
use std::borrow::Cow;
use utoipa::ToSchema;

/// Fields of a completion, or of the last chunk of its stream.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LlamaCompletionFields<'a> {
    /// Index of the answer.
    pub(crate) index: usize,
    /// The text; empty in a stream.
    pub(crate) content: &'a str,
    /// Ids of the answer's tokens, if requested.
    pub(crate) tokens: Vec<TokenId>,
    /// The slot; -1 or null for none.
    pub(crate) id_slot: Option<i64>,
    /// Always true.
    pub(crate) stop: bool,
    /// Name of the model.
    pub(crate) model: &'a str,
    pub(crate) tokens_predicted: u32,
    pub(crate) tokens_evaluated: u32,
    #[schema(value_type = GenerationSettings)]
    pub(crate) generation_settings: Cow<'a, GenerationSettings>,
    /// Text of the prompt.
    pub(crate) prompt: &'a str,
    pub(crate) has_new_line: bool,
    /// True if the context ended the answer.
    pub(crate) truncated: bool,
    /// `limit`, `word`, `eos` or `none`.
    #[schema(value_type = String)]
    pub(crate) stop_type: StopType,
    /// The stop string that ended the answer, or "".
    pub(crate) stopping_word: &'a str,
    /// Number of tokens in the slot's KV cache after the answer.
    pub(crate) tokens_cached: u32,
    pub(crate) timings: RunTimings,
}

/// The cause of an answer's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StopType {
    /// A limit.
    Limit,
    /// A stop string.
    Word,
    /// An end-of-turn token, or a mod.
    Eos,
    /// The answer was cancelled or failed.
    None,
}

impl StopType {
    /// Returns the cause of a run's end.
    const fn from_finish(finish: &Finish) -> Self {
        match finish.reason {
            FinishReason::Length => Self::Limit,
            FinishReason::Stop if finish.stop_string.is_some() => Self::Word,
            FinishReason::Stop | FinishReason::ToolCalls => Self::Eos,
            FinishReason::Cancelled | FinishReason::Error => Self::None,
        }
    }
}

impl<'a> LlamaCompletionFields<'a> {
    /// Returns the fields of an ended run, with its whole text and without token ids. `predicted` is its number of tokens.
    pub(crate) fn new(
        finish: &'a Finish,
        predicted: u32,
        metrics: &RunMetrics,
        model: &'a str,
        prompt: &'a str,
        settings: Cow<'a, GenerationSettings>,
    ) -> Self {
        Self {
            index: 0,
            content: &finish.text,
            tokens: Vec::new(),
            id_slot: metrics.slot().map(i64::from),
            stop: true,
            model,
            tokens_predicted: predicted,
            tokens_evaluated: finish.usage.prompt_tokens,
            generation_settings: settings,
            prompt,
            has_new_line: finish.text.contains('\n'),
            truncated: finish.truncated,
            stop_type: StopType::from_finish(finish),
            stopping_word: finish.stop_string.as_deref().unwrap_or_default(),
            tokens_cached: metrics.kv_len.get().copied().unwrap_or_default(),
            timings: RunTimings::with_predicted(finish, predicted),
        }
    }
}
