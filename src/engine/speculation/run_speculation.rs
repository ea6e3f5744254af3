//! Speculative decoding of one run: its n-gram index, and its account.

use super::account::DraftAccount;
use super::ngram::NgramIndex;
use crate::engine::captures::TokenCaptures;
use crate::events::TokenId;

/// A decoded token of a draft. It is accepted if the run samples the same token.
pub struct DraftedToken {
    /// Position of the token.
    pub position: usize,
    /// The token.
    pub token: TokenId,
    /// Next token of the draft.
    pub next: Option<TokenId>,
    /// Captures of the token.
    pub captures: TokenCaptures,
}

/// State of speculative decoding for one run.
pub struct RunSpeculation {
    /// N-grams of the run's tokens.
    pub ngrams: NgramIndex,
    /// Account of the drafts.
    pub account: DraftAccount,
    /// Number of tokens that a draft model may still decode without a charge: those that the run had when it got its
    /// slot.
    pub free_tokens: usize,
}

impl RunSpeculation {
    /// Creates the state of a new run. Drafts need a match of `min_match` tokens.
    pub fn new(min_match: usize) -> Self {
        Self { ngrams: NgramIndex::new(min_match), account: DraftAccount::new(), free_tokens: 0 }
    }
}
