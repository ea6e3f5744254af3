//! A histogram of durations. Any thread can add to it without waiting or allocating.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds in microseconds for calls and tokens: 10 µs to 2.5 s.
const SHORT_BOUNDS: &[u64] = &[
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000,
];

/// Upper bounds in microseconds for requests and queues: 1 ms to 10 min.
const LONG_BOUNDS: &[u64] = &[
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    30_000_000,
    60_000_000,
    120_000_000,
    300_000_000,
    600_000_000,
];

/// Number of durations in each range, and the sum of all durations.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [u64],
    /// One count per bound, and one for longer durations.
    counts: Box<[AtomicU64]>,
    sum_us: AtomicU64,
}

/// Snapshot of a [`Histogram`].
#[derive(Debug, Clone, PartialEq)]
pub struct HistogramCounts {
    /// Upper bounds in seconds, each with the number of durations up to it.
    pub cumulative: Vec<(f64, u64)>,
    /// Number of durations.
    pub count: u64,
    /// Their sum in seconds.
    pub sum: f64,
}

impl Histogram {
    /// Creates a histogram for durations of calls and tokens.
    #[must_use]
    pub fn short() -> Self {
        Self::new(SHORT_BOUNDS)
    }

    /// Creates a histogram for durations of requests and queues.
    #[must_use]
    pub fn long() -> Self {
        Self::new(LONG_BOUNDS)
    }

    fn new(bounds: &'static [u64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum_us: AtomicU64::new(0) }
    }

    /// Adds a duration.
    pub fn observe(&self, duration: Duration) {
        self.observe_us(duration.as_micros() as u64);
    }

    /// Adds a duration in microseconds.
    pub fn observe_us(&self, us: u64) {
        let range = self.bounds.partition_point(|&bound| bound < us);
        self.counts[range].fetch_add(1, Relaxed);
        self.sum_us.fetch_add(us, Relaxed);
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> HistogramCounts {
        let mut count = 0;
        let mut cumulative = Vec::with_capacity(self.bounds.len());
        for (range, range_count) in self.counts.iter().enumerate() {
            count += range_count.load(Relaxed);
            cumulative.extend(self.bounds.get(range).map(|&bound| (bound as f64 / 1e6, count)));
        }
        HistogramCounts { cumulative, count, sum: self.sum_us.load(Relaxed) as f64 / 1e6 }
    }
}

#[cfg(test)]
mod tests {
    use super::Histogram;

    #[test]
    fn durations_are_counted_up_to_their_bound() {
        let histogram = Histogram::long();
        for us in [0, 1_000, 1_001, 600_000_000, 600_000_001] {
            histogram.observe_us(us);
        }
        let counts = histogram.counts();
        assert_eq!(counts.count, 5);
        assert_eq!((counts.cumulative[0], counts.cumulative[1]), ((0.001, 2), (0.0025, 3)));
        assert_eq!(counts.cumulative.last(), Some(&(600.0, 4)));
        assert_eq!(counts.sum, 1_200.002_002);
    }
}
