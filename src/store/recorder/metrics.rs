//! Counters of the recorder.

use crate::events::{Histogram, TraceItem};
use crate::store::record::attention_bytes;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Counters of the recorder.
#[derive(Debug)]
pub struct RecorderMetrics {
    lag: Histogram,
    attention_bytes: AtomicU64,
    pending_items: AtomicU64,
    spool_bytes: AtomicU64,
    is_failing: AtomicBool,
}

impl Default for RecorderMetrics {
    fn default() -> Self {
        Self {
            lag: Histogram::long(),
            attention_bytes: AtomicU64::new(0),
            pending_items: AtomicU64::new(0),
            spool_bytes: AtomicU64::new(0),
            is_failing: AtomicBool::new(false),
        }
    }
}

impl RecorderMetrics {
    /// Returns the times from the first record of a batch to its commit.
    #[must_use]
    pub const fn lag(&self) -> &Histogram {
        &self.lag
    }

    /// Returns the bytes of encoded attention received so far.
    #[must_use]
    pub fn attention_bytes(&self) -> u64 {
        self.attention_bytes.load(Relaxed)
    }

    /// Returns the number of items that wait for the next batch.
    #[must_use]
    pub fn pending_items(&self) -> u64 {
        self.pending_items.load(Relaxed)
    }

    /// Returns the size of the spooled records that are not stored yet.
    #[must_use]
    pub fn spool_bytes(&self) -> u64 {
        self.spool_bytes.load(Relaxed)
    }

    /// Returns true while neither the database nor the spool file accepts runs.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        self.is_failing.load(Relaxed)
    }

    pub(super) fn set_failing(&self, is_failing: bool) {
        self.is_failing.store(is_failing, Relaxed);
    }

    pub(super) fn add_batch(&self, lag: Duration) {
        self.lag.observe(lag);
    }

    pub(super) fn add_items(&self, items: &[TraceItem]) {
        let bytes: usize = items.iter().map(attention_bytes).sum();
        self.attention_bytes.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn set_pending_items(&self, items: usize) {
        self.pending_items.store(items as u64, Relaxed);
    }

    pub(super) fn set_spool_bytes(&self, bytes: u64) {
        self.spool_bytes.store(bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::RecorderMetrics;
    use crate::events::{AttentionStep, TraceItem};

    #[test]
    fn attention_bytes_include_rows_of_all_heads() {
        let metrics = RecorderMetrics::default();
        let step = AttentionStep {
            sequence_order: 1,
            row_len: 4,
            layer_ids: vec![0].into(),
            heads: 2,
            t0: vec![1; 3],
            t1: vec![2; 40],
            head_rows: vec![3; 500],
        };
        metrics.add_items(&[TraceItem::Attention(step)]);
        assert_eq!(metrics.attention_bytes(), 543);
    }
}
