use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Maximum time from the start of a message to its end.
pub(super) const MESSAGE_TIMEOUT: Duration = Duration::from_mins(10);

/// Times of the last activity of a connection.
pub(super) struct LastActivity {
    since: Instant,
    /// Last bytes from the client, or last messages that it accepted.
    alive_ms: AtomicU64,
    /// Last complete frame from the client, or last messages that it accepted.
    frame_ms: AtomicU64,
    /// Last message in any direction.
    message_ms: AtomicU64,
}

impl LastActivity {
    pub(super) fn new() -> Self {
        let start = || AtomicU64::new(0);
        Self { since: Instant::now(), alive_ms: start(), frame_ms: start(), message_ms: start() }
    }

    /// Records bytes from the client, which may be a part of a frame.
    pub(super) fn record_bytes(&self) {
        self.record(&self.alive_ms);
    }

    /// Records a complete frame from the client, or messages that it accepted.
    pub(super) fn record_frame(&self) {
        self.record(&self.alive_ms);
        self.record(&self.frame_ms);
    }

    /// Records a complete message in any direction.
    pub(super) fn record_message(&self) {
        self.record(&self.message_ms);
    }

    fn record(&self, last_ms: &AtomicU64) {
        last_ms.store(self.since.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Waits until the client has sent nothing for the time `silence`, or no complete frame for [`MESSAGE_TIMEOUT`].
    pub(super) async fn wait_unresponsive(&self, silence: Duration) {
        tokio::select! {
            () = self.wait_inactive(&self.alive_ms, silence) => {}
            () = self.wait_inactive(&self.frame_ms, silence.max(MESSAGE_TIMEOUT)) => {}
        }
    }

    /// Waits until there was no message for the time `limit`.
    pub(super) async fn wait_idle(&self, limit: Duration) {
        self.wait_inactive(&self.message_ms, limit).await;
    }

    /// Waits until `limit` has passed since the time in `last_ms`.
    async fn wait_inactive(&self, last_ms: &AtomicU64, limit: Duration) {
        loop {
            let end = self.since + Duration::from_millis(last_ms.load(Ordering::Relaxed)) + limit;
            if Instant::now() >= end {
                return;
            }
            sleep_until(end).await;
        }
    }
}
