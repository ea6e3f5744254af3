//! Runs that have a slot, by the number of the slot.

use super::active_run::ActiveRun;
use crate::engine::kv::slots::KvSlots;
use crate::events::RunId;
use crate::mods::ModInstance;

/// Runs in the slots.
pub struct ActiveSlots(Vec<Option<ActiveRun>>);

impl ActiveSlots {
    /// Creates `count` free slots.
    pub fn new(count: u32) -> Self {
        Self((0..count).map(|_| None).collect())
    }

    /// Returns the number of slots.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if a slot has no run.
    pub fn is_free(&self, index: usize) -> bool {
        self.0[index].is_none()
    }

    /// Returns the number of slots without a run.
    pub fn free(&self) -> usize {
        self.0.iter().filter(|slot| slot.is_none()).count()
    }

    /// Returns the numbers of the slots that have a run, in order of the runs' arrival.
    pub fn by_arrival(&self) -> Vec<usize> {
        let mut busy: Vec<(u64, usize)> =
            self.0.iter().enumerate().filter_map(|(index, slot)| Some((slot.as_ref()?.arrival(), index))).collect();
        busy.sort_unstable();
        busy.into_iter().map(|(_, index)| index).collect()
    }

    /// Returns the run with this id.
    pub fn find_mut(&mut self, id: RunId) -> Option<&mut ActiveRun> {
        self.runs_mut().find(|active| active.run.id() == id)
    }

    /// Returns the run in a slot.
    pub fn get(&self, index: usize) -> Option<&ActiveRun> {
        self.0[index].as_ref()
    }

    /// Returns the run in a slot.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut ActiveRun> {
        self.0[index].as_mut()
    }

    /// Returns the runs.
    pub fn runs(&self) -> impl Iterator<Item = &ActiveRun> {
        self.0.iter().flatten()
    }

    /// Returns the runs.
    pub fn runs_mut(&mut self) -> impl Iterator<Item = &mut ActiveRun> {
        self.0.iter_mut().flatten()
    }

    /// Returns the mod instances whose replies are awaited.
    pub fn awaited_mods(&mut self) -> impl Iterator<Item = &mut dyn ModInstance> {
        self.runs_mut().filter_map(|active| active.run.awaited_mod())
    }

    /// Puts a run into a free slot.
    pub fn put(&mut self, index: usize, active: ActiveRun) {
        self.0[index] = Some(active);
    }

    /// Takes the run out of its slot. The slot keeps the run's KV state.
    pub fn release(&mut self, index: usize, kv: &mut KvSlots<'_>) -> Option<ActiveRun> {
        let mut active = self.0[index].take()?;
        // A run that has not decoded has not changed the slot's state.
        if active.has_state() {
            kv.release(index, active.run.take_released_state());
        }
        Some(active)
    }
}
