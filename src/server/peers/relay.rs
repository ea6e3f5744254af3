//! Relays the messages of streaming runs between a client and the server that generates the runs.

use super::{CONNECT_TIMEOUT, ForwardHeaders, Peer};
use crate::server::socket::Outgoing;
use crate::server::{ApiError, App, client_tls};
use futures::{SinkExt, StreamExt};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, timeout};
use tokio_rustls::TlsConnector;
use yawc::{Frame, HttpRequest, OpCode, Options, TcpWebSocket, WebSocket};

/// Maximum messages of the client that are queued for the other server.
const MAX_WAITING: usize = 16;
/// Interval of pings to the other server.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Number of unanswered pings after which the other server is unreachable.
const MAX_UNANSWERED_PINGS: u32 = 3;
/// Maximum time to send a message to the other server.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

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
    /// Action of a control message.
    action: Option<String>,
    request_id: Option<String>,
    run_id: Option<String>,
    replaces: Option<String>,
    /// Present in an error that ends a run.
    generated_text: Option<IgnoredAny>,
}

/// The runs that a relay waits for.
#[derive(Default)]
struct ActiveRuns {
    ids: HashSet<String>,
    /// Number of forwarded `regenerate` messages whose runs have neither started nor failed. The run that one of them
    /// replaces may end first.
    starting: usize,
}

/// The connection to the other server.
pub(crate) struct RelayConnection {
    socket: TcpWebSocket,
    messages: mpsc::Receiver<String>,
    ids: Arc<Mutex<HashSet<String>>>,
    peer: Peer,
    pings: Interval,
    unanswered_pings: u32,
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
    let mut connect = WebSocket::connect(address).with_options(options).with_request(request);
    if scheme == "wss" {
        let tls = client_tls().map_err(ApiError::internal)?;
        connect = connect.with_connector(TlsConnector::from(Arc::new(tls)));
    }
    let connected =
        timeout(CONNECT_TIMEOUT, connect).await.map_err(|_| peer.unreachable("it did not respond in time"))?;
    let socket = connected.map_err(|error| peer.unreachable(&error.to_string()))?;
    let (relay, mut connection) = connection(socket, peer, PING_INTERVAL);
    connection.send(Frame::text(first)).await?;
    Ok((relay, connection))
}

/// Returns both sides of a relay over this connection.
fn connection(socket: TcpWebSocket, peer: &Peer, ping_interval: Duration) -> (Relay, RelayConnection) {
    let (sender, messages) = mpsc::channel(MAX_WAITING);
    let ids = Arc::<Mutex<HashSet<String>>>::default();
    let relay = Relay { messages: sender, ids: Arc::clone(&ids) };
    let mut pings = interval_at(Instant::now() + ping_interval, ping_interval);
    // A slow client delays the relay; the other server then has time to answer.
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    (relay, RelayConnection { socket, messages, ids, peer: peer.clone(), pings, unanswered_pings: 0 })
}

impl RelayConnection {
    /// Relays until no run is active.
    ///
    /// # Errors
    /// The connection to the other server was lost.
    pub(crate) async fn run(mut self, outgoing: &Outgoing) -> Result<(), ApiError> {
        let mut active = ActiveRuns::default();
        loop {
            let text = self.next(&mut active).await?;
            let is_last = serde_json::from_str::<MessageHead>(&text).is_ok_and(|head| {
                self.add_ids(&head);
                active.update(head)
            });
            // Sending fails if the client has disconnected.
            if outgoing.send(text).await.is_err() || is_last {
                return Ok(());
            }
        }
    }

    /// Returns the next message of the other server; meanwhile forwards the client's messages.
    async fn next(&mut self, active: &mut ActiveRuns) -> Result<String, ApiError> {
        loop {
            let frame = tokio::select! {
                frame = self.socket.next() => frame,
                Some(message) = self.messages.recv() => {
                    active.add_forwarded(&message);
                    self.send(Frame::text(message)).await?;
                    continue;
                }
                _ = self.pings.tick() => {
                    if self.unanswered_pings == MAX_UNANSWERED_PINGS {
                        return Err(self.peer.unreachable("it does not answer pings"));
                    }
                    self.unanswered_pings += 1;
                    self.send(Frame::ping("")).await?;
                    continue;
                }
            };
            self.unanswered_pings = 0;
            match frame {
                Some(frame) if frame.opcode() == OpCode::Text => return Ok(frame.as_str().to_owned()),
                Some(frame) if frame.opcode() != OpCode::Close => {}
                _ => return Err(self.peer.unreachable("it closed the connection")),
            }
        }
    }

