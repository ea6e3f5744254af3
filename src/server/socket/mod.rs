//! The WebSocket layer of all protocols: access checks, keys, message sizes, compression, pings, bounded queues and
//! closing.
//!
//! A route passes a handler to [`Upgrade`]; the handler receives a [`Socket`] with complete incoming and outgoing
//! messages. Unread messages fill [`Outgoing`], whose `send` then waits, and with it the run that produced the message.
//! The handler is dropped when the client disconnects; its result is the close frame.

mod assembler;
mod authentication;
mod connection;
mod outgoing;
mod unauthenticated;
mod upgrade;

pub(crate) use outgoing::Outgoing;
pub(crate) use upgrade::{Upgrade, is_wanted};

use super::peers::ForwardHeaders;
use super::{App, Caller};
use bytes::Bytes;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc, watch};
use yawc::close::CloseCode;
use yawc::{DeflatePool, Options};

/// Number of pooled idle compressors; up to one per thread is in use at a time.
const COMPRESSORS: usize = 8;

/// Minimum size of compressed messages; smaller ones hardly shrink.
const COMPRESS_FROM_BYTES: usize = 256;

/// Size of the read and write buffers that a connection keeps between messages.
const IDLE_BUFFER_BYTES: usize = 1024;

/// A complete message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// Text; a JSON object in all protocols.
    Text(String),
    /// Binary data.
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

/// A connection that passed the access checks.
pub(crate) struct Socket {
    /// The caller.
    pub(crate) caller: Caller,
    /// Address of the client.
    pub(crate) address: Option<SocketAddr>,
    /// Headers for another server that its messages are forwarded to.
    pub(crate) headers: ForwardHeaders,
    /// Messages from the client.
    pub(crate) incoming: Incoming,
    /// Queue of messages to the client.
    pub(crate) outgoing: Outgoing,
}

/// The messages of a client.
pub(crate) struct Incoming {
    first: Option<Message>,
    messages: mpsc::Receiver<Message>,
}

impl Incoming {
    /// Returns the next message. If the client has disconnected, it never returns, and the handler is dropped.
    pub(crate) async fn next(&mut self) -> Message {
        if let Some(first) = self.first.take() {
            return first;
        }
        match self.messages.recv().await {
            Some(message) => message,
            None => std::future::pending().await,
        }
    }
}

/// A close frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Close {
    code: CloseCode,
    reason: String,
}

impl Close {
    /// Maximum length of the reason in a close frame.
    const MAX_REASON_BYTES: usize = 123;

    fn new(code: CloseCode, reason: &str) -> Self {
        let end =
            (0..=reason.len().min(Self::MAX_REASON_BYTES)).rev().find(|&end| reason.is_char_boundary(end)).unwrap_or(0);
        Self { code, reason: reason[..end].to_owned() }
    }

    /// 1000: normal closure.
    pub(crate) fn normal() -> Self {
        Self::new(CloseCode::Normal, "")
    }

    /// 1008: policy violation.
    pub(crate) fn policy(reason: &str) -> Self {
        Self::new(CloseCode::Policy, reason)
    }

    /// 1009: a message is too large.
    fn too_large(reason: &str) -> Self {
        Self::new(CloseCode::Size, reason)
    }

    fn is_too_large(&self) -> bool {
        self.code == CloseCode::Size
    }

    /// 1001: the server closes the connection without an error.
    fn away(reason: &str) -> Self {
        Self::new(CloseCode::Away, reason)
    }
}

/// State shared by all connections of a server.
pub(crate) struct Sockets {
    options: Options,
    open: watch::Sender<usize>,
    /// One permit per connection that waits for its API key.
    unauthenticated: Arc<Semaphore>,
}

impl Sockets {
    /// Creates the state for messages of up to `max_message_bytes`.
    pub(crate) fn new(max_message_bytes: usize) -> Self {
        // A frame that is slightly too large is still read so that the client receives an error; a much larger one
        // closes the connection at its header.
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

    /// Waits until no connection is open.
    pub(crate) async fn all_closed(&self) {
        // The sender is part of `self`, so waiting cannot fail.
        let _ = self.open.subscribe().wait_for(|&open| open == 0).await;
    }
}

/// Counts an open connection until dropped.
struct OpenConnection(App);

impl OpenConnection {
    fn new(app: App) -> Self {
        app.sockets().open.send_modify(|open| *open += 1);
        Self(app)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.sockets().open.send_modify(|open| *open -= 1);
    }
}

#[cfg(test)]
mod tests;
