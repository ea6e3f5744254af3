//! `/api/v1/runs/live`: changes to the run list, i.e. starts and ends of runs.

use crate::api::shared::sse::{self, KEEP_ALIVE_INTERVAL, ServerEvent};
use crate::events::Scope;
use crate::server::{ApiError, App};
use crate::store::RunListUpdate;
use axum::extract::State;
use axum::response::Response;
use futures::{StreamExt, stream};
use tokio::sync::broadcast::error::RecvError;

/// Streams changes to the run list: `change` events with `{run_id, status}`, including runs of other servers on the
/// same database. The stream never ends.
///
/// A client that was too slow, or whose server lost the database for a while, receives a `missed` event and should
/// reload the list.
#[utoipa::path(get, path = "/api/v1/runs/live", tag = "runs", responses(
    (status = 200, description = "Server-sent events", content_type = "text/event-stream")))]
pub async fn changes(State(app): State<App>, scope: Scope) -> Result<Response, ApiError> {
    let changes = app.live()?.runs(&scope);
    let events = stream::unfold(changes, |mut changes| async move {
        let event = match changes.recv().await {
            Ok(RunListUpdate::Changed(change)) => {
                ServerEvent::named("change", serde_json::to_string(&change).unwrap_or_default())
            }
            Ok(RunListUpdate::Missed) => ServerEvent::named("missed", "1"),
            Err(RecvError::Lagged(missed)) => ServerEvent::named("missed", missed.to_string()),
            Err(RecvError::Closed) => return None,
        };
        Some((event, changes))
    });
    let events = events.take_until(async move { app.wait_until_stopping().await });
    Ok(sse::send(events, sse::comments(Some(KEEP_ALIVE_INTERVAL))))
}
