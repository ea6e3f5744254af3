//! Removal of tokens from the middle of a sequence.

use std::ops::Range;

/// Tokens removed from a sequence but not yet from the KV cache.
#[derive(Debug, PartialEq, Eq)]
pub struct KvRemoval {
    /// Tokens of the sequence in the KV cache before the removal.
    pub kv_len: usize,
    /// Removed ranges, in order, within `kv_len`.
    pub ranges: Vec<Range<usize>>,
}
