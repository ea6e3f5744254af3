//! Retries of imports that failed for a reason that may pass, such as a deadline on a busy machine.

use std::time::{Duration, Instant};

/// Delay before the first retry; doubles with each further one.
const MIN_DELAY: Duration = Duration::from_secs(30);
/// Maximum delay. Changes of other mods wait for an import, and one that hangs may do so every time.
const MAX_DELAY: Duration = Duration::from_hours(1);

/// The next import of a source whose last import failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportRetry {
    /// Hash of the source.
    hash: String,
    /// Number of the retry, from 1.
    number: u32,
    /// Time of the import.
    pub at: Instant,
}

impl ImportRetry {
    /// Plans the next import of a source after a failed one; `earlier` is the retry that failed. Another source begins with
    /// the first retry.
    #[must_use]
    pub fn after(earlier: Option<&Self>, hash: String) -> Self {
        let number = earlier.filter(|retry| retry.is_for(&hash)).map_or(1, |retry| retry.number + 1);
        let delay = MIN_DELAY.saturating_mul(2_u32.saturating_pow(number - 1)).min(MAX_DELAY);
        Self { hash, number, at: Instant::now() + delay }
    }

    /// Returns true if it imports the source with this hash.
    #[must_use]
    pub fn is_for(&self, hash: &str) -> bool {
        self.hash == hash
    }

    /// Returns true if it is time for the import.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.at <= Instant::now()
    }
}

#[cfg(test)]
mod tests {
    use super::{ImportRetry, MAX_DELAY, MIN_DELAY};
    use std::time::Instant;

    #[test]
    fn retries_of_the_same_source_have_growing_delays() {
        let next = |earlier: Option<&ImportRetry>| ImportRetry::after(earlier, "a".to_owned());
        let begun = Instant::now();
        let mut retry = next(None);
        assert!(retry.at >= begun + MIN_DELAY && !retry.is_due());
        for number in 2..40 {
            let begun = Instant::now();
            retry = next(Some(&retry));
            assert_eq!(retry.number, number);
            assert!(retry.at >= begun + (MIN_DELAY * 2_u32.pow(number.min(8) - 1)).min(MAX_DELAY));
            assert!(retry.at <= Instant::now() + MAX_DELAY);
        }
        assert_eq!(ImportRetry::after(Some(&retry), "b".to_owned()).number, 1);
    }
}
