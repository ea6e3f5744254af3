//! Runs that wait for a slot, in order of arrival.

use super::queue_place::QueuePlace;
use super::scheduled_run::ScheduledRun;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Queue of runs that wait for a slot.
pub struct RunQueue {
    runs: VecDeque<QueuedRun>,
    /// Counter of the places in the queue.
    places: Arc<AtomicUsize>,
}

/// A queued run and its place.
struct QueuedRun {
    scheduled: ScheduledRun,
    _place: QueuePlace,
}

impl RunQueue {
    /// Creates an empty queue. `places` counts the places in it.
    pub fn new(places: Arc<AtomicUsize>) -> Self {
        Self { runs: VecDeque::new(), places }
    }

    /// Returns the runs in order.
    pub fn iter(&self) -> impl Iterator<Item = &ScheduledRun> {
        self.runs.iter().map(|queued| &queued.scheduled)
    }

    /// Returns the position of the first run that matches the predicate.
    pub fn position(&self, predicate: impl Fn(&ScheduledRun) -> bool) -> Option<usize> {
        self.iter().position(predicate)
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
        self.runs.get(at).map(|queued| &queued.scheduled)
    }

    /// Returns a run.
    pub fn get_mut(&mut self, at: usize) -> Option<&mut ScheduledRun> {
        self.runs.get_mut(at).map(|queued| &mut queued.scheduled)
    }

    /// Appends a run that has just arrived.
    pub fn push(&mut self, scheduled: ScheduledRun, place: QueuePlace) {
        self.runs.push_back(QueuedRun { scheduled, _place: place });
    }

    /// Queues a run that had a slot, ahead of runs that arrived later.
    pub fn requeue(&mut self, scheduled: ScheduledRun) {
        let at = self.runs.partition_point(|other| other.scheduled.arrival() < scheduled.arrival());
        self.runs.insert(at, QueuedRun { scheduled, _place: QueuePlace::take(&self.places) });
    }

    /// Removes and returns a run.
    pub fn remove(&mut self, at: usize) -> Option<ScheduledRun> {
        Some(self.runs.remove(at)?.scheduled)
    }
}
