//! The WebSocket plumbing under every protocol that has one: the gates, the key, message sizes, compression, pings,
//! bounded sending, and the end of a connection.
//!
//! A route takes [`Upgrade`] and hands it a handler, which gets a [`Socket`]: whole messages in, whole messages out. What a
//! client does not read fills [`Outgoing`], whose `send` then waits, and with it the run that made the message. The handler
//! is dropped when the client has gone; what it returns is how the connection is closed.

mod admission;
mod outgoing;
mod reading;
mod serving;
mod unauthenticated;
mod upgrade;

pub(in crate::api) use outgoing::Outgoing;
pub(in crate::api) use upgrade::{Upgrade, is_wanted};

use super::peers::ForwardHeaders;
use super::{App, Caller};
use bytes::Bytes;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc, watch};
use yawc::close::CloseCode;
use yawc::{DeflatePool, Options};

/// Every path that is a WebSocket. On these a key may come with the first message, since a browser cannot send headers.
pub(super) const PATHS: [&str; 3] = ["/generate", "/api/v1/generate/stream", "/api/extra/generate/stream/ws"];

/// Compressors that wait for the next message; as many are in use at once as there are threads.
const COMPRESSORS: usize = 8;

/// Messages below this are sent as they are: they hardly become smaller.
const COMPRESS_FROM_BYTES: usize = 256;

/// What a connection holds for reading and for writing between messages.
const IDLE_BUFFER_BYTES: usize = 1024;

/// A whole message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::api) enum Message {
    /// Text, in all our protocols a JSON object.
    Text(String),
    /// Anything else.
    Binary(Bytes),
}

impl Message {
    fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Binary(bytes) => bytes.len(),
        }
    }
}

impl From<String> for Message {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// A connection that has passed the gates.
pub(in crate::api) struct Socket {
    /// Who it is, where keys are set.
    pub(in crate::api) caller: Option<Caller>,
    /// Where it comes from.
    pub(in crate::api) address: Option<SocketAddr>,
    /// Headers for another server that its messages are forwarded to.
    pub(in crate::api) headers: ForwardHeaders,
    /// What the client sends.
    pub(in crate::api) incoming: Incoming,
    /// What it is sent.
    pub(in crate::api) outgoing: Outgoing,
}

/// The messages of a client.
pub(in crate::api) struct Incoming {
    first: Option<Message>,
    messages: mpsc::Receiver<Message>,
}

impl Incoming {
    /// The next message. When the client has gone there is none, and the handler is dropped.
    pub(in crate::api) async fn next(&mut self) -> Message {
        if let Some(first) = self.first.take() {
            return first;
        }
        match self.messages.recv().await {
            Some(message) => message,
            None => std::future::pending().await,
        }
    }
}

/// How a connection ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::api) struct Close {
    code: CloseCode,
    reason: String,
}

impl Close {
    /// The reason of a close frame has at most 123 bytes.
    const LONGEST: usize = 123;

    fn new(code: CloseCode, reason: &str) -> Self {
        let end = (0..=reason.len().min(Self::LONGEST)).rev().find(|&end| reason.is_char_boundary(end)).unwrap_or(0);
        Self { code, reason: reason[..end].to_owned() }
    }

    /// 1000: everything is said.
    pub(in crate::api) fn normal() -> Self {
        Self::new(CloseCode::Normal, "")
    }

    /// 1008: the client may not do that.
    pub(in crate::api) fn policy(reason: &str) -> Self {
        Self::new(CloseCode::Policy, reason)
    }

    /// 1009: a message is too large.
    fn too_large(reason: &str) -> Self {
        Self::new(CloseCode::Size, reason)
    }

    fn is_too_large(&self) -> bool {
        self.code == CloseCode::Size
    }

    /// 1001: the server ends the connection, though nothing is wrong.
    fn away(reason: &str) -> Self {
        Self::new(CloseCode::Away, reason)
    }
}

/// What all connections of a server share.
pub(in crate::api) struct Sockets {
    options: Options,
    open: watch::Sender<usize>,
    /// One permit for each connection that may wait for its API key.
    unauthenticated: Arc<Semaphore>,
}

impl Sockets {
    /// For messages of at most so many bytes.
    pub(in crate::api) fn new(max_message_bytes: usize) -> Self {
        // A frame that is a little too large is still read, to say what is wrong with it; one that is much too large ends
        // the connection at its header.
        let cap = max_message_bytes.saturating_mul(2).saturating_add(1);
        let options = Options::default()
            .with_limits(cap, cap)
            .with_low_latency_compression()
            .server_no_context_takeover()
            .client_no_context_takeover()
            .with_deflate_pool(DeflatePool::new(COMPRESSORS))
            .with_compression_threshold(COMPRESS_FROM_BYTES)
            .with_read_buffer_capacity(IDLE_BUFFER_BYTES)
            .with_write_buffer_capacity(IDLE_BUFFER_BYTES);
        let unauthenticated = Arc::new(Semaphore::new(unauthenticated::MAX_CONNECTIONS));
        Self { options, open: watch::Sender::new(0), unauthenticated }
    }

    /// Returns when no connection is open.
    pub(in crate::api) async fn all_closed(&self) {
        // The sender lives as long as this, so waiting cannot fail.
        let _ = self.open.subscribe().wait_for(|&open| open == 0).await;
    }
}

/// Counts an open connection while it lives.
struct Open(App);

impl Open {
    fn new(app: App) -> Self {
        app.sockets().open.send_modify(|open| *open += 1);
        Self(app)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.sockets().open.send_modify(|open| *open -= 1);
    }
}

#[cfg(test)]
mod tests;
