//! Relays the messages of streaming runs between a client and the server that generates the runs.

use super::{CONNECT_TIMEOUT, ForwardHeaders, Peer};
use crate::server::socket::Outgoing;
use crate::server::{ApiError, App};
use futures::{SinkExt, StreamExt};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;
use tokio::time::timeout;
use yawc::{Frame, HttpRequest, OpCode, Options, TcpWebSocket, WebSocket};

/// Maximum messages of the client that are queued for the other server.
const MAX_WAITING: usize = 16;

/// The client's side of a relay; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Relay {
    messages: mpsc::Sender<String>,
    /// Every `request_id` and `run_id` that the other server has sent.
    ids: Arc<Mutex<HashSet<String>>>,
}

impl Relay {
    /// Returns true if this relay handles the run with this id.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).contains(id)
    }

    /// Forwards a message of the client. Returns false if the relay has ended.
    pub(crate) async fn send(&self, message: String) -> bool {
        self.messages.send(message).await.is_ok()
    }
}

/// Fields of a message that determine which runs are active.
#[derive(Deserialize)]
struct MessageHead {
    r#type: String,
    operation: Option<String>,
    request_id: Option<String>,
    run_id: Option<String>,
    replaces: Option<String>,
    /// Present in an error that ends a run.
    generated_text: Option<IgnoredAny>,
}

/// The connection to the other server.
pub(crate) struct RelayConnection {
    socket: TcpWebSocket,
    messages: mpsc::Receiver<String>,
    ids: Arc<Mutex<HashSet<String>>>,
    peer: Peer,
}

/// Connects to the server that generates a run, and sends it the message `first`.
///
/// # Errors
/// 503 if that server does not respond.
pub(crate) async fn relay(
    app: &App,
    peer: &Peer,
    headers: &ForwardHeaders,
    first: String,
) -> Result<(Relay, RelayConnection), ApiError> {
    let mut address = peer.address("/generate")?;
    let scheme = if address.scheme() == "https" { "wss" } else { "ws" };
    address
        .set_scheme(scheme)
        .map_err(|()| ApiError::internal("the address cannot be converted to a WebSocket address"))?;
    let mut request = HttpRequest::builder();
    for (name, value) in &headers.forwarded_headers(app)? {
        request = request.header(name, value);
    }
    let max_bytes = app.config().server.sockets.max_message_bytes.saturating_mul(2).saturating_add(1);
    let options = Options::default().with_limits(max_bytes, max_bytes);
    let connect = WebSocket::connect(address).with_options(options).with_request(request);
    let connected =
        timeout(CONNECT_TIMEOUT, connect).await.map_err(|_| peer.unreachable("it did not respond in time"))?;
    let mut socket = connected.map_err(|error| peer.unreachable(&error.to_string()))?;
    socket.send(Frame::text(first)).await.map_err(|error| peer.unreachable(&error.to_string()))?;
    let (sender, messages) = mpsc::channel(MAX_WAITING);
    let ids = Arc::<Mutex<HashSet<String>>>::default();
    let relay = Relay { messages: sender, ids: Arc::clone(&ids) };
    Ok((relay, RelayConnection { socket, messages, ids, peer: peer.clone() }))
}

impl RelayConnection {
    /// Relays until no run is active.
    ///
    /// # Errors
    /// The connection to the other server was lost.
    pub(crate) async fn run(mut self, outgoing: &Outgoing) -> Result<(), ApiError> {
        let mut active = HashSet::new();
        loop {
            let frame = tokio::select! {
                frame = self.socket.next() => frame,
                Some(message) = self.messages.recv() => {
                    if let Err(error) = self.socket.send(Frame::text(message)).await {
                        return Err(self.peer.unreachable(&error.to_string()));
                    }
                    continue;
                }
            };
            let Some(frame) = frame.filter(|frame| frame.opcode() != OpCode::Close) else {
                return Err(self.peer.unreachable("it closed the connection"));
            };
            if frame.opcode() != OpCode::Text {
                continue;
            }
            let text = frame.as_str().to_owned();
            let is_last = self.update_active(&text, &mut active);
            // Sending fails if the client has disconnected.
            if outgoing.send(text).await.is_err() || is_last {
                return Ok(());
            }
        }
    }

    /// Updates the set of active runs after a message; returns true if the message ended the last one.
    fn update_active(&self, message: &str, active: &mut HashSet<String>) -> bool {
        let Ok(head) = serde_json::from_str::<MessageHead>(message) else { return false };
        let Some(id) = head.request_id else { return head.r#type == "error" && active.is_empty() };
        match (head.r#type.as_str(), head.operation.as_deref()) {
            ("init", _) => {
                let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
                ids.extend(head.run_id);
                ids.insert(id.clone());
                if let Some(replaced) = head.replaces {
                    active.remove(&replaced);
                }
                active.insert(id);
                false
            }
            ("completion", _) | ("status", Some("moved")) => {
                active.remove(&id);
                active.is_empty()
            }
            ("error", _) => {
                if head.generated_text.is_some() {
                    active.remove(&id);
                }
                active.is_empty()
            }
            _ => false,
        }
    }
}
