//! The WebSocket layer of all protocols: access checks, keys, message sizes, compression, pings, bounded queues and
//! closing.
//!
//! A route passes a handler to [`Upgrade`]; the handler receives a [`Socket`] with complete incoming and outgoing
//! messages. If the client reads slowly, [`Outgoing`] fills up and its `send` waits, and so does the run that produces
//! the messages. The handler is dropped when the client disconnects; its result is the close frame.

mod activity;
mod assembler;
mod authentication;
mod connection;
mod outgoing;
mod sockets;
mod unauthenticated;
mod upgrade;

pub(crate) use outgoing::Outgoing;
pub(crate) use sockets::Sockets;
pub(crate) use upgrade::{Upgrade, is_websocket_request};

use super::peers::ForwardHeaders;
use super::{App, Caller};
use bytes::Bytes;
use std::net::SocketAddr;
use tokio::sync::mpsc;
use yawc::close::CloseCode;

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
    /// Returns the next message. If the client has disconnected, the future never completes, and the handler is
    /// dropped.
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

    /// Returns a close frame with code 1000: normal closure.
    pub(crate) fn normal() -> Self {
        Self::new(CloseCode::Normal, "")
    }

    /// Returns a close frame with code 1008: policy violation.
    pub(crate) fn policy(reason: &str) -> Self {
        Self::new(CloseCode::Policy, reason)
    }

    /// Returns a close frame with code 1009: a message is too large.
    fn too_large(reason: &str) -> Self {
        Self::new(CloseCode::Size, reason)
    }

    fn is_too_large(&self) -> bool {
        self.code == CloseCode::Size
    }

    /// Returns a close frame with code 1001: the server closes the connection without an error.
    fn away(reason: &str) -> Self {
        Self::new(CloseCode::Away, reason)
    }
}

/// Guard that counts an open connection until dropped.
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
