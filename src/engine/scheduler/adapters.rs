//! LoRA adapters of runs: selection of runs that can share a batch.

use super::Scheduler;
use crate::model::ModelError;

impl Scheduler<'_> {
    /// Keeps those `ready` runs that use the same adapters as the run that has waited longest for a decode, and applies
    /// these adapters. `slot` returns the slot of a run.
    ///
    /// # Errors
    /// llama.cpp rejects the adapters.
    pub(super) fn retain_same_adapters<T>(
        &mut self,
        ready: &mut Vec<T>,
        slot: impl Fn(&T) -> usize,
    ) -> Result<(), ModelError> {
        if !self.kv.has_adapters() {
            return Ok(());
        }
        let of = |one: &T| {
            let live = self.slots.get(slot(one))?;
            Some((live.last_batch, live.arrival, live.run.request().adapters.clone()?))
        };
        let next = ready.iter().filter_map(of).min_by_key(|&(turn, arrival, _)| (turn, arrival));
        let Some((_, _, set)) = next else { return Ok(()) };
        ready.retain(|one| of(one).is_some_and(|(_, _, other)| other == set));
        self.partial_batches += 1;
        for one in ready {
            if let Some(live) = self.slots.get_mut(slot(one)) {
                live.last_batch = self.partial_batches;
            }
        }
        self.kv.set_adapters(&set)
    }
}
