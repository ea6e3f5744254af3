//! Limits on connections that have not sent an API key yet.
//!
//! A WebSocket client may send its key in the first message, so the handshake succeeds without one. Until the key is
//! accepted a connection may send [`MAX_MESSAGE_BYTES`], and [`MAX_CONNECTIONS`] may wait at a time: together these
//! limits bound the memory that clients without a key can use.

use super::activity::LastActivity;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;

/// Maximum number of connections that wait for their key at the same time.
pub(super) const MAX_CONNECTIONS: usize = 256;

/// Maximum size of the message that carries the key.
pub(super) const MAX_MESSAGE_BYTES: usize = 16 << 10;

/// Maximum bytes read from a connection before its key is accepted. The decoder may also read a part of the second
/// message: up to the buffer size that the first one required.
const MAX_BYTES: usize = 2 * MAX_MESSAGE_BYTES;

/// The byte stream of a WebSocket. Reading fails after [`MAX_BYTES`] until the connection is authenticated.
pub(super) struct LimitedStream<S = TokioIo<Upgraded>> {
    stream: S,
    authenticated: watch::Receiver<bool>,
    activity: Arc<LastActivity>,
    /// Bytes read so far; not counted once the connection is authenticated.
    received: usize,
    limited: bool,
}

impl<S> LimitedStream<S> {
    /// Wraps a connection. `authenticated` becomes true when its key is accepted.
    pub(super) fn new(stream: S, authenticated: watch::Receiver<bool>, activity: Arc<LastActivity>) -> Self {
        Self { stream, authenticated, activity, received: 0, limited: true }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LimitedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let filled = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        self.activity.record_bytes();
        if self.limited {
            self.received += buffer.filled().len() - filled;
            let authenticated = *self.authenticated.borrow();
            self.limited = !authenticated;
            if self.limited && self.received > MAX_BYTES {
                return Poll::Ready(Err(io::ErrorKind::QuotaExceeded.into()));
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LimitedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn client_that_sends_a_part_of_a_message_is_not_unresponsive() {
        const SILENCE: Duration = Duration::from_secs(2);
        let (mut client, stream) = tokio::io::duplex(64);
        let activity = Arc::new(LastActivity::new());
        let mut stream = LimitedStream::new(stream, watch::channel(true).1, Arc::clone(&activity));
        activity.wait_unresponsive(SILENCE).await;
        client.write_all(b"part").await.unwrap();
        stream.read_exact(&mut [0; 4]).await.unwrap();
        assert!(futures::poll!(Box::pin(activity.wait_unresponsive(SILENCE))).is_pending());
    }
}
