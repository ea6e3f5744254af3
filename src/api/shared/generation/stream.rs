//! Sends runs as server-sent events. The stream pulls: a client that stops reading pauses its own runs, and a client
//! that disconnects drops the stream and with it the runs.

use super::runs::Runs;
use crate::engine::Output;
use crate::server::ApiError;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// Writes engine outputs in one protocol's format.
pub(crate) trait OutputWriter: Send + 'static {
    /// Appends the data of the events for one output of a run.
    ///
    /// # Errors
    /// The run failed; the error is the last event.
    fn write(&mut self, run: usize, output: Output, pending: &mut VecDeque<String>) -> Result<(), ApiError>;

    /// Appends the events after the end of the last run.
    fn end(&mut self, pending: &mut VecDeque<String>);

    /// Returns an error in the protocol's format.
    fn error(&self, error: &ApiError) -> String;
}

/// Returns the response that streams runs. After `ping` of silence it sends a comment, so that proxies keep the
/// connection open.
pub(crate) fn respond(runs: Runs, writer: impl OutputWriter, ping: Option<Duration>) -> Response {
    let sse = Sse::new(event_stream(RunEvents { runs, writer, pending: VecDeque::new(), done: false }));
    let headers = [("x-accel-buffering", "no")];
    match ping {
        // nginx would otherwise hold tokens back until its buffer is full.
        Some(ping) => (headers, sse.keep_alive(KeepAlive::new().interval(ping))).into_response(),
        None => (headers, sse).into_response(),
    }
}

struct RunEvents<W> {
    runs: Runs,
    writer: W,
    pending: VecDeque<String>,
    done: bool,
}

fn event_stream<W: OutputWriter>(events: RunEvents<W>) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(events, |mut events| async move {
        loop {
            if let Some(data) = events.pending.pop_front() {
                return Some((Ok(Event::default().data(data)), events));
            }
            if events.done {
                return None;
            }
            if let Err(error) = events.advance().await {
                events.pending.push_back(events.writer.error(&error));
                events.done = true;
            }
        }
    })
}

impl<W: OutputWriter> RunEvents<W> {
    async fn advance(&mut self) -> Result<(), ApiError> {
        if let Some((run, output)) = self.runs.next().await? {
            self.writer.write(run, output, &mut self.pending)
        } else {
            self.writer.end(&mut self.pending);
            self.done = true;
            Ok(())
        }
    }
}
