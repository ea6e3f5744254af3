//! The state that all WebSocket connections of a server share.

use super::unauthenticated;
use std::sync::Arc;
use tokio::sync::{Semaphore, watch};
use yawc::{DeflatePool, Options};

/// Number of pooled idle compressors; up to one per thread is in use at a time.
const COMPRESSORS: usize = 8;

/// Minimum size of compressed messages; smaller ones hardly shrink.
const MIN_COMPRESSED_BYTES: usize = 256;

/// Size of the read and write buffers that a connection keeps between messages.
const IDLE_BUFFER_BYTES: usize = 1024;

/// State shared by all connections of a server.
pub(crate) struct Sockets {
    pub(super) options: Options,
    pub(super) open: watch::Sender<usize>,
    /// One permit per connection that waits for its API key.
    pub(super) unauthenticated: Arc<Semaphore>,
}

impl Sockets {
    /// Creates the state for messages of up to `max_message_bytes`.
    pub(crate) fn new(max_message_bytes: usize) -> Self {
        // A frame that is slightly too large is still read, so that the client can read the error after it has sent the
        // frame; a much larger one closes the connection at its header.
        let cap = max_message_bytes.saturating_mul(2).saturating_add(1);
        let options = Options::default()
            .with_limits(cap, cap)
            .with_low_latency_compression()
            .server_no_context_takeover()
            .client_no_context_takeover()
            .with_deflate_pool(DeflatePool::new(COMPRESSORS))
            .with_compression_threshold(MIN_COMPRESSED_BYTES)
            .with_read_buffer_capacity(IDLE_BUFFER_BYTES)
            .with_write_buffer_capacity(IDLE_BUFFER_BYTES);
        let unauthenticated = Arc::new(Semaphore::new(unauthenticated::MAX_CONNECTIONS));
        Self { options, open: watch::Sender::new(0), unauthenticated }
    }

    /// Waits until no connection is open.
    pub(crate) async fn all_closed(&self) {
        // The sender is part of `self`, so waiting cannot fail.
        let _ = self.open.subscribe().wait_for(|&open| open == 0).await;
    }
}
