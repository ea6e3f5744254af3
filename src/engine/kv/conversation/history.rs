//! History of a conversation in a slot: generated answers and dropped messages. [`align`](mod@super::align) uses it so
//! that the client's next request finds its state again.

use super::spans::shifted_index;
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// Markers that end reasoning; the text after them is the answer that clients send back.
const REASONING_END_MARKERS: [&str; 6] =
    ["</think>", "</thinking>", "</thought>", "[/THINK]", "<|END_THINKING|>", "<|channel|>final<|message|>"];

/// History of the tokens of a sequence, by their indices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotHistory {
    pub gaps: Vec<DroppedGap>,
    pub answers: Vec<PastAnswer>,
}

/// Dropped messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppedGap {
    pub at: usize,
    pub len: usize,
    pub hash: u64,
    /// Hashes of the messages: role, and text without reasoning.
    pub messages: Vec<u64>,
}

/// Generated answer, without the token that ended it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PastAnswer {
    pub start: usize,
    pub tokens: Vec<TokenId>,
}

impl SlotHistory {
    pub fn is_empty(&self) -> bool {
        self.gaps.is_empty() && self.answers.is_empty()
    }

    /// Removes everything after the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.gaps.retain(|gap| gap.at <= len);
        // The last token of an answer is sampled but never decoded.
        self.answers.retain(|answer| answer.start < len && answer.start + answer.tokens.len() <= len + 1);
    }

    /// Records the answer generated from `start` on. The token that ended it is not part of it.
    pub fn record_answer(&mut self, start: usize, generated: &[TokenId], vocabulary: &Vocabulary) {
        let ended = generated.last().is_some_and(|&token| vocabulary.is_end_of_generation(token));
        let tokens = &generated[..generated.len() - usize::from(ended)];
        if !tokens.is_empty() {
            self.answers.push(PastAnswer { start, tokens: tokens.to_vec() });
        }
    }

    /// Records messages that are about to be dropped from a sequence, and shifts all positions. `ranges` are in order.
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
            // After older gaps at the same position: their messages came first.
            let place = self.gaps.partition_point(|gap| gap.at <= at);
            self.gaps.insert(place, DroppedGap { at, len: range.len(), hash, messages });
        }
    }

    /// Shifts all positions after tokens were removed without being recorded.
    pub fn remove_ranges(&mut self, ranges: &[Range<usize>]) {
        self.gaps.retain(|gap| !ranges.iter().any(|range| range.start < gap.at && gap.at < range.end));
        self.answers.retain(|answer| {
            let own = answer.start..answer.start + answer.tokens.len();
            !ranges.iter().any(|range| range.start < own.end && own.start < range.end)
        });
        for gap in &mut self.gaps {
            gap.at = shifted_index(gap.at, ranges);
        }
        for answer in &mut self.answers {
            answer.start = shifted_index(answer.start, ranges);
        }
    }
}

/// Returns the text after its reasoning.
pub fn without_reasoning(text: &str) -> &str {
    REASONING_END_MARKERS
        .iter()
        .filter_map(|mark| text.rfind(mark).map(|at| at + mark.len()))
        .max()
        .map_or(text, |from| &text[from..])
}

pub fn message_hash(span: &Span, tokens: &[TokenId], vocabulary: &Vocabulary) -> u64 {
    let text = vocabulary.decode(&tokens[span.start as usize..span.end as usize]);
    let text = if span.role == "assistant" { without_reasoning(&text) } else { &text };
    xxh3_64(format!("{}\0{}", span.role, text.trim()).as_bytes())
}

pub fn hash_tokens(tokens: &[TokenId]) -> u64 {
    xxh3_64(bytemuck::cast_slice(tokens))
}
