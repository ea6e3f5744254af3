//! The captures of a decode, by token.

use crate::model::llama::{AttentionRow, Decoded, HiddenStates};
use std::iter::Peekable;
use std::sync::Arc;
use std::vec::IntoIter;

/// The captures of one token.
#[derive(Debug, Default)]
pub struct TokenCaptures {
    /// Its attention row.
    pub attention: Option<Arc<AttentionRow>>,
    /// Its hidden states.
    pub hidden_states: Option<HiddenStates>,
}

/// The captures of a decode, taken in the order of the tokens.
pub struct BatchCaptures {
    attention: Peekable<IntoIter<AttentionRow>>,
    hidden_states: Peekable<IntoIter<HiddenStates>>,
}

impl BatchCaptures {
    /// Creates the captures of a decode.
    pub fn new(decoded: Decoded) -> Self {
        let Decoded { attention, hidden_states } = decoded;
        Self { attention: attention.into_iter().peekable(), hidden_states: hidden_states.into_iter().peekable() }
    }

    /// Takes the captures of the token with this index in the batch. Those of earlier tokens, whose drafts were
    /// rejected, are skipped.
    pub fn take(&mut self, index: usize) -> TokenCaptures {
        while self.attention.next_if(|row| row.index < index).is_some() {}
        while self.hidden_states.next_if(|states| states.index < index).is_some() {}
        TokenCaptures {
            attention: self.attention.next_if(|row| row.index == index).map(Arc::new),
            hidden_states: self.hidden_states.next_if(|states| states.index == index),
        }
    }
}
