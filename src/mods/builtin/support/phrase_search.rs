//! Search for phrases in an answer while it is generated.

use super::phrase::{PhraseMatch, Phrases};
use crate::mods::Call;

/// Search for the phrases of a mod, in the added tokens and in those before them that may begin a phrase.
pub struct PhraseSearch {
    phrases: Phrases,
    /// Number of tokens at the end that may begin a phrase. Before the first token it is the maximum length of a phrase.
    holdback: usize,
    /// Number of tokens at the beginning of the answer that contain no phrase to change.
    clean: usize,
}

impl PhraseSearch {
    /// Creates a search in an answer that has not begun.
    pub fn new(phrases: Phrases) -> Self {
        Self { holdback: phrases.max_tokens(), phrases, clean: 0 }
    }

    /// Returns the text of a phrase.
    pub fn phrase(&self, index: usize) -> &str {
        self.phrases.text(index)
    }

    /// Returns the number of tokens that may still become a phrase.
    pub fn holdback(&self) -> usize {
        self.holdback
    }

    /// Finds a phrase after `added` tokens were added.
    pub fn find(&mut self, call: &Call<'_>, added: usize) -> Option<PhraseMatch> {
        let (generated, length) = (call.generated_in_context(), call.answer_len());
        // A phrase that remains because another mod's action won is found again.
        self.clean = self.clean.min(length - added);
        let fresh = (length - self.clean).min(generated.len());
        let found = self.phrases.find(&call.run.vocabulary, generated, fresh, call.is_last_event());
        if found.is_none() {
            self.holdback = self.phrases.holdback(&call.run.vocabulary, generated);
            self.clean = length - self.holdback.min(length);
        }
        found
    }

    /// Keeps a phrase that was found.
    pub fn keep(&mut self, call: &Call<'_>) {
        self.holdback = self.phrases.holdback(&call.run.vocabulary, call.generated_in_context());
        self.clean = call.answer_len();
    }

    /// Finds the phrase again after the next token.
    pub fn postpone(&mut self, call: &Call<'_>, found: &PhraseMatch) {
        self.holdback = found.tokens_from_char_boundary;
        self.clean = call.answer_len() - found.tokens_from_char_boundary.min(call.answer_len());
    }

    /// Prepares for the removal of the last `count` tokens.
    pub fn remove(&mut self, call: &Call<'_>, count: usize) {
        let generated = call.generated_in_context();
        self.holdback = self.phrases.holdback(&call.run.vocabulary, &generated[..generated.len() - count]);
    }

    /// Prepares for the replacement of a phrase, whose text may be the beginning of another phrase.
    pub fn replace(&mut self) {
        self.holdback = self.phrases.max_tokens();
    }
}
