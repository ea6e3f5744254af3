//! Documents of somebody else's engine.

use super::outline::{Outline, RunRow};
use super::rows::Rows;
use super::runs::{claim, holder, save, sign};
use super::{IngestError, Store};
use crate::events::{RunId, RunStatus};
use crate::trace::document::Document;
use chrono::Utc;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A document that takes longer than this is given up; its poster tries again.
const PATIENCE: Duration = Duration::from_mins(2);

/// What became of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ingested {
    /// The run it is stored as.
    pub run_id: RunId,
    /// False when the same document was there already.
    pub created: bool,
}

impl Store {
    /// Stores a document of somebody else's engine as a finished run, in one transaction.
    ///
    /// # Errors
    /// The `request_id` is taken by other content, or the database is away; see [`IngestError`].
    pub async fn ingest(&self, document: Document) -> Result<Ingested, IngestError> {
        // the id says when it came, not when it happened: ids stay in the order of the run list and in the partitions of
        // these days, however old a document is
        let run_id = RunId::now();
        let document = Arc::new(document);
        let prepared = tokio::task::spawn_blocking({
            let document = Arc::clone(&document);
            move || (document.fingerprint(), outline(run_id, &document))
        });
        let ingested = timeout(PATIENCE, self.insert(run_id, &document, prepared))
            .await
            .map_err(|_| IngestError::Unavailable { retry_after_s: 30 })??;
        if ingested.created {
            self.inner.live.changed(run_id, RunStatus::Done);
        }
        Ok(ingested)
    }

    /// Inserts the rows while the fingerprint and the run's own row are being prepared.
    async fn insert(
        &self,
        run_id: RunId,
        document: &Document,
        prepared: JoinHandle<([u8; 32], RunRow)>,
    ) -> Result<Ingested, IngestError> {
        let prepared =
            async { prepared.await.map_err(|error| IngestError::Refused(format!("it cannot be replayed ({error})"))) };
        let mut transaction = self.inner.pool.begin().await?;
        let request_id = &document.request.request_id;
        // whoever posts the same id at the same time waits here for whoever was first
        if !claim(&mut transaction, request_id, run_id).await? {
            let (fingerprint, _) = prepared.await?;
            return match holder(&mut transaction, request_id).await? {
                Some((run_id, Some(other))) if other == fingerprint => Ok(Ingested { run_id, created: false }),
                Some(_) => Err(IngestError::Conflict { request_id: request_id.clone() }),
                // deleted in between: the poster may try again
                None => Err(IngestError::Unavailable { retry_after_s: 1 }),
            };
        }
        let mut rows = Rows::default();
        for event in &document.events {
            rows.event(run_id, event);
            if rows.is_large() {
                rows.insert(&mut transaction).await?;
            }
        }
        for (index, call) in (0..).zip(&document.mod_calls) {
            rows.call(run_id, index, call);
            if rows.is_large() {
                rows.insert(&mut transaction).await?;
            }
        }
        for (index, log) in (0..).zip(&document.mod_logs) {
            rows.log(run_id, index, log);
            if rows.is_large() {
                rows.insert(&mut transaction).await?;
            }
        }
        for (index, action) in (0..).zip(&document.actions) {
            rows.action(run_id, index, action);
            if rows.is_large() {
                rows.insert(&mut transaction).await?;
            }
        }
        rows.insert(&mut transaction).await?;
        let (fingerprint, row) = prepared.await?;
        sign(&mut transaction, request_id, &fingerprint).await?;
        save(&mut transaction, &row).await?;
        transaction.commit().await?;
        Ok(Ingested { run_id, created: true })
    }
}

fn outline(run_id: RunId, document: &Document) -> RunRow {
    let mut outline = Outline::ingested(run_id, &document.request, Utc::now());
    for item in document.items() {
        outline.apply(&item);
    }
    outline.row()
}
