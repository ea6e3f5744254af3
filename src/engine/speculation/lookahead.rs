//! Speculation of one run: its index of n-grams, its account, and the logits of a draft that wait for a mod.

use super::account::DraftAccount;
use super::ngram::NgramIndex;
use crate::events::TokenId;
use crate::model::llama::AttentionRow;
use std::collections::VecDeque;
use std::sync::Arc;

/// A decoded token of a draft. Its logits count if the run continued with this token.
pub struct DraftedToken {
    /// Position of the token.
    pub position: usize,
    /// The token.
    pub token: TokenId,
    /// Token of the draft that follows.
    pub next: Option<TokenId>,
    /// Attention of the token, if it was captured.
    pub attention: Option<Arc<AttentionRow>>,
}

/// Speculation of one run.
pub struct RunSpeculation {
    /// N-grams of the run's tokens.
    pub ngrams: NgramIndex,
    /// Account of the drafts.
    pub account: DraftAccount,
    /// Decoded tokens, with their logits, that the run has not reached because it waits for a mod.
    pub lookahead: VecDeque<(DraftedToken, Vec<f32>)>,
}

impl RunSpeculation {
    /// Creates the state of a run without tokens. Drafts need a match of `min_match` tokens.
    pub fn new(min_match: usize) -> Self {
        Self { ngrams: NgramIndex::new(min_match), account: DraftAccount::new(), lookahead: VecDeque::new() }
    }
}
