//! History of the conversation in a slot: generated answers and dropped messages. [`align`](mod@super::align) uses it
//! to match the client's next request with the slot's state.

use super::spans::shifted_index;
use crate::events::{Span, TokenId, is_image_token};
use crate::model::Vocabulary;
use crate::model::chat::family::REASONING_END_MARKERS;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// History of a sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotHistory {
    /// Gaps in order of position.
    pub gaps: Vec<DroppedGap>,
    pub answers: Vec<PastAnswer>,
}

/// Messages that were dropped at one position of the sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppedGap {
    /// Position in the remaining tokens.
    pub at: usize,
    /// Number of dropped tokens.
    pub len: usize,
    /// Hash of the dropped tokens.
    pub hash: u64,
    /// Hashes of the messages: role, and text without reasoning.
    pub messages: Vec<u64>,
}

/// A generated answer, without the token that ended it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PastAnswer {
    /// Position of its first token.
    pub start: usize,
    pub tokens: Vec<TokenId>,
}

impl SlotHistory {
    pub fn is_empty(&self) -> bool {
        self.gaps.is_empty() && self.answers.is_empty()
    }

    /// Truncates the history to the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.gaps.retain(|gap| gap.at <= len);
        // The last token of an answer may be missing, since it is sampled but never decoded.
        self.answers.retain(|answer| answer.start < len && answer.start + answer.tokens.len() <= len + 1);
    }

    /// Records the answer generated from `start` on, without the end-of-generation token.
    pub fn record_answer(&mut self, start: usize, generated: &[TokenId], vocabulary: &Vocabulary) {
        let ended = generated.last().is_some_and(|&token| vocabulary.is_end_of_generation(token));
        let tokens = &generated[..generated.len() - usize::from(ended)];
        if !tokens.is_empty() {
            self.answers.push(PastAnswer { start, tokens: tokens.to_vec() });
        }
    }

    /// Records the messages in `ranges`, which are about to be removed from the sequence, and shifts all positions.
    /// `ranges` are in order.
    pub fn record_dropped(
        &mut self,
        tokens: &[TokenId],
        spans: &[Span],
        ranges: &[Range<usize>],
        vocabulary: &Vocabulary,
    ) {
        self.remove_ranges(ranges);
        for range in ranges {
            let messages = spans
                .iter()
                .filter(|span| span.role != "template" && range.contains(&(span.start as usize)))
                .map(|span| message_hash(span, tokens, vocabulary))
                .collect();
            let at = shifted_index(range.start, ranges);
            let hash = hash_tokens(&tokens[range.clone()]);
            // Older gaps at the same position come first, because their messages came first.
            let place = self.gaps.partition_point(|gap| gap.at <= at);
            self.gaps.insert(place, DroppedGap { at, len: range.len(), hash, messages });
        }
    }

    /// Shifts all positions after the removal of `ranges`, and drops gaps within them and answers that overlap them.
    pub fn remove_ranges(&mut self, ranges: &[Range<usize>]) {
        self.gaps.retain(|gap| !ranges.iter().any(|range| range.start < gap.at && gap.at < range.end));
        self.answers.retain(|answer| {
            let end = answer.start + answer.tokens.len();
            !ranges.iter().any(|range| range.start < end && answer.start < range.end)
        });
        for gap in &mut self.gaps {
            gap.at = shifted_index(gap.at, ranges);
        }
        for answer in &mut self.answers {
            answer.start = shifted_index(answer.start, ranges);
        }
    }
}

/// Returns the part of an answer after its reasoning, which clients send back.
pub fn without_reasoning(text: &str) -> &str {
    REASONING_END_MARKERS
        .iter()
        .filter_map(|mark| text.rfind(mark).map(|at| at + mark.len()))
        .max()
        .map_or(text, |from| &text[from..])
}

pub fn message_hash(span: &Span, tokens: &[TokenId], vocabulary: &Vocabulary) -> u64 {
    let content = &tokens[span.start as usize..span.end as usize];
    let text = vocabulary.decode(content);
    let text = if span.role == "assistant" { without_reasoning(&text) } else { &text };
    let mut message = format!("{}\0{}", span.role, text.trim()).into_bytes();
    // All images decode to the same text, so their tokens are hashed, too.
    let images = content.iter().filter(|&&token| is_image_token(token));
    message.extend(images.flat_map(|token| token.to_le_bytes()));
    xxh3_64(&message)
}

pub fn hash_tokens(tokens: &[TokenId]) -> u64 {
    xxh3_64(bytemuck::cast_slice(tokens))
}
