//! Tracking of the answer for a mod, including the changes by other mods.

use crate::events::TokenId;
use crate::mods::{Call, CallEvent, RunView};

/// Length of the answer at the last call of the mod.
#[derive(Debug, Default)]
pub struct SequenceTracker {
    tokens: usize,
}

/// Change of the answer since the last call.
#[derive(Debug)]
pub struct SequenceDelta<'a> {
    /// Number of tokens removed from its end.
    pub removed: usize,
    /// Tokens appended afterwards.
    pub added: &'a [TokenId],
    /// Log-probability of each appended token, if known; empty if none is known.
    pub logprobs: &'a [Option<f32>],
}

impl SequenceDelta<'_> {
    /// Returns the log-probability of each appended token.
    pub fn logprobs_or_none(&self) -> impl Iterator<Item = Option<f32>> {
        (0..self.added.len()).map(move |index| self.logprobs.get(index).copied().flatten())
    }
}

impl SequenceTracker {
    /// Processes a call and returns the change of the answer. The mod must handle `Added`, which reports each appended
    /// token once.
    pub fn update<'a>(&mut self, call: &Call<'a>) -> SequenceDelta<'a> {
        let (added, logprobs): (&[TokenId], &[Option<f32>]) = match call.event {
            CallEvent::Added { tokens, logprobs, .. } => (tokens, logprobs),
            _ => (&[], &[]),
        };
        let kept = call.answer_len() - added.len();
        let removed = self.tokens.saturating_sub(kept);
        self.tokens = call.answer_len();
        SequenceDelta { removed, added, logprobs }
    }

    /// Returns the number of tokens of the answer.
    pub fn token_count(&self) -> usize {
        self.tokens
    }
}

/// Returns the token with which a mod ends an answer.
pub fn end_token(run: &RunView) -> Result<TokenId, String> {
    let vocabulary = &run.vocabulary;
    let special = vocabulary.special();
    [special.eot, special.eos]
        .into_iter()
        .flatten()
        .chain(vocabulary.end_of_generation().iter().copied())
        .find(|&token| vocabulary.is_end_of_generation(token))
        .ok_or_else(|| "the model has no end-of-generation token to end an answer with".into())
}
