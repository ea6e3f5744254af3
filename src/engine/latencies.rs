//! Latency histograms of runs and mod calls. The decode thread updates atomics, so readers cannot delay it.

use crate::events::Histogram;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Maximum number of mods with a histogram of their own; all others share one.
const MAX_MODS: usize = 64;

/// Name of the shared histogram.
const OTHER_MODS: &str = "other";

/// Latencies of the runs of an engine.
#[derive(Debug)]
pub struct Latencies {
    /// Time from the request to the slot.
    pub queue: Histogram,
    /// Time from the request to the first token.
    pub first_token: Histogram,
    /// Generation time per token, one value for each run.
    pub output_token: Histogram,
    mods: Mutex<BTreeMap<String, Arc<ModCalls>>>,
}

/// Durations and failures of the calls of a mod.
#[derive(Debug)]
pub struct ModCalls {
    /// Time until the reply.
    pub duration: Histogram,
    failed: AtomicU64,
}

impl Latencies {
    pub(super) fn new() -> Self {
        Self {
            queue: Histogram::long(),
            first_token: Histogram::long(),
            output_token: Histogram::short(),
            mods: Mutex::default(),
        }
    }

    /// Returns the calls of every mod, by name.
    #[must_use]
    pub fn mods(&self) -> BTreeMap<String, Arc<ModCalls>> {
        self.mods.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the calls of a mod. Takes a lock, so the decode thread must not call it.
    pub(super) fn calls_of(&self, name: &str) -> Arc<ModCalls> {
        let mut mods = self.mods.lock().unwrap_or_else(PoisonError::into_inner);
        let name = if mods.len() < MAX_MODS || mods.contains_key(name) { name } else { OTHER_MODS };
        Arc::clone(mods.entry(name.to_owned()).or_default())
    }
}

impl Default for ModCalls {
    fn default() -> Self {
        Self { duration: Histogram::short(), failed: AtomicU64::new(0) }
    }
}

impl ModCalls {
    /// Adds a call.
    pub(super) fn add(&self, duration: Duration, failed: bool) {
        self.duration.observe(duration);
        self.failed.fetch_add(u64::from(failed), Relaxed);
    }

    /// Returns the number of failed calls.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::{Latencies, MAX_MODS};
    use std::time::Duration;

    #[test]
    fn mods_beyond_the_maximum_share_a_histogram() {
        let latencies = Latencies::new();
        for mod_number in 0..MAX_MODS + 3 {
            latencies.calls_of(&format!("mod-{mod_number:03}")).add(Duration::from_micros(5), false);
        }
        latencies.calls_of("mod-000").add(Duration::from_micros(5), true);
        let mods = latencies.mods();
        assert_eq!(mods.len(), MAX_MODS + 1);
        assert_eq!((mods["other"].duration.counts().count, mods["other"].failed()), (3, 0));
        assert_eq!((mods["mod-000"].duration.counts().count, mods["mod-000"].failed()), (2, 1));
    }
}
