//! The tokens of an answer.

use crate::engine::MeasuredToken;
use std::ops::Deref;

/// The tokens of an answer so far, or of the part of it that is sent next.
#[derive(Debug, Clone, Default)]
pub(crate) struct CollectedTokens(Vec<MeasuredToken>);

impl CollectedTokens {
    /// Removes the last `retracted` tokens, then appends `added`.
    pub(crate) fn update(&mut self, retracted: usize, added: Vec<MeasuredToken>) {
        self.0.truncate(self.0.len().saturating_sub(retracted));
        self.0.extend(added);
    }
}

impl Deref for CollectedTokens {
    type Target = [MeasuredToken];

    fn deref(&self) -> &[MeasuredToken] {
        &self.0
    }
}
