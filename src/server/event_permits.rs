//! Permits to read long runs, which limit the memory that is used for them at the same time.

use super::{ApiError, ErrorKind};
use axum::body::Bytes;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

/// Maximum events of the long runs that API routes read as a whole at the same time, except for a single longer run. These
/// events take up to 2 GiB of memory.
const MAX_READ_EVENTS: u32 = 500_000;
/// Permits to read long runs, one per event.
static EVENT_PERMITS: Semaphore = Semaphore::const_new(MAX_READ_EVENTS as usize);
/// Runs with fewer events are read without permits, so that they never wait for long ones.
const MIN_PERMITS: u32 = 10_000;
/// Memory of a permit.
const PERMIT_BYTES: usize = (2 << 30) / MAX_READ_EVENTS as usize;
/// Maximum time to wait for permits.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Permits to have a run in memory, until they are dropped.
#[derive(Debug)]
pub(crate) struct EventPermits(Option<SemaphorePermit<'static>>);

impl EventPermits {
    /// Waits for the permits to read a run with that many events. A short run needs none.
    ///
    /// # Errors
    /// Other long runs are being read.
    pub(crate) async fn acquire(events: i32) -> Result<Self, ApiError> {
        let events = events.unsigned_abs();
        if events < MIN_PERMITS {
            return Ok(Self(None));
        }
        let acquired = timeout(PERMIT_TIMEOUT, EVENT_PERMITS.acquire_many(events.min(MAX_READ_EVENTS))).await;
        let busy = |_| ApiError::new(ErrorKind::Busy, "other long runs are being read; try again later").retry_after(5);
        acquired.map_err(busy)?.map(|permit| Self(Some(permit))).map_err(ApiError::internal)
    }

    /// Returns a body that keeps the permits for its size until the client has received it. Releases the others: only the
    /// body remains in memory.
    pub(crate) fn into_body(self, body: Vec<u8>) -> Bytes {
        let permits = self.0.and_then(|mut permits| {
            let kept = body.len().div_ceil(PERMIT_BYTES).min(permits.num_permits());
            permits.split(kept)
        });
        Bytes::from_owner(PermittedBody { body, _permits: permits })
    }
}

/// A body with the permits for its memory.
struct PermittedBody {
    body: Vec<u8>,
    _permits: Option<SemaphorePermit<'static>>,
}

impl AsRef<[u8]> for PermittedBody {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn long_runs_are_read_alone_and_their_bodies_keep_permits() {
        let first = EventPermits::acquire(400_000).await.unwrap();
        assert!(first.0.is_some());
        let second = timeout(Duration::ZERO, EventPermits::acquire(400_000)).await;
        assert!(second.is_err(), "the second run waits for the first one");
        assert!(EventPermits::acquire(9_999).await.unwrap().0.is_none(), "short runs do not wait");
        let body = first.into_body(vec![b'x'; PERMIT_BYTES + 1]);
        let second = EventPermits::acquire(400_000).await.unwrap();
        let small_body = second.into_body(vec![b'x'; PERMIT_BYTES]);
        let third = timeout(Duration::ZERO, EventPermits::acquire(i32::MAX)).await;
        assert!(third.is_err(), "the bodies are still in memory");
        assert_eq!(EVENT_PERMITS.available_permits(), MAX_READ_EVENTS as usize - 3);
        drop((body, small_body));
        assert!(EventPermits::acquire(i32::MAX).await.is_ok(), "the longest run can be read");
    }
}
