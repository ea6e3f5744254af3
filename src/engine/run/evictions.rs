//! Tokens and messages of a run that were evicted because the context was full.

use crate::engine::kv::conversation::spans::shifted_index;
use crate::events::{EvictedMessage, Eviction};
use std::ops::Range;

/// Tokens and messages evicted because the context was full.
#[derive(Debug, Default)]
pub struct Evictions {
    /// True if the context was full.
    was_full: bool,
    /// Number of evicted tokens of the answer.
    generated: usize,
    /// Index of the first token that followed all evicted ones; 0 if none were evicted.
    end: usize,
    /// Number of all evicted tokens.
    tokens: usize,
    messages: Vec<EvictedMessage>,
    /// Evictions that no event has recorded yet.
    unreported: Option<Box<Eviction>>,
}

impl Evictions {
    /// Returns true if the context was full.
    pub fn was_full(&self) -> bool {
        self.was_full
    }

    /// Records that the context was full.
    pub fn set_full(&mut self) {
        self.was_full = true;
    }

    /// Returns the number of evicted tokens of the answer.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// Returns the index of the first token that followed all evicted ones; 0 if none were evicted.
    pub fn end(&self) -> usize {
        self.end
    }

    /// Returns the number of all evicted tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the evicted messages.
    pub fn messages(&self) -> &[EvictedMessage] {
        &self.messages
    }

    /// Takes the evictions that no event has recorded yet.
    pub fn take_unreported(&mut self) -> Option<Box<Eviction>> {
        self.unreported.take()
    }

    /// Records the removal of ordered ranges, which contain these messages, from a sequence whose first `prompt_len`
    /// tokens are the prompt. Returns the length of the prompt after the removal.
    pub fn remove(&mut self, ranges: &[Range<usize>], messages: Vec<EvictedMessage>, prompt_len: usize) -> usize {
        self.omit(ranges, messages);
        let left = shifted_index(prompt_len, ranges);
        let total: usize = ranges.iter().map(Range::len).sum();
        self.generated += total - (prompt_len - left);
        let end = ranges.last().map_or(0, |range| range.end);
        self.end = shifted_index(end.max(self.end), ranges);
        left
    }

    /// Records that ordered ranges, which contain these messages, were left out of the prompt before the run started.
    pub fn omit(&mut self, ranges: &[Range<usize>], messages: Vec<EvictedMessage>) {
        self.was_full = true;
        self.tokens += ranges.iter().map(Range::len).sum::<usize>();
        self.messages.extend(messages.iter().cloned());
        let unreported = self.unreported.get_or_insert_default();
        unreported.ranges.extend(ranges.iter().map(|range| (range.start as u32, range.end as u32)));
        unreported.messages.extend(messages);
    }

    /// Begins a new answer. Returns the number of evicted tokens of the old one.
    pub fn clear_answer(&mut self) -> usize {
        self.end = 0;
        std::mem::take(&mut self.generated)
    }
}
