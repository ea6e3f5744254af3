//! Input and result of the search for KV state that a prompt can reuse.

use super::conversation::{Alignment, SlotHistory};
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use crate::model::llama::AdapterSet;

/// A run's prompt, with everything that decides which state it can reuse.
#[derive(Clone, Copy)]
pub struct PromptView<'a> {
    /// Tokens of the sequence.
    pub tokens: &'a [TokenId],
    /// Roles of the parts of the prompt.
    pub spans: &'a [Span],
    /// Vocabulary of the model.
    pub vocabulary: &'a Vocabulary,
    /// LoRA adapters of the run.
    pub adapters: Option<&'a AdapterSet>,
    /// True if the state of a matching prefix is reused.
    pub cache_prompt: bool,
    /// Minimum length of a piece that is shifted to a new position; 0 for none.
    pub cache_reuse: usize,
    /// True if a full context drops messages.
    pub evicts: bool,
    /// True if messages were dropped.
    pub is_truncated: bool,
    /// True if the run captures attention, whose rows need exact positions.
    pub needs_exact_rows: bool,
}

/// A slot for a run, with the prompt aligned to the slot's history.
pub struct SlotChoice {
    /// Number of the slot.
    pub slot: usize,
    /// Prompt aligned to the history; `None` if nothing changes.
    pub aligned: Option<Alignment>,
    /// History of the tokens that the prompt shares with the state.
    pub history: SlotHistory,
}
