//! Places in the queue of runs. A request reserves its place before images are encoded and mods start, so that it counts
//! towards the limit while its run is being created.

use crate::engine::error::SubmitError;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum runs that wait for a slot.
const MAX_QUEUED_RUNS: usize = 1024;

/// A place in the queue until it is dropped. It has the counter of all places.
#[derive(Debug)]
pub struct QueuePlace(Arc<AtomicUsize>);

impl QueuePlace {
    /// Reserves a place for a new request.
    ///
    /// # Errors
    /// [`SubmitError::Busy`] if the queue is full.
    pub fn reserve(places: &Arc<AtomicUsize>) -> Result<Self, SubmitError> {
        let waiting = places.fetch_add(1, Ordering::AcqRel);
        let place = Self(Arc::clone(places));
        if waiting < MAX_QUEUED_RUNS { Ok(place) } else { Err(SubmitError::Busy { waiting }) }
    }

    /// Takes a place for a run that had a slot, even if the queue is full.
    pub fn take(places: &Arc<AtomicUsize>) -> Self {
        places.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(places))
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_new_requests_are_limited_and_given_back() {
        let counter = Arc::new(AtomicUsize::new(0));
        let mut places: Vec<QueuePlace> =
            (0..MAX_QUEUED_RUNS).map(|_| QueuePlace::reserve(&counter).unwrap()).collect();
        let busy = QueuePlace::reserve(&counter);
        assert!(matches!(busy, Err(SubmitError::Busy { waiting: MAX_QUEUED_RUNS })), "{busy:?}");
        places.push(QueuePlace::take(&counter));
        assert_eq!(counter.load(Ordering::Acquire), MAX_QUEUED_RUNS + 1);
        drop(places);
        assert_eq!(counter.load(Ordering::Acquire), 0);
    }
}
