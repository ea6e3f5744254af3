//! Tokens that a mod avoids at one position of the answer, so that the model continues differently.

use crate::events::TokenId;
use crate::model::llama::AVOIDED_TOKEN_BIAS;
use crate::mods::{Action, Call, CallEvent, LogitEdit};

/// Tokens that are drawn at a position only if no other token is possible there, for example because of a grammar.
pub struct AvoidedTokens {
    position: usize,
    tokens: Vec<TokenId>,
    is_unavoidable: bool,
}

impl AvoidedTokens {
    /// Creates an empty list for a position of the answer.
    pub fn new(position: usize) -> Self {
        Self { position, tokens: Vec::new(), is_unavoidable: false }
    }

    /// Returns the position in the answer.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Avoids another token.
    pub fn insert(&mut self, token: TokenId) {
        if !self.tokens.contains(&token) {
            self.tokens.push(token);
        }
    }

    /// Returns the change of the logits for a draw at the position.
    pub fn action(&self) -> Action {
        let entries = self.tokens.iter().map(|&token| (token, AVOIDED_TOKEN_BIAS)).collect();
        Action::AdjustedLogits { edit: LogitEdit::Add(entries), temperature: None }
    }

    /// Processes an event of the run. A mod must report each `Added`.
    pub fn observe(&mut self, call: &Call<'_>) {
        if let CallEvent::Added { tokens: [token], forced: false, .. } = call.event {
            self.is_unavoidable |= call.answer_len() == self.position + 1 && self.tokens.contains(token);
        }
    }

    /// Returns true if one of the tokens was drawn, because no other token was possible.
    pub fn is_unavoidable(&self) -> bool {
        self.is_unavoidable
    }
}
