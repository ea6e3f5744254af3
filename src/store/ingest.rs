//! Storage of ingested trace documents.

use super::copy::GuardedTransaction;
use super::deletions::seconds_until_removal;
use super::rows::{InsertMode, Rows};
use super::runs::{RunSummary, by_id, request_id_owner, reserve_request_id, save};
use super::servers::notification::RunNotification;
use super::summary_builder::{RunRow, RunSummaryBuilder};
use super::{IngestError, Store};
use crate::events::{RunId, RunStatus, Scope, Tenant, system};
use crate::trace::document::Document;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Maximum duration of storing a document. After it the client receives an error and can try again.
const STORE_TIMEOUT: Duration = Duration::from_mins(2);

/// The result of storing a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ingested {
    /// Id under which the document is stored.
    pub run_id: RunId,
    /// False if the same document was already stored.
    pub created: bool,
}

impl Store {
    /// Stores a document of another engine as a finished run of `owner`, in one transaction. For a document that is already
    /// stored, returns the existing run if `scope` covers it.
    ///
    /// # Errors
    /// The `request_id` belongs to a run with other content, of another tenant or deleted but not removed yet, or the database
    /// is unavailable; see [`IngestError`].
    pub async fn ingest(
        &self,
        scope: &Scope,
        owner: Option<Tenant>,
        document: Document,
    ) -> Result<Ingested, IngestError> {
        // The id contains the time of arrival, not the time of the run. So ids keep the order of the run list, and rows go to
        // current partitions even for an old document.
        let run_id = RunId::now();
        let document = Arc::new(document);
        let prepared = tokio::task::spawn_blocking({
            let (document, owner) = (Arc::clone(&document), owner.clone());
            move || RunRow { fingerprint: Some(document.fingerprint()), ..summary(run_id, owner, &document) }
        });
        let ingested = timeout(STORE_TIMEOUT, self.insert(scope, run_id, document, prepared)).await;
        let ingested = ingested.unwrap_or(Err(IngestError::Unavailable { retry_after_s: 30 }));
        let failed = matches!(ingested, Err(IngestError::Unavailable { .. })).then(Instant::now);
        *self.inner.write_failed.lock().unwrap_or_else(PoisonError::into_inner) = failed;
        if let Err(IngestError::Conflict { request_id }) = &ingested
            && let Some(retry_after_s) =
                seconds_until_removal(&self.inner.pool, scope, request_id, system::now()).await?
        {
            return Err(IngestError::Unavailable { retry_after_s });
        }
        let ingested = ingested?;
        if ingested.created {
            self.inner.live.report_change(run_id, owner.clone(), RunStatus::Done);
            let change = RunNotification { run_id, status: Some(RunStatus::Done), owner };
            // The link receives as long as the store is open.
            let _ = self.inner.changes.send(change);
        }
        Ok(ingested)
    }

    /// Writes the rows while the fingerprint and the run's own row are being prepared. Dropping this future during a COPY
    /// closes the connection.
    async fn insert(
        &self,
        scope: &Scope,
        run_id: RunId,
        document: Arc<Document>,
        prepared: JoinHandle<RunRow>,
    ) -> Result<Ingested, IngestError> {
        let prepared = async {
            prepared.await.map_err(|error| IngestError::Refused(format!("the document cannot be replayed ({error})")))
        };
        let mut transaction = GuardedTransaction::begin(&self.inner.pool).await?;
        let connection = transaction.connection();
        let request_id = &document.request.request_id;
        // A concurrent insertion of the same id waits here until the first one has ended.
        if !reserve_request_id(connection, request_id, run_id).await? {
            let existing = request_id_owner(connection, request_id).await?;
            let run = match &existing {
                Some((run_id, _)) => by_id(connection, scope, *run_id).await?,
                None => None,
            };
            transaction.rollback().await?;
            // The run was deleted in the meantime, so the client can try again.
            let Some((run_id, stored)) = existing else { return Err(IngestError::Unavailable { retry_after_s: 1 }) };
            let conflict = IngestError::Conflict { request_id: request_id.clone() };
            let (Some(run), Some(stored)) = (run, stored) else { return Err(conflict) };
            let is_same = prepared.await?.fingerprint.is_some_and(|own| own[..] == *stored)
                || is_export(document, &run, stored).await?;
            return if is_same { Ok(Ingested { run_id, created: false }) } else { Err(conflict) };
        }
        let mut rows = Rows::new(if self.inner.uses_copy { InsertMode::Copy } else { InsertMode::New });
        for event in &document.events {
            rows.event(run_id, event);
            rows.insert_if_large(connection).await?;
        }
        for (index, call) in (0..).zip(&document.mod_calls) {
            rows.call(run_id, index, call);
            rows.insert_if_large(connection).await?;
        }
        for (index, log) in (0..).zip(&document.mod_logs) {
            rows.log(run_id, index, log);
            rows.insert_if_large(connection).await?;
        }
        for (index, action) in (0..).zip(&document.actions) {
            rows.action(run_id, index, action);
            rows.insert_if_large(connection).await?;
        }
        rows.insert(connection).await?;
        save(connection, &prepared.await?).await?;
        transaction.commit().await?;
        Ok(Ingested { run_id, created: true })
    }
}

/// Returns true for the export of a run whose document had no `created_at`: it has the time of the ingestion.
async fn is_export(document: Arc<Document>, run: &RunSummary, fingerprint: Vec<u8>) -> Result<bool, IngestError> {
    if document.request.created_at != Some(run.created_at) {
        return Ok(false);
    }
    let same = tokio::task::spawn_blocking(move || {
        // Not a copy, unless the document is still in use.
        let mut original = Arc::unwrap_or_clone(document);
        original.request.created_at = None;
        original.fingerprint()[..] == *fingerprint
    });
    same.await.map_err(|error| IngestError::Refused(format!("the document cannot be compared ({error})")))
}

fn summary(run_id: RunId, owner: Option<Tenant>, document: &Document) -> RunRow {
    let mut summary = RunSummaryBuilder::from_request(run_id, &document.request, owner, system::now());
    for item in document.items() {
        summary.apply(&item);
    }
    summary.row()
}
