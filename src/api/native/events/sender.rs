//! A run as server-sent events: its stored items, then new ones until its end.

use crate::api::shared::sse::{self, KEEP_ALIVE_INTERVAL, ServerEvent};
use crate::events::{RunId, RunStatus, Scope, TraceItem};
use crate::server::{ApiError, App};
use crate::store::{ItemPage, ItemRange, LiveUpdate};
use crate::trace::document::{Numbering, item_to_json};
use axum::response::Response;
use std::time::Duration;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Interval at which a run of another server is read if no notification arrives.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Delay before a run that has not reached the recorder yet is looked up again.
const START_DELAY: Duration = Duration::from_millis(10);
/// Maximum events queued for a slow client.
const MAX_QUEUED_EVENTS: usize = 64;

/// Returns the response that follows a run from the event `from` on.
pub(super) fn respond(app: &App, scope: Scope, run_id: RunId, from: i32) -> Result<Response, ApiError> {
    // Checked here, so that a server without its database responds with an error instead of an empty stream.
    app.store()?;
    let (out, events) = mpsc::channel(MAX_QUEUED_EVENTS);
    let cursor = Cursor { event: from, items: 0 };
    let sender = RunEventSender {
        app: app.clone(),
        scope,
        run_id,
        cursor,
        numbering: Numbering::default(),
        event_numbering: Numbering::default(),
        event: -1,
        item: 0,
        out,
    };
    tokio::spawn(sender.run());
    Ok(sse::send(ReceiverStream::new(events), sse::comments(Some(KEEP_ALIVE_INTERVAL))))
}

/// Position of the next item to send: item number `items` of `event`, where the event itself is number 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Cursor {
    event: i32,
    items: u32,
}

struct RunEventSender {
    app: App,
    scope: Scope,
    run_id: RunId,
    cursor: Cursor,
    /// Numbers of calls and logs before the current item.
    numbering: Numbering,
    /// Numbers of calls, logs and actions before the current item's event.
    event_numbering: Numbering,
    /// `sequence_order` of the current item's event.
    event: i32,
    /// Number of the current item in the event.
    item: u32,
    out: mpsc::Sender<ServerEvent>,
}

/// The reason why a stream ends without an `end` event.
enum StreamAbort {
    /// The client disconnected, the server stops, or the run was deleted.
    Closed,
    /// The store failed. The stream ends, and the client reconnects with its last event id.
    Failed(ApiError),
}

impl<E: Into<ApiError>> From<E> for StreamAbort {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl RunEventSender {
    async fn run(mut self) {
        let (app, out) = (self.app.clone(), self.out.clone());
        let ended = tokio::select! {
            ended = self.follow() => ended,
            () = out.closed() => Err(StreamAbort::Closed),
            () = app.wait_until_stopped() => Err(StreamAbort::Closed),
        };
        if let Err(StreamAbort::Failed(error)) = ended {
            tracing::warn!(run.id = %self.run_id, error = error.log_detail(), "run stream interrupted");
        }
    }

    async fn follow(&mut self) -> Result<(), StreamAbort> {
        loop {
            if let Some((backlog, updates)) = self.app.live()?.subscribe(&self.scope, self.run_id) {
                let first = backlog.iter().find_map(|item| match item {
                    TraceItem::Event(event) => Some(event.sequence_order),
                    _ => None,
                });
                if let Some(first) = first {
                    self.send_stored(self.cursor.event.min(first), first).await?;
                }
                self.send_items(&backlog).await?;
                self.send_updates(updates).await?;
                continue;
            }
            if let Some(unstored) = self.app.store()?.unstored(&self.scope, self.run_id) {
                if unstored.is_over() {
                    unstored.wait_until_stored().await;
                } else {
                    tokio::time::sleep(START_DELAY).await;
                }
                continue;
            }
            // The run is active on another server, or it ended and is stored. Subscribing precedes the lookup, so that
            // no change is missed.
            let mut changed = self.app.live()?.follow_remote(self.run_id);
            let run = self.app.store()?.find(&self.scope, &self.run_id.to_string()).await?;
            self.send_stored(self.cursor.event, i32::MAX).await?;
            match run {
                Some(run) if run.status == RunStatus::Running => {
                    // An error means that the store has closed; the next lookup then fails.
                    let _ = tokio::time::timeout(POLL_INTERVAL, changed.changed()).await;
                }
                Some(run) => {
                    let summary = serde_json::to_string(&run).map_err(ApiError::internal)?;
                    return self.send(ServerEvent::named("end", summary)).await;
                }
                None => return Err(StreamAbort::Closed),
            }
        }
    }

    /// Sends the stored items of the events `from..to`. Later items are numbered from there, even if the range is
    /// empty.
    async fn send_stored(&mut self, mut from: i32, to: i32) -> Result<(), StreamAbort> {
        // The earlier items do not have to be counted again.
        while from == self.event {
            self.send_page(&ItemRange::following(from..to, self.event_numbering)).await?;
            if from == self.event {
                return Ok(());
            }
            from = self.event;
        }
        for page in self.app.store()?.item_pages(&self.scope, self.run_id, from..to).await? {
            self.send_page(&page).await?;
        }
        Ok(())
    }

    async fn send_page(&mut self, page: &ItemRange) -> Result<(), StreamAbort> {
        let ItemPage { numbering, items } = self.app.store()?.item_page(&self.scope, self.run_id, page).await?;
        self.numbering = numbering;
        self.send_items(&items).await
    }

    async fn send_updates(&mut self, mut updates: Receiver<LiveUpdate>) -> Result<(), StreamAbort> {
        loop {
            match updates.recv().await {
                Ok(LiveUpdate::Items(items)) => self.send_items(&items).await?,
                // A client that lagged receives stored items until it has caught up.
                Ok(LiveUpdate::Ended(_)) | Err(RecvError::Lagged(_) | RecvError::Closed) => return Ok(()),
            }
        }
    }

    /// Sends the items at or after the cursor.
    async fn send_items(&mut self, items: &[TraceItem]) -> Result<(), StreamAbort> {
        for item in items {
            match item {
                TraceItem::Attention(_) => continue,
                TraceItem::Event(event) => {
                    (self.event, self.item) = (event.sequence_order, 0);
                    self.event_numbering = self.numbering;
                }
                _ => self.item += 1,
            }
            let at = Cursor { event: self.event, items: self.item };
            if at < self.cursor {
                self.numbering.skip(item);
            } else if let Some(json) = item_to_json(item, &mut self.numbering) {
                self.cursor = Cursor { event: self.event, items: self.item + 1 };
                self.send(ServerEvent::named("item", json).id(self.event)).await?;
            }
        }
        Ok(())
    }

    async fn send(&self, event: ServerEvent) -> Result<(), StreamAbort> {
        self.out.send(event).await.map_err(|_| StreamAbort::Closed)
    }
}
