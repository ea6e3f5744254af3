//! Sends a chat answer as server-sent events in any protocol's format.
//!
//! The stream pulls: a client that stops reading pauses its own run, and a client that disconnects drops the stream and
//! with it the run.

use super::stream::{ChatStream, ChatUpdate};
use crate::server::ApiError;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::future::BoxFuture;
use futures::stream::{self, Stream};
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;

/// Events to send: the event's name, if the protocol has names, and its data.
pub(crate) type PendingEvents = VecDeque<(Option<&'static str>, String)>;

/// Writes the events of a chat stream in one protocol's format.
pub(crate) trait ChatEventWriter: Send + 'static {
    /// Writes the events that precede all output.
    fn on_start(&mut self, chat: &ChatStream, pending: &mut PendingEvents);
    /// Writes the events for one update.
    fn on_update(&mut self, chat: &ChatStream, update: ChatUpdate, pending: &mut PendingEvents);
    /// Writes the events after the last answer. Events that have to wait for a result are returned as a future and are
    /// sent last.
    fn on_end(&mut self, chat: &ChatStream, pending: &mut PendingEvents) -> Option<BoxFuture<'static, PendingEvents>>;
    /// Writes the error that ends the stream.
    fn on_error(&mut self, error: &ApiError, pending: &mut PendingEvents);
    /// Returns the keep-alive event; `None` sends a comment.
    fn ping_event(&self) -> Option<Event> {
        None
    }
}

/// Returns the response that streams the answers.
pub(crate) fn respond<D: ChatEventWriter>(chat: ChatStream, mut writer: D) -> Response {
    let mut pending = PendingEvents::new();
    writer.on_start(&chat, &mut pending);
    let (ping, interval) = (writer.ping_event(), chat.options.ping);
    let sse = Sse::new(event_stream(SseState { chat, writer, pending, done: false, final_events: None }));
    let headers = [
        // nginx would otherwise hold tokens back until its buffer is full.
        ("x-accel-buffering", "no"),
        ("cache-control", "no-cache"),
    ];
    match interval {
        Some(interval) => {
            let alive = KeepAlive::new().interval(interval);
            let alive = ping.map_or(alive.clone(), |ping| alive.event(ping));
            (headers, sse.keep_alive(alive)).into_response()
        }
        None => (headers, sse).into_response(),
    }
}

struct SseState<D> {
    chat: ChatStream,
    writer: D,
    pending: PendingEvents,
    done: bool,
    /// Events to send after all pending ones.
    final_events: Option<BoxFuture<'static, PendingEvents>>,
}

fn event_stream<D: ChatEventWriter>(state: SseState<D>) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(state, |mut state| async move {
        loop {
            if let Some((name, data)) = state.pending.pop_front() {
                let event = name.map_or_else(Event::default, |name| Event::default().event(name));
                return Some((Ok(event.data(data)), state));
            }
            if let Some(events) = state.final_events.take() {
                state.pending = events.await;
                continue;
            }
            if state.done {
                return None;
            }
            let SseState { chat, writer, pending, done, final_events } = &mut state;
            match chat.next().await {
                Ok(Some(update)) => writer.on_update(chat, update, pending),
                Ok(None) => {
                    *done = true;
                    *final_events = writer.on_end(chat, pending);
                }
                Err(error) => {
                    writer.on_error(&error, pending);
                    *done = true;
                }
            }
        }
    })
}

/// Queues an event with a name, as Anthropic's Messages and OpenAI's Responses use.
pub(crate) fn push_named(pending: &mut PendingEvents, name: &'static str, data: &Value) {
    pending.push_back((Some(name), data.to_string()));
}
