//! Text of an answer, and the token of each part of it.

use super::sequence::SequenceDelta;
use crate::events::TokenId;
use crate::model::{Vocabulary, complete_prefix};
use crate::mods::RunView;

/// Text of an answer while it is generated. It contains no control tokens, except those that structure the answers of
/// the model's family.
#[derive(Debug)]
pub struct AnswerText {
    bytes: Vec<u8>,
    /// Length of `bytes` after each token.
    ends: Vec<usize>,
    /// Control tokens that are part of the text.
    visible: Vec<TokenId>,
}

/// End of a text that a Backtrack removes.
#[derive(Debug, PartialEq, Eq)]
pub struct RemovedText {
    /// Number of tokens to remove.
    pub tokens: usize,
    /// Part of the first token's text that precedes the cut.
    pub before: String,
}

impl AnswerText {
    /// Creates an empty text for a run.
    pub fn new(run: &RunView) -> Self {
        let mut visible = run.vocabulary.control_tokens_in(&run.answer_format.syntax.markers());
        visible.retain(|&token| !run.vocabulary.is_end_of_generation(token));
        Self { bytes: Vec::new(), ends: Vec::new(), visible }
    }

    /// Applies a change of the answer. Returns the length of the text after the removal, without the appended tokens.
    pub fn apply(&mut self, delta: &SequenceDelta<'_>, vocabulary: &Vocabulary) -> usize {
        self.ends.truncate(self.ends.len().saturating_sub(delta.removed));
        self.bytes.truncate(self.ends.last().copied().unwrap_or(0));
        let kept = self.bytes.len();
        for &token in delta.added {
            if !vocabulary.is_control(token) || self.visible.contains(&token) {
                self.bytes.extend_from_slice(vocabulary.piece(token));
            }
            self.ends.push(self.bytes.len());
        }
        kept
    }

    /// Returns the whole text.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns a range of the text that ends at a character boundary. Invalid bytes become spaces, so the length is
    /// unchanged.
    pub fn text(&self, from: usize, end: usize) -> String {
        let mut text = String::with_capacity(end - from);
        for chunk in self.bytes[from..end].utf8_chunks() {
            text.push_str(chunk.valid());
            text.extend(chunk.invalid().iter().map(|_| ' '));
        }
        text
    }

    /// Returns the number of tokens.
    pub fn token_count(&self) -> usize {
        self.ends.len()
    }

    /// Returns the number of bytes of the first `tokens` tokens.
    pub fn end_of(&self, tokens: usize) -> usize {
        let last = tokens.min(self.ends.len()).checked_sub(1);
        last.map_or(0, |last| self.ends[last])
    }

    /// Returns true if the text ends at a character boundary.
    pub fn ends_at_char_boundary(&self) -> bool {
        let recent = self.bytes.len().saturating_sub(4);
        // If the range starts within a character, its first bytes are invalid and count as complete.
        complete_prefix(&self.bytes[recent..]) == self.bytes.len() - recent
    }

    /// Returns the tokens that a Backtrack must remove to cut the text from the byte `at` on, and the kept part of the
    /// first one.
    pub fn cut(&self, at: usize) -> RemovedText {
        let kept = self.ends.partition_point(|&end| end <= at);
        let from = self.end_of(kept);
        RemovedText {
            tokens: self.ends.len() - kept,
            before: String::from_utf8_lossy(&self.bytes[from..at.max(from).min(self.bytes.len())]).into_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{AnswerText, RemovedText};
    use crate::mods::builtin::support::sequence::SequenceDelta;
    use crate::mods::builtin::testing::run;

    #[test]
    fn cut_maps_bytes_to_tokens() {
        let run = run();
        let mut answer = AnswerText::new(&run);
        let tokens = run.vocabulary.encode_plain("Hello a very bad idea");
        let logprobs: Vec<_> = tokens.iter().map(|_| None).collect();
        assert_eq!(
            answer.apply(&SequenceDelta { removed: 0, added: &tokens, logprobs: &logprobs }, &run.vocabulary),
            0
        );
        assert_eq!(answer.cut(9), RemovedText { tokens: 3, before: " v".into() });
        assert_eq!(answer.cut(12), RemovedText { tokens: 2, before: String::new() });
        assert_eq!(answer.cut(21), RemovedText { tokens: 0, before: String::new() });
        let euro = [0xe2, 0x82];
        answer.apply(&SequenceDelta { removed: 2, added: &euro, logprobs: &[None, None] }, &run.vocabulary);
        assert_eq!(answer.bytes(), b"Hello a very\xe2\x82");
        assert!(!answer.ends_at_char_boundary());
        answer.apply(&SequenceDelta { removed: 0, added: &[0xac], logprobs: &[None] }, &run.vocabulary);
        assert!(answer.ends_at_char_boundary());
        assert_eq!((answer.token_count(), answer.end_of(3)), (6, 12));
    }
}
