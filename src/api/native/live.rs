//! `/api/v1/runs/live`: runs that begin and end, for the run list.

use super::follow::KEEP_ALIVE;
use crate::api::{ApiError, App};
use crate::store::RunListUpdate;
use axum::extract::State;
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::{StreamExt, stream};
use tokio::sync::broadcast::error::RecvError;

/// Streams changes of the run list: `change` events of `{run_id, status}`, also for runs of other servers on the same
/// database. Without end.
///
/// A client that was too slow, or whose server could not follow the database for a while, gets a `missed` event and should
/// load the list again.
#[utoipa::path(get, path = "/api/v1/runs/live", tag = "runs", responses(
    (status = 200, description = "Server-sent events", content_type = "text/event-stream")))]
pub async fn changes(State(app): State<App>) -> Result<impl IntoResponse, ApiError> {
    let changes = app.live()?.runs();
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
