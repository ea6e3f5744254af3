//! Parts of a batch.

use crate::events::TokenId;

/// A number of tokens of one slot that the next decode includes.
#[derive(Debug, Clone, Copy)]
pub struct PlannedPart {
    pub slot: usize,
    pub tokens: usize,
}

/// Part of a run's sequence in a batch.
pub struct BatchPart {
    pub slot: usize,
    /// Position of the first token.
    pub from: usize,
    /// Position after the last token, without the draft.
    pub end: usize,
    /// Index in the batch and position of each token whose logits are requested, without the draft.
    pub outputs: Vec<(usize, usize)>,
    /// Drafted tokens, with their indexes in the batch.
    pub draft: Vec<(usize, TokenId)>,
}
