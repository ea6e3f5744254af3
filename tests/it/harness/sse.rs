//! The reader of server-sent events of all tests.

use super::Server;
use futures::StreamExt;
use futures::stream::BoxStream;
use reqwest::{Method, Response};
use serde_json::Value;
use std::time::Duration;

/// Maximum time for an event, also while other tests use all cores.
const EVENT_TIMEOUT: Duration = Duration::from_mins(1);

/// One server-sent event. Name and id are empty if the server sent none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SseEvent {
    pub name: String,
    pub id: String,
    pub data: String,
}

impl SseEvent {
    /// Returns the data as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|error| panic!("{error}: {}", self.data))
    }

    /// Parses the lines of an event; `None` for a comment alone.
    fn parse(text: &str) -> Option<Self> {
        let mut event = Self::default();
        let mut data = Vec::new();
        for line in text.lines() {
            let (field, value) = line.split_once(':').unwrap_or_else(|| panic!("{line:?} has no colon: {text:?}"));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "event" => value.clone_into(&mut event.name),
                "id" => value.clone_into(&mut event.id),
                "data" => data.push(value),
                // a comment
                "" => {}
                _ => panic!("unknown field {field:?} in {text:?}"),
            }
        }
        event.data = data.join("\n");
        (!data.is_empty()).then_some(event)
    }
}

/// Server-sent events as they arrive.
pub struct SseReader {
    bytes: BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    buffer: Vec<u8>,
}

impl SseReader {
    /// Reads the events of a `GET` request.
    pub async fn get(server: &Server, path: &str) -> Self {
        let request = server.request(Method::GET, path).header("accept", "text/event-stream");
        Self::new(request.send().await.unwrap()).await
    }

    /// Reads the events of a response, which must be successful.
    pub async fn new(response: Response) -> Self {
        let status = response.status();
        assert!(status.is_success(), "{status}: {}", response.text().await.unwrap());
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { bytes: response.bytes_stream().boxed(), buffer: Vec::new() }
    }

    /// Returns the next event; `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<SseEvent> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let text: Vec<u8> = self.buffer.drain(..end + 2).collect();
                match SseEvent::parse(std::str::from_utf8(&text[..end]).unwrap()) {
                    Some(event) => return Some(event),
                    None => continue,
                }
            }
            let Some(chunk) = tokio::time::timeout(EVENT_TIMEOUT, self.bytes.next()).await.expect("no event arrives")
            else {
                assert!(self.buffer.is_empty(), "the last event is incomplete: {:?}", self.buffer);
                return None;
            };
            self.buffer.extend_from_slice(&chunk.unwrap());
        }
    }

    /// Returns all further events.
    pub async fn rest(mut self) -> Vec<SseEvent> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }

    /// Reads up to the first matching event, and returns its data. Comments keep a stream alive, so the whole search
    /// also has a time limit.
    pub async fn until(&mut self, fits: impl Fn(&str, &Value) -> bool) -> Value {
        let search = async {
            loop {
                let event = self.next().await.expect("the stream ended before the event");
                let data = event.json();
                if fits(&event.name, &data) {
                    return data;
                }
            }
        };
        tokio::time::timeout(2 * EVENT_TIMEOUT, search).await.expect("the event does not arrive")
    }
}
