//! Runs that have a slot, by the number of the slot.

use super::active_run::ActiveRun;
use crate::events::RunId;

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

    /// Returns the numbers of the slots that have a run, the run that arrived first before the others.
    pub fn by_arrival(&self) -> Vec<usize> {
        let mut busy: Vec<(u64, usize)> =
            self.0.iter().enumerate().filter_map(|(index, slot)| Some((slot.as_ref()?.arrival, index))).collect();
        busy.sort_unstable();
        busy.into_iter().map(|(_, index)| index).collect()
    }

    /// Returns the slot of a run.
    pub fn find(&self, id: RunId) -> Option<usize> {
        self.0.iter().position(|slot| slot.as_ref().is_some_and(|active| active.run.id() == id))
    }

    /// Returns the run in a slot.
    pub fn get(&self, index: usize) -> Option<&ActiveRun> {
        self.0[index].as_ref()
    }

    /// Returns the run in a slot, for a change.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut ActiveRun> {
        self.0[index].as_mut()
    }

    /// Returns the runs.
    pub fn runs(&self) -> impl Iterator<Item = &ActiveRun> {
        self.0.iter().flatten()
    }

    /// Returns the runs, for changes.
    pub fn runs_mut(&mut self) -> impl Iterator<Item = &mut ActiveRun> {
        self.0.iter_mut().flatten()
    }

    /// Puts a run into a free slot.
    pub fn put(&mut self, index: usize, active: ActiveRun) {
        self.0[index] = Some(active);
    }

    /// Takes the run out of a slot.
    pub fn take(&mut self, index: usize) -> Option<ActiveRun> {
        self.0[index].take()
    }
}
