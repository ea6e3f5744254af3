//! Runs that wait for a slot, in order of arrival.
//!
//! The number of waiting runs is shared with the threads that submit runs. They increment it before they send a run;
//! the queue decrements it when a run leaves.

use super::scheduled_run::ScheduledRun;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Queue of runs without a slot.
pub struct RunQueue {
    runs: VecDeque<ScheduledRun>,
    waiting: Arc<AtomicUsize>,
}

impl RunQueue {
    /// Creates an empty queue. `waiting` counts the runs in it and those that were sent to it.
    pub fn new(waiting: Arc<AtomicUsize>) -> Self {
        Self { runs: VecDeque::new(), waiting }
    }

    /// Returns the runs in order.
    pub fn iter(&self) -> impl Iterator<Item = &ScheduledRun> {
        self.runs.iter()
    }

    /// Returns the position of the first run that matches the predicate.
    pub fn position(&self, predicate: impl Fn(&ScheduledRun) -> bool) -> Option<usize> {
        self.runs.iter().position(predicate)
    }

    /// Returns the number of runs.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Returns true if the queue has no runs.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns a run.
    pub fn get(&self, at: usize) -> Option<&ScheduledRun> {
        self.runs.get(at)
    }

    /// Returns a run.
    pub fn get_mut(&mut self, at: usize) -> Option<&mut ScheduledRun> {
        self.runs.get_mut(at)
    }

    /// Appends a run that has just arrived; it is already counted.
    pub fn push(&mut self, scheduled: ScheduledRun) {
        self.runs.push_back(scheduled);
    }

    /// Queues a run that had a slot, ahead of runs that arrived later.
    pub fn requeue(&mut self, scheduled: ScheduledRun) {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let at = self.runs.partition_point(|other| other.arrival() < scheduled.arrival());
        self.runs.insert(at, scheduled);
    }

    /// Removes and returns a run.
    pub fn remove(&mut self, at: usize) -> Option<ScheduledRun> {
        let scheduled = self.runs.remove(at)?;
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        Some(scheduled)
    }
}
