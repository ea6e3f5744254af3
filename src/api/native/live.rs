//! `/api/v1/runs/live`: starts and ends of runs, for the run list.

use super::follow::KEEP_ALIVE;
use crate::events::Scope;
use crate::server::{ApiError, App};
use crate::store::RunListUpdate;
use axum::extract::State;
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::{StreamExt, stream};
use tokio::sync::broadcast::error::RecvError;

/// Streams changes of the run list: `change` events of `{run_id, status}`, including runs of other servers on the same
/// database. The stream never ends.
///
/// A client that was too slow, or whose server lost the database for a while, receives a `missed` event and should
/// reload the list.
#[utoipa::path(get, path = "/api/v1/runs/live", tag = "runs", responses(
    (status = 200, description = "Server-sent events", content_type = "text/event-stream")))]
pub async fn changes(State(app): State<App>, scope: Scope) -> Result<impl IntoResponse, ApiError> {
    let changes = app.live()?.runs(&scope);
    let events = stream::unfold(changes, |mut changes| async move {
        let event = match changes.recv().await {
            Ok(RunListUpdate::Changed(change)) => Event::default().event("change").json_data(change),
            Ok(RunListUpdate::Missed) => Event::default().event("missed").json_data(1),
            Err(RecvError::Lagged(missed)) => Event::default().event("missed").json_data(missed),
            Err(RecvError::Closed) => return None,
        };
        Some((event, changes))
    });
    let events = events.take_until(async move { app.stopping().await });
    let sse = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    Ok(([("x-accel-buffering", "no")], sse))
}
