//! Input and result of choosing a slot for a prompt: the prompt prefers the slot whose KV state it can reuse.

use super::conversation::{Alignment, SlotHistory};
use crate::events::{Span, Tenant, TokenId};
use crate::model::Vocabulary;
use crate::model::llama::AdapterSet;

/// A run's prompt and the settings that determine which KV state it can reuse.
#[derive(Clone, Copy)]
pub struct PromptView<'a> {
    /// Tokens of the sequence.
    pub tokens: &'a [TokenId],
    /// Roles of the parts of the prompt.
    pub spans: &'a [Span],
    /// Vocabulary of the model.
    pub vocabulary: &'a Vocabulary,
    /// Maximum tokens of the answer.
    pub max_tokens: usize,
    /// Key of the states that the run can reuse.
    pub key: StateKey<'a>,
    /// True if the state of a matching prefix is reused.
    pub cache_prompt: bool,
    /// Minimum tokens of a chunk that is shifted to a new position and reused; 0 disables this.
    pub cache_reuse: usize,
    /// True if a full context drops messages.
    pub evicts: bool,
    /// True if messages were dropped.
    pub is_truncated: bool,
    /// True if the run captures attention, which requires that each token is in the KV cell with the index of its
    /// position.
    pub needs_cells_in_order: bool,
}

/// Tenant and adapters of a run, whose KV state only runs with the same ones reuse: adapters change the state, and the state
/// of another tenant would disclose its tokens or change the answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StateKey<'a> {
    /// The tenant; `None` if the server has no keys.
    pub owner: Option<&'a Tenant>,
    /// The adapters; `None` before the first decode.
    pub adapters: Option<&'a AdapterSet>,
}

/// The slot chosen for a run, and the alignment of the prompt with the state that the run will reuse.
pub struct SlotChoice {
    /// Number of the slot.
    pub slot: usize,
    /// Prompt aligned with the history; `None` if nothing changes.
    pub aligned: Option<Alignment>,
    /// History of the tokens that the prompt has in common with the state.
    pub history: SlotHistory,
}

/// A prefix of a prompt that the run in another slot is decoding.
#[derive(Debug, Clone, Copy)]
pub struct ExpectedPrefix {
    /// The other slot.
    pub slot: usize,
    /// Tokens that the slot's state will have in common with the prompt.
    pub tokens: usize,
}
