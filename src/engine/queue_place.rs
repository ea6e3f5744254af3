//! Places in the queue of runs. A place is reserved before images are encoded and mods start, so that these requests
//! count towards the limit.

use super::error::SubmitError;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum runs that wait for a slot.
const MAX_QUEUED_RUNS: usize = 1024;

/// A place in the queue. It is given back if the run is not sent to the queue.
#[derive(Debug)]
pub struct QueuePlace<'a> {
    /// Number of runs without a slot, and of requests whose run is being created.
    waiting: &'a AtomicUsize,
}

impl<'a> QueuePlace<'a> {
    /// Reserves a place.
    ///
    /// # Errors
    /// [`SubmitError::Busy`] if the queue is full.
    pub fn reserve(waiting: &'a AtomicUsize) -> Result<Self, SubmitError> {
        let queued = waiting.fetch_add(1, Ordering::AcqRel);
        let place = Self { waiting };
        if queued < MAX_QUEUED_RUNS { Ok(place) } else { Err(SubmitError::Busy { waiting: queued }) }
    }

    /// Leaves the place to the run that was sent; the queue gives it back.
    pub fn hand_over(self) {
        std::mem::forget(self);
    }
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_requests_without_a_run_are_limited_and_given_back() {
        let waiting = AtomicUsize::new(0);
        let mut places: Vec<QueuePlace<'_>> =
            (0..MAX_QUEUED_RUNS).map(|_| QueuePlace::reserve(&waiting).unwrap()).collect();
        let busy = QueuePlace::reserve(&waiting);
        assert!(matches!(busy, Err(SubmitError::Busy { waiting: MAX_QUEUED_RUNS })), "{busy:?}");
        places.pop().unwrap().hand_over();
        drop(places);
        assert_eq!(waiting.load(Ordering::Acquire), 1);
    }
}
