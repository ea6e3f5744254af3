//! Places of inputs in the queue of the encoder.

use super::EncodeError;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of pending inputs over all requests.
const MAX_QUEUED_INPUTS: usize = 4096;

/// Maximum number of inputs of one request that count as pending. A request may have more inputs; it still leaves room
/// for other requests, with which it takes turns.
const MAX_COUNTED_INPUTS: usize = 1024;

/// Inputs of a request in the queue. The last [`MAX_COUNTED_INPUTS`] are counted in `pending` until they are encoded or
/// the request ends.
#[derive(Debug)]
pub(super) struct QueueReservation {
    pending: Arc<AtomicUsize>,
    /// Inputs that are not encoded yet.
    inputs: usize,
}

impl QueueReservation {
    /// Adds the inputs of a request to the queue.
    ///
    /// # Errors
    /// [`EncodeError::Busy`] if the queue is full.
    pub(super) fn new(pending: &Arc<AtomicUsize>, inputs: usize) -> Result<Self, EncodeError> {
        let before = pending.fetch_add(counted(inputs), Ordering::AcqRel);
        let reservation = Self { pending: Arc::clone(pending), inputs };
        if before + counted(inputs) > MAX_QUEUED_INPUTS {
            return Err(EncodeError::Busy { pending: before });
        }
        Ok(reservation)
    }

    /// Removes an encoded input.
    pub(super) fn release_input(&mut self) {
        let before = counted(self.inputs);
        self.inputs = self.inputs.saturating_sub(1);
        self.pending.fetch_sub(before - counted(self.inputs), Ordering::AcqRel);
    }
}

impl Drop for QueueReservation {
    fn drop(&mut self) {
        self.pending.fetch_sub(counted(self.inputs), Ordering::AcqRel);
    }
}

fn counted(inputs: usize) -> usize {
    inputs.min(MAX_COUNTED_INPUTS)
}

#[cfg(test)]
mod tests {
    use super::{EncodeError, MAX_COUNTED_INPUTS, MAX_QUEUED_INPUTS, QueueReservation};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn large_request_leaves_room_for_others() {
        let pending = Arc::new(AtomicUsize::new(0));
        let large = QueueReservation::new(&pending, 16_384).unwrap();
        let small = QueueReservation::new(&pending, 1).unwrap();
        assert_eq!(pending.load(Ordering::Acquire), MAX_COUNTED_INPUTS + 1);
        drop((large, small));
        assert_eq!(pending.load(Ordering::Acquire), 0);
    }

    #[test]
    fn full_queue_rejects_requests_until_inputs_are_encoded() {
        let pending = Arc::new(AtomicUsize::new(0));
        let mut requests: Vec<QueueReservation> =
            std::iter::from_fn(|| QueueReservation::new(&pending, MAX_COUNTED_INPUTS).ok()).collect();
        assert_eq!(requests.len(), MAX_QUEUED_INPUTS / MAX_COUNTED_INPUTS);
        let error = QueueReservation::new(&pending, 1).unwrap_err();
        assert_eq!(error, EncodeError::Busy { pending: MAX_QUEUED_INPUTS });
        requests[0].release_input();
        drop(QueueReservation::new(&pending, 1).unwrap());
        QueueReservation::new(&pending, 2).unwrap_err();
        drop(requests);
        assert_eq!(pending.load(Ordering::Acquire), 0);
    }

    #[test]
    fn encoded_inputs_are_not_pending() {
        let pending = Arc::new(AtomicUsize::new(0));
        let mut request = QueueReservation::new(&pending, MAX_COUNTED_INPUTS + 2).unwrap();
        for (encoded, expected) in [(2, MAX_COUNTED_INPUTS), (MAX_COUNTED_INPUTS - 1, 1), (1, 0), (1, 0)] {
            (0..encoded).for_each(|_| request.release_input());
            assert_eq!(pending.load(Ordering::Acquire), expected);
        }
        drop(request);
        assert_eq!(pending.load(Ordering::Acquire), 0);
    }
}
