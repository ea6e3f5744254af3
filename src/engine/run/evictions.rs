//! Tokens and messages of a run that were evicted because the context was full.

use crate::events::{EvictedMessage, Eviction};
use std::ops::Range;

/// Tokens and messages evicted because the context was full.
#[derive(Debug, Default)]
pub struct Evictions {
    /// True if the context was full.
    pub truncated: bool,
    /// Number of evicted tokens of the answer.
    pub generated: usize,
    /// Index of the first token that followed all evicted ones; 0 if none were evicted.
    pub end: usize,
    /// Number of all evicted tokens.
    pub tokens: usize,
    pub messages: Vec<EvictedMessage>,
    /// Evictions that no event has recorded yet.
    pub unreported: Option<Box<Eviction>>,
}

impl Evictions {
    /// Adds the eviction of ordered ranges, which contain these messages.
    pub fn record(&mut self, ranges: &[Range<usize>], messages: Vec<EvictedMessage>) {
        self.truncated = true;
        self.tokens += ranges.iter().map(Range::len).sum::<usize>();
        self.messages.extend(messages.iter().cloned());
        let unreported = self.unreported.get_or_insert_default();
        unreported.ranges.extend(ranges.iter().map(|range| (range.start as u32, range.end as u32)));
        unreported.messages.extend(messages);
    }
}
