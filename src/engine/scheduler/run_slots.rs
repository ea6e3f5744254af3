//! The slots with their runs. [`KvSlots`] has the KV state of the same slots.

use super::scheduled_run::ScheduledRun;
use crate::engine::kv::slots::KvSlots;
use crate::events::RunId;
use crate::mods::ModInstance;

/// The run in each slot; `None` for a free slot.
pub struct RunSlots(Vec<Option<ScheduledRun>>);

impl RunSlots {
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
    pub fn find_mut(&mut self, id: RunId) -> Option<&mut ScheduledRun> {
        self.runs_mut().find(|scheduled| scheduled.run.id() == id)
    }

    /// Returns the run in a slot.
    pub fn get(&self, index: usize) -> Option<&ScheduledRun> {
        self.0[index].as_ref()
    }

    /// Returns the run in a slot.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut ScheduledRun> {
        self.0[index].as_mut()
    }

    /// Returns the runs.
    pub fn runs(&self) -> impl Iterator<Item = &ScheduledRun> {
        self.0.iter().flatten()
    }

    /// Returns the runs.
    pub fn runs_mut(&mut self) -> impl Iterator<Item = &mut ScheduledRun> {
        self.0.iter_mut().flatten()
    }

    /// Returns the mod instances whose replies are awaited.
    pub fn awaited_mods(&mut self) -> impl Iterator<Item = &mut dyn ModInstance> {
        self.runs_mut().filter_map(|scheduled| scheduled.run.awaited_mod())
    }

    /// Puts a run into a free slot.
    pub fn put(&mut self, index: usize, scheduled: ScheduledRun) {
        self.0[index] = Some(scheduled);
    }

    /// Takes the run out of its slot. The slot keeps the run's KV state.
    pub fn release(&mut self, index: usize, kv: &mut KvSlots<'_>) -> Option<ScheduledRun> {
        let mut scheduled = self.0[index].take()?;
        // Otherwise the slot still has the state of an earlier run.
        if scheduled.owns_kv() {
            kv.release(index, scheduled.run.take_released_state());
        }
        Some(scheduled)
    }
}
