//! Streams runs as server-sent events in any protocol's format.

use super::runs::Runs;
use crate::api::shared::sse::{self, EventSource, PendingEvents};
use crate::engine::Output;
use crate::server::ApiError;
use axum::response::Response;
use std::time::Duration;

/// A writer of engine outputs in one protocol's format.
pub(crate) trait OutputWriter: Send + 'static {
    /// Adds the events for one output of a run.
    fn on_output(&mut self, run: usize, output: Output, pending: &mut PendingEvents);

    /// Adds the events after the end of the last run.
    fn on_end(&mut self, pending: &mut PendingEvents);

    /// Adds the error that ends the stream.
    fn on_error(&mut self, error: &ApiError, pending: &mut PendingEvents);
}

/// Returns the response that streams runs. After the time `ping` without an event it sends a comment, so that proxies
/// keep the connection open.
pub(crate) fn stream_runs(runs: Runs, writer: impl OutputWriter, ping: Option<Duration>) -> Response {
    sse::respond(RunEvents { runs, writer }, PendingEvents::new(), sse::comments(ping))
}

struct RunEvents<W> {
    runs: Runs,
    writer: W,
}

impl<W: OutputWriter> EventSource for RunEvents<W> {
    async fn advance(&mut self, pending: &mut PendingEvents) -> bool {
        match self.runs.next().await {
            Ok(Some((run, output))) => {
                self.writer.on_output(run, output, pending);
                return true;
            }
            Ok(None) => self.writer.on_end(pending),
            Err(error) => self.writer.on_error(&error, pending),
        }
        false
    }
}
