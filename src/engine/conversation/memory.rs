//! What a slot remembers of a conversation, so that the client's next request finds its state again: which answers it
//! generated, and which messages it dropped. [`align`](mod@super::align) reads the next prompt in its light.

use super::moved;
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// Thinking ends with one of these; what follows is the answer that clients send back.
const THINKING_ENDS: [&str; 6] =
    ["</think>", "</thinking>", "</thought>", "[/THINK]", "<|END_THINKING|>", "<|channel|>final<|message|>"];

/// What is remembered of the tokens of a sequence, by their indices in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::engine) struct Memory {
    pub(super) gaps: Vec<Gap>,
    pub(super) answers: Vec<Answer>,
}

/// Messages that were dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Gap {
    pub at: usize,
    pub len: usize,
    pub hash: u64,
    /// The messages, by role and text without thinking.
    pub messages: Vec<u64>,
}

/// An answer as it was generated, without the token that ended it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub start: usize,
    pub tokens: Vec<TokenId>,
}

impl Memory {
    pub fn is_empty(&self) -> bool {
        self.gaps.is_empty() && self.answers.is_empty()
    }

    /// Forgets what is not about the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.gaps.retain(|gap| gap.at <= len);
        // The last token of an answer is drawn, and never decoded.
        self.answers.retain(|answer| answer.start < len && answer.start + answer.tokens.len() <= len + 1);
    }

    /// Remembers the answer that was generated from `start` on. The token that ended it does not belong to it.
    pub fn answered(&mut self, start: usize, generated: &[TokenId], vocabulary: &Vocabulary) {
        let ended = generated.last().is_some_and(|&token| vocabulary.is_end_of_generation(token));
        let tokens = &generated[..generated.len() - usize::from(ended)];
        if !tokens.is_empty() {
            self.answers.push(Answer { start, tokens: tokens.to_vec() });
        }
    }

    /// Remembers what is about to be dropped from a sequence, and follows it. `ranges` are in order.
    pub fn dropped(&mut self, tokens: &[TokenId], spans: &[Span], ranges: &[Range<usize>], vocabulary: &Vocabulary) {
        self.cut(ranges);
        for range in ranges {
            let messages = spans
                .iter()
                .filter(|span| span.role != "template" && range.contains(&(span.start as usize)))
                .map(|span| message_hash(span, tokens, vocabulary))
                .collect();
            let at = moved(range.start, ranges);
            let hash = hash(&tokens[range.clone()]);
            // Behind older gaps at the same place: their messages came before.
            let place = self.gaps.partition_point(|gap| gap.at <= at);
            self.gaps.insert(place, Gap { at, len: range.len(), hash, messages });
        }
    }

    /// Follows a sequence whose tokens were cut out without their being remembered.
    pub fn cut(&mut self, ranges: &[Range<usize>]) {
        self.gaps.retain(|gap| !ranges.iter().any(|range| range.start < gap.at && gap.at < range.end));
        self.answers.retain(|answer| {
            let own = answer.start..answer.start + answer.tokens.len();
            !ranges.iter().any(|range| range.start < own.end && own.start < range.end)
        });
        for gap in &mut self.gaps {
            gap.at = moved(gap.at, ranges);
        }
        for answer in &mut self.answers {
            answer.start = moved(answer.start, ranges);
        }
    }
}

/// The text behind its thinking.
pub(super) fn visible(text: &str) -> &str {
    THINKING_ENDS
        .iter()
        .filter_map(|mark| text.rfind(mark).map(|at| at + mark.len()))
        .max()
        .map_or(text, |from| &text[from..])
}

pub(super) fn message_hash(span: &Span, tokens: &[TokenId], vocabulary: &Vocabulary) -> u64 {
    let text = vocabulary.decode(&tokens[span.start as usize..span.end as usize]);
    let text = if span.role == "assistant" { visible(&text) } else { &text };
    xxh3_64(format!("{}\0{}", span.role, text.trim()).as_bytes())
}

pub(super) fn hash(tokens: &[TokenId]) -> u64 {
    xxh3_64(bytemuck::cast_slice(tokens))
}
