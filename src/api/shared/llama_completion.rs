//! Fields of llama-server's completion, which OpenAI's routes also return for requests with `verbose`.

use super::settings::GenerationSettings;
use crate::events::{Finish, FinishReason, TokenId};
use serde::Serialize;
use std::borrow::Cow;
use utoipa::ToSchema;

/// The first fields of a completion: its text and token counts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LlamaCompletionStart<'a> {
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
    pub(crate) const fn from_finish(finish: &Finish) -> Self {
        match finish.reason {
            FinishReason::Length => Self::Limit,
            FinishReason::Stop if finish.stop_string.is_some() => Self::Word,
            FinishReason::Stop | FinishReason::ToolCalls => Self::Eos,
            FinishReason::Cancelled | FinishReason::Error => Self::None,
        }
    }
}

/// The last fields of a completion: its settings and the cause of its end.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LlamaCompletionEnd<'a> {
    #[schema(value_type = GenerationSettings)]
    generation_settings: Cow<'a, GenerationSettings>,
    /// Text of the prompt.
    prompt: &'a str,
    has_new_line: bool,
    /// True if the context ended the answer.
    truncated: bool,
    /// `limit`, `word`, `eos` or `none`.
    #[schema(value_type = String)]
    stop_type: StopType,
    /// The stop string that ended the answer, or "".
    stopping_word: &'a str,
}

impl<'a> LlamaCompletionEnd<'a> {
    /// Returns the settings of an answer and the cause of its end.
    pub(crate) fn new(
        finish: &'a Finish,
        generation_settings: Cow<'a, GenerationSettings>,
        prompt: &'a str,
        truncated: bool,
    ) -> Self {
        Self {
            generation_settings,
            prompt,
            has_new_line: finish.text.contains('\n'),
            truncated,
            stop_type: StopType::from_finish(finish),
            stopping_word: finish.stop_string.as_deref().unwrap_or_default(),
        }
    }
}
