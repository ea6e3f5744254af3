//! Runs as server-sent events. The stream pulls: a client that does not read stops its own runs, and one that has gone
//! drops the stream, and with it the runs.

use super::runs::Runs;
use crate::api::ApiError;
use crate::engine::Output;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// How a dialect writes outputs.
pub(in crate::api) trait Writer: Send + 'static {
    /// Appends the data of the events that an output of that run becomes.
    ///
    /// # Errors
    /// The run failed; nothing more is sent then.
    fn write(&mut self, run: usize, output: Output, ready: &mut VecDeque<String>) -> Result<(), ApiError>;

    /// Appends what stands behind the end of the last run.
    fn end(&mut self, ready: &mut VecDeque<String>);

    /// An error as this dialect's clients read it.
    fn error(&self, error: &ApiError) -> String;
}

/// The response that streams runs. After `ping` of silence it sends a comment, so that proxies keep the connection.
pub(in crate::api) fn respond(runs: Runs, writer: impl Writer, ping: Option<Duration>) -> Response {
    let sse = Sse::new(events(Sending { runs, writer, ready: VecDeque::new(), over: false }));
    let headers = [("x-accel-buffering", "no")];
    match ping {
        // nginx would otherwise hold tokens back until its buffer is full.
        Some(ping) => (headers, sse.keep_alive(KeepAlive::new().interval(ping))).into_response(),
        None => (headers, sse).into_response(),
    }
}

struct Sending<W> {
    runs: Runs,
    writer: W,
    ready: VecDeque<String>,
    over: bool,
}

fn events<W: Writer>(sending: Sending<W>) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(sending, |mut sending| async move {
        loop {
            if let Some(data) = sending.ready.pop_front() {
                return Some((Ok(Event::default().data(data)), sending));
            }
            if sending.over {
                return None;
            }
            if let Err(error) = sending.advance().await {
                sending.ready.push_back(sending.writer.error(&error));
                sending.over = true;
            }
        }
    })
}

impl<W: Writer> Sending<W> {
    async fn advance(&mut self) -> Result<(), ApiError> {
        if let Some((run, output)) = self.runs.next().await? {
            self.writer.write(run, output, &mut self.ready)
        } else {
            self.writer.end(&mut self.ready);
            self.over = true;
            Ok(())
        }
    }
}
