//! An answer as server-sent events, whatever dialect writes them.
//!
//! The stream pulls: a client that does not read stops its own run, and one that has gone drops the stream, and with
//! it the run.

use super::talk::{Heard, Talk};
use crate::api::ApiError;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::future::BoxFuture;
use futures::stream::{self, Stream};
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;

/// Events that can be sent: the event's name, where the dialect has names, and its data.
pub(in crate::api) type Ready = VecDeque<(Option<&'static str>, String)>;

/// How a dialect writes a stream.
pub(in crate::api) trait Dialect: Send + 'static {
    /// Before anything was heard.
    fn begin(&mut self, talk: &Talk, ready: &mut Ready);
    /// Something was heard.
    fn heard(&mut self, talk: &Talk, heard: Heard, ready: &mut Ready);
    /// All answers are over. Events that wait for something come as a future, behind those that are ready.
    fn end(&mut self, talk: &Talk, ready: &mut Ready) -> Option<BoxFuture<'static, Ready>>;
    /// The stream ends with an error.
    fn failed(&mut self, error: &ApiError, ready: &mut Ready);
    /// What is sent when there is nothing to say; `None`: a comment.
    fn ping(&self) -> Option<Event> {
        None
    }
}

/// The response that streams a talk.
pub(in crate::api) fn respond<D: Dialect>(talk: Talk, mut dialect: D) -> Response {
    let mut ready = Ready::new();
    dialect.begin(&talk, &mut ready);
    let (ping, interval) = (dialect.ping(), talk.wishes.ping);
    let sse = Sse::new(events(State { talk, dialect, ready, over: false, last: None }));
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

struct State<D> {
    talk: Talk,
    dialect: D,
    ready: Ready,
    over: bool,
    /// What comes behind all that is ready.
    last: Option<BoxFuture<'static, Ready>>,
}

fn events<D: Dialect>(state: State<D>) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(state, |mut state| async move {
        loop {
            if let Some((name, data)) = state.ready.pop_front() {
                let event = name.map_or_else(Event::default, |name| Event::default().event(name));
                return Some((Ok(event.data(data)), state));
            }
            if let Some(last) = state.last.take() {
                state.ready = last.await;
                continue;
            }
            if state.over {
                return None;
            }
            let State { talk, dialect, ready, over, last } = &mut state;
            match talk.next().await {
                Ok(Some(heard)) => dialect.heard(talk, heard, ready),
                Ok(None) => {
                    *over = true;
                    *last = dialect.end(talk, ready);
                }
                Err(error) => {
                    dialect.failed(&error, ready);
                    *over = true;
                }
            }
        }
    })
}

/// An event whose data names its type, as Anthropic and OpenAI's Responses have it.
pub(in crate::api) fn typed(ready: &mut Ready, name: &'static str, data: &Value) {
    ready.push_back((Some(name), data.to_string()));
}
