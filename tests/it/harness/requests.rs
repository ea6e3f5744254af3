//! Requests: JSON bodies, keys, and connections without a client library.

use super::Server;
use reqwest::{Method, RequestBuilder};
use serde_json::Value;
use std::io::{ErrorKind, Read};

/// Returns an object with these fields added or replaced.
pub fn with_fields(mut object: Value, fields: &Value) -> Value {
    object.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    object
}

impl Server {
    /// Sends a request with this key, or without a key if it is empty; returns status and JSON.
    pub async fn send(&self, key: &str, method: Method, path: &str, body: Option<&Value>) -> (u16, Value) {
        let mut request = self.http.request(method, format!("{}{path}", self.base));
        if !key.is_empty() {
            request = request.bearer_auth(key);
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        status_and_json(request).await
    }
}

/// Sends a request; returns status and JSON, or the text as a JSON string if it is not JSON.
pub(super) async fn status_and_json(request: RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// Returns the request that opens a WebSocket at this path; `headers` are complete lines.
pub fn websocket_handshake(path: &str, headers: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{headers}\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
}

/// Returns the output of a connection until the server closes it.
pub fn read_until_closed(mut stream: impl Read) -> String {
    let mut output = Vec::new();
    match stream.read_to_end(&mut output) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the connection stays open: {error}"),
    }
    String::from_utf8_lossy(&output).into_owned()
}