    /// Sends a frame to the other server.
    async fn send(&mut self, frame: Frame) -> Result<(), ApiError> {
        let sent = timeout(SEND_TIMEOUT, self.socket.send(frame)).await;
        let sent = sent.map_err(|_| self.peer.unreachable("it does not read"))?;
        sent.map_err(|error| self.peer.unreachable(&error.to_string()))
    }

    /// Stores the ids of an init message.
    fn add_ids(&self, head: &MessageHead) {
        if head.r#type == "init" {
            let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
            ids.extend(head.request_id.iter().chain(&head.run_id).cloned());
        }
    }
}

impl ActiveRuns {
    /// Adds the run that a message of the client starts.
    fn add_forwarded(&mut self, message: &str) {
        let Ok(head) = serde_json::from_str::<MessageHead>(message) else { return };
        if head.r#type == "control" && head.action.as_deref() == Some("regenerate") {
            self.starting += 1;
        }
    }

    /// Updates the runs after a message of the other server; returns true if the message ended the last one.
    fn update(&mut self, head: MessageHead) -> bool {
        let ended = match (head.r#type.as_str(), head.operation.as_deref(), head.request_id) {
            ("init", _, Some(id)) => {
                if let Some(replaced) = head.replaces {
                    self.ids.remove(&replaced);
                    self.starting = self.starting.saturating_sub(1);
                }
                self.ids.insert(id);
                false
            }
            ("completion", _, Some(id)) => {
                if !self.ids.remove(&id) {
                    // The run was stopped before it started.
                    self.starting = self.starting.saturating_sub(1);
                }
                true
            }
            ("status", Some("moved"), Some(id)) => {
                self.ids.remove(&id);
                true
            }
            ("error", _, Some(id)) if head.generated_text.is_some() => {
                self.ids.remove(&id);
                true
            }
            ("error", ..) => {
                self.starting = self.starting.saturating_sub(1);
                true
            }
            _ => false,
        };
        ended && self.ids.is_empty() && self.starting == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::{TcpListener, TcpStream};
    use yawc::{MaybeTlsStream, Role};

    #[tokio::test]
    async fn silent_server_is_unreachable() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        // The connection stays open and is never read.
        let _other = listener.accept().await.unwrap();
        let socket = MaybeTlsStream::Plain(stream);
        let socket = WebSocket::from_stream_with_extensions(socket, Role::Client, None, Options::default()).unwrap();
        let peer = Peer("http://10.0.0.5:6767".parse().unwrap());
        let (_relay, mut connection) = connection(socket, &peer, Duration::from_millis(5));
        let ended = timeout(Duration::from_mins(1), connection.next(&mut ActiveRuns::default())).await.unwrap();
        let detail = ended.unwrap_err().problem().detail;
        assert!(detail.contains("http://10.0.0.5:6767") && detail.ends_with("it does not answer pings"), "{detail}");
    }

    /// Returns true if the message of the other server ends the relay.
    fn ends(active: &mut ActiveRuns, message: &str) -> bool {
        active.update(serde_json::from_str(message).unwrap())
    }

    #[test]
    fn relay_waits_for_a_regenerated_run() {
        let mut active = ActiveRuns::default();
        assert!(!ends(&mut active, r#"{"type":"init","request_id":"a"}"#));
        active.add_forwarded(r#"{"type":"control","action":"regenerate"}"#);
        assert!(!ends(&mut active, r#"{"type":"completion","request_id":"a"}"#));
        assert!(!ends(&mut active, r#"{"type":"init","request_id":"b","replaces":"a"}"#));
        assert!(ends(&mut active, r#"{"type":"completion","request_id":"b"}"#));
    }

    #[test]
    fn relay_ends_after_a_failed_or_stopped_regenerate() {
        let mut active = ActiveRuns::default();
        assert!(!ends(&mut active, r#"{"type":"init","request_id":"a"}"#));
        active.add_forwarded(r#"{"type":"control","action":"regenerate"}"#);
        assert!(!ends(&mut active, r#"{"type":"error","request_id":"a"}"#));
        active.add_forwarded(r#"{"type":"control","action":"regenerate"}"#);
        assert!(!ends(&mut active, r#"{"type":"completion","request_id":"b"}"#));
        assert!(ends(&mut active, r#"{"type":"completion","request_id":"a"}"#));
        assert!(ends(&mut ActiveRuns::default(), r#"{"type":"error"}"#));
    }
}
