//! Removal of tokens from the middle of a sequence.

use std::ops::Range;

/// Removal of tokens that the KV cache has not applied yet.
#[derive(Debug, PartialEq, Eq)]
pub struct KvRemoval {
    /// Number of valid tokens in the KV cache before the removal.
    pub kv_len: usize,
    /// Removed ranges, in order, within `kv_len`.
    pub ranges: Vec<Range<usize>>,
}
