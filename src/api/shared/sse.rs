//! Server-sent events of all protocols.
//!
//! Events are produced on demand: a client that stops reading pauses its own runs, and a disconnect drops the source,
//! which ends the runs.

use axum::body::Body;
use axum::http::{HeaderName, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream, StreamExt};
use serde::Serialize;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// Interval of keep-alive comments in endless streams, because proxies close idle connections.
pub(crate) const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Header that prevents nginx from holding events back until its buffer is full.
pub(crate) const NO_BUFFERING: (HeaderName, &str) = (HeaderName::from_static("x-accel-buffering"), "no");

/// An event.
#[derive(Debug)]
pub(crate) struct ServerEvent {
    name: Option<Cow<'static, str>>,
    id: Option<String>,
    data: String,
}

impl ServerEvent {
    /// Returns an event without a name.
    pub(crate) fn data(data: impl Into<String>) -> Self {
        Self { name: None, id: None, data: data.into() }
    }

    /// Returns an event without a name whose data is JSON.
    pub(crate) fn json(data: &impl Serialize) -> Self {
        Self::data(to_json(data))
    }

    /// Returns an event with a name.
    pub(crate) fn named(name: impl Into<Cow<'static, str>>, data: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..Self::data(data) }
    }

    /// Returns an event whose name is the `type` of its data, which must be the first field.
    pub(crate) fn typed(data: &impl Serialize) -> Self {
        let data = to_json(data);
        let name =
            data.strip_prefix("{\"type\":\"").and_then(|rest| rest.split_once('"')).map(|(name, _)| name.to_owned());
        debug_assert!(name.is_some(), "the first field of an event must be its `type`, got {data}");
        Self { name: name.map(Cow::Owned), ..Self::data(data) }
    }

    /// Sets the id that a client sends when it reconnects.
    pub(crate) fn id(mut self, id: impl Into<i64>) -> Self {
        self.id = Some(id.into().to_string());
        self
    }
}

impl From<ServerEvent> for Event {
    fn from(ServerEvent { name, id, data }: ServerEvent) -> Self {
        let event = name.map_or_else(Self::default, |name| Self::default().event(name));
        let event = match id {
            Some(id) => event.id(id),
            None => event,
        };
        event.data(data)
    }
}

/// Events to send.
pub(crate) type PendingEvents = VecDeque<ServerEvent>;

/// Adds an event whose name is the `type` of its data, as in Anthropic's Messages and OpenAI's Responses.
pub(crate) fn push_typed(pending: &mut PendingEvents, data: &impl Serialize) {
    pending.push_back(ServerEvent::typed(data));
}

/// Returns the JSON of a response type.
pub(crate) fn to_json(data: &impl Serialize) -> String {
    // Serialization fails only for maps with keys other than strings, which response types do not have.
    serde_json::to_string(data).unwrap_or_default()
}

/// A source of events.
pub(crate) trait EventSource: Send + 'static {
    /// Waits for the next events and adds them to `pending`; returns false after the last ones.
    fn advance(&mut self, pending: &mut PendingEvents) -> impl Future<Output = bool> + Send;
}

/// Returns a keep-alive with comments; `None` without an interval.
pub(crate) fn comments(interval: Option<Duration>) -> Option<KeepAlive> {
    interval.map(|interval| KeepAlive::new().interval(interval))
}

/// Returns the response that sends the `pending` events, then those of the source.
pub(crate) fn respond(source: impl EventSource, pending: PendingEvents, keep_alive: Option<KeepAlive>) -> Response {
    send(events_of(source, pending), keep_alive)
}

/// Returns the response that sends the data of events as lines, for protocols whose streams are JSON lines. Lines have
/// no names, ids or keep-alives.
pub(crate) fn respond_lines(source: impl EventSource, pending: PendingEvents) -> Response {
    let lines = events_of(source, pending).fuse().map(|event| Ok::<String, Infallible>(event.data + "\n"));
    ([(header::CONTENT_TYPE, "application/x-ndjson"), NO_BUFFERING], Body::from_stream(lines)).into_response()
}

/// Returns the `pending` events, then those of the source.
fn events_of(source: impl EventSource, pending: PendingEvents) -> impl Stream<Item = ServerEvent> + Send + 'static {
    stream::unfold((source, pending, true), |(mut source, mut pending, mut has_more)| async move {
        loop {
            if let Some(event) = pending.pop_front() {
                return Some((event, (source, pending, has_more)));
            }
            if !has_more {
                return None;
            }
            has_more = source.advance(&mut pending).await;
        }
    })
}

/// Returns the response that sends a stream of events.
pub(crate) fn send(
    events: impl Stream<Item = ServerEvent> + Send + 'static,
    keep_alive: Option<KeepAlive>,
) -> Response {
    let sse = Sse::new(events.map(|event| Ok::<Event, Infallible>(event.into())));
    match keep_alive {
        Some(keep_alive) => ([NO_BUFFERING], sse.keep_alive(keep_alive)).into_response(),
        None => ([NO_BUFFERING], sse).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Countdown(u32);

    impl EventSource for Countdown {
        async fn advance(&mut self, pending: &mut PendingEvents) -> bool {
            pending.push_back(ServerEvent::named("count", self.0.to_string()).id(self.0));
            self.0 -= 1;
            self.0 > 0
        }
    }

    #[test]
    fn typed_event_has_the_name_of_its_type() {
        let event = ServerEvent::typed(&serde_json::json!({"type": "ping", "other": "x"}));
        assert_eq!(event.name.as_deref(), Some("ping"));
        assert_eq!(event.data, "{\"type\":\"ping\",\"other\":\"x\"}");
    }

    #[tokio::test]
    async fn pending_events_precede_those_of_the_source() {
        let response = respond(Countdown(2), PendingEvents::from([ServerEvent::data("first")]), None);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert_eq!(response.headers()["cache-control"], "no-cache");
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let expected = "data: first\n\nevent: count\nid: 2\ndata: 2\n\nevent: count\nid: 1\ndata: 1\n\n";
        assert_eq!(body, expected);
    }

    #[tokio::test]
    async fn lines_have_only_the_data_of_events() {
        let response = respond_lines(Countdown(2), PendingEvents::from([ServerEvent::json(&[1])]));
        assert_eq!(response.headers()["content-type"], "application/x-ndjson");
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        assert_eq!(body, "[1]\n2\n1\n");
    }
}
