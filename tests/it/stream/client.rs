//! A client of the streaming protocol.

use crate::harness::{Server, client_tls};
use futures::{SinkExt, StreamExt};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::TlsConnector;
use yawc::{Frame, HttpRequest, OpCode, Options, TcpWebSocket, WebSocket};

/// Maximum wait for a message while other tests use all cores.
const WAIT_TIMEOUT: Duration = Duration::from_mins(3);

/// Header that makes [`Client::connect_with`] compress messages.
pub const COMPRESSED: (&str, &str) = ("x-test", "compressed");

/// A connection.
pub struct Client {
    pub socket: TcpWebSocket,
}

/// An item received on a connection.
#[derive(Debug)]
pub enum Next {
    Message(Value),
    Closed(Option<u16>),
}

impl Client {
    /// Connects without a key.
    pub async fn connect(server: &Server) -> Self {
        Self::connect_with(server, &[]).await.unwrap()
    }

    /// Connects with these headers.
    pub async fn connect_with(server: &Server, headers: &[(&str, &str)]) -> yawc::Result<Self> {
        let url = format!("{}/generate", server.base.replace("http", "ws")).parse().unwrap();
        let mut request = HttpRequest::builder();
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let options = Options::default().with_max_payload_read(64 << 20);
        let compressed = headers.contains(&COMPRESSED);
        let options = if compressed { options.with_balanced_compression() } else { options };
        let tls = TlsConnector::from(Arc::new(client_tls()));
        let connect = WebSocket::connect(url).with_options(options).with_request(request).with_connector(tls);
        Ok(Self { socket: connect.await? })
    }

    /// Sends a message.
    pub async fn send(&mut self, message: &Value) {
        self.send_text(message.to_string()).await;
    }

    /// Sends a text that need not be a valid message.
    pub async fn send_text(&mut self, text: String) {
        self.socket.send(Frame::text(text)).await.unwrap();
    }

    /// Returns the next item.
    pub async fn next(&mut self) -> Next {
        loop {
            let frame = tokio::time::timeout(WAIT_TIMEOUT, self.socket.next()).await.expect("no message arrived");
            match frame {
                None => return Next::Closed(None),
                Some(frame) => match frame.opcode() {
                    OpCode::Text => return Next::Message(serde_json::from_str(frame.as_str()).unwrap()),
                    OpCode::Close => return Next::Closed(frame.close_code().map(u16::from)),
                    _ => {}
                },
            }
        }
    }

    /// Returns the next message.
    pub async fn message(&mut self) -> Value {
        match self.next().await {
            Next::Message(message) => message,
            Next::Closed(code) => panic!("closed with {code:?}"),
        }
    }

    /// Returns the messages up to the first match. The whole search has a time limit, too, since a stream may never pause.
    pub async fn until(&mut self, matches: impl Fn(&Value) -> bool) -> Vec<Value> {
        let search = async {
            let mut messages = Vec::new();
            loop {
                let message = self.message().await;
                let found = matches(&message);
                messages.push(message);
                if found {
                    return messages;
                }
            }
        };
        tokio::time::timeout(2 * WAIT_TIMEOUT, search).await.expect("the expected message did not arrive")
    }

    /// Returns the messages up to the end of a run.
    pub async fn until_end(&mut self) -> Vec<Value> {
        self.until(|message| message["type"] == "completion" || message["type"] == "error").await
    }

    /// Sends a configuration and receives the run to its end.
    pub async fn run(&mut self, config: &Value) -> Vec<Value> {
        self.send(config).await;
        self.until_end().await
    }

    /// Returns the messages up to the status of that operation.
    pub async fn until_status(&mut self, operation: &str) -> Vec<Value> {
        let messages = self.until(|message| message["operation"] == operation || message["type"] == "error").await;
        assert_eq!(messages.last().unwrap()["type"], "status", "{:?}", messages.last());
        messages
    }
}
