//! Storage of ingested trace documents.

use super::deletions::seconds_until_removal;
use super::pool::PgConnection;
use super::rows::{InsertMode, Rows};
use super::runs::{RunSummary, by_id, request_id_owner, reserve_request_id, save, stored_run};
use super::servers::notification::RunNotification;
use super::summary_builder::{RunRow, RunSummaryBuilder};
use super::{IngestError, Store};
use crate::events::{RunId, Scope, Tenant, system};
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
        let status = document.request.extras.status();
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
        let Some(ingested) = ingested? else { return Err(IngestError::Unavailable { retry_after_s: 1 }) };
        if ingested.created {
            self.inner.live.report_change(run_id, owner.clone(), status);
            let change = RunNotification { run_id, status: Some(status), owner };
            // The link receives as long as the store is open.
            let _ = self.inner.changes.send(change);
        }
        Ok(ingested)
    }

    /// Writes the rows while the fingerprint and the run's own row are being prepared. Returns `None` if the `request_id`
    /// belonged to a run that was removed meanwhile. Dropping this future during a COPY closes the connection.
    async fn insert(
        &self,
        scope: &Scope,
        run_id: RunId,
        document: Arc<Document>,
        prepared: JoinHandle<RunRow>,
    ) -> Result<Option<Ingested>, IngestError> {
        let mut transaction = self.inner.pool.begin_for_copy().await?;
        let request_id = &document.request.request_id;
        let is_new = request_id_owner(&mut transaction, request_id).await?.is_none();
        if is_new
            && let Ok(other) = request_id.parse()
            && (self.unstored(&Scope::All, other).is_some() || stored_run(&mut transaction, other).await?.is_some())
        {
            // Readers would find the other run under this id.
            transaction.rollback().await?;
            return Err(IngestError::Conflict { request_id: request_id.clone() });
        }
        if is_new {
            self.insert_items(&mut transaction, run_id, &document).await?;
        }
        let row = prepared.await;
        let row = row.map_err(|error| IngestError::Refused(format!("the document cannot be replayed ({error})")))?;
        // As late as possible: other reservations of the same id, also those of live runs, wait for the end of the
        // transaction.
        if is_new && reserve_request_id(&mut transaction, request_id, run_id).await? {
            save(&mut transaction, &row).await?;
            transaction.commit().await?;
            return Ok(Some(Ingested { run_id, created: true }));
        }
        let existing = request_id_owner(&mut transaction, request_id).await?;
        let run = match &existing {
            Some((run_id, _)) => by_id(&mut transaction, scope, *run_id).await?,
            None => None,
        };
        transaction.rollback().await?;
        let Some((run_id, stored)) = existing else { return Ok(None) };
        let conflict = IngestError::Conflict { request_id: request_id.clone() };
        let (Some(run), Some(stored)) = (run, stored) else { return Err(conflict) };
        let is_same =
            row.fingerprint.is_some_and(|own| own[..] == *stored) || is_export(document, &run, stored).await?;
        if is_same { Ok(Some(Ingested { run_id, created: false })) } else { Err(conflict) }
    }

    async fn insert_items(
        &self,
        connection: &mut PgConnection,
        run_id: RunId,
        document: &Document,
    ) -> Result<(), sqlx::Error> {
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
        rows.insert(connection).await
    }
}

/// Returns true if the document is a later export of the stored one. If that has no `created_at`, its export has the time
/// of the ingestion. Earlier versions exported runs without `thunder_run`.
async fn is_export(document: Arc<Document>, run: &RunSummary, fingerprint: Vec<u8>) -> Result<bool, IngestError> {
    let created_at = Some(run.created_at);
    let same = tokio::task::spawn_blocking(move || {
        // Not a copy, unless the document is still in use.
        let mut original = Arc::unwrap_or_clone(document);
        let is_stored = |original: &Document| original.fingerprint()[..] == *fingerprint;
        if original.request.created_at == created_at {
            original.request.created_at = None;
            if is_stored(&original) {
                return true;
            }
            original.request.created_at = created_at;
        }
        original.request.extras.thunder_run.take().is_some() && is_stored(&original)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::test_store;

    fn document() -> Document {
        Document::parse(include_bytes!("../../fixtures/sample_payload.json")).unwrap()
    }

    #[tokio::test]
    async fn request_id_is_free_while_the_run_is_prepared() {
        let (_folder, store) = test_store::open().await;
        let (run_id, document) = (RunId::now(), Arc::new(document()));
        let request_id = document.request.request_id.clone();
        let row = summary(run_id, None, &document);
        let (finish, finished) = tokio::sync::oneshot::channel();
        let prepared = tokio::spawn(async move {
            finished.await.unwrap();
            row
        });
        let ingestion = tokio::spawn({
            let store = store.clone();
            async move { store.insert(&Scope::All, run_id, document, prepared).await }
        });
        let begun = "select exists (select from pg_locks where relation = 'run_keys'::regclass)";
        let begun = async {
            while !sqlx::query_scalar::<_, bool>(begun).fetch_one(&store.inner.pool).await.unwrap() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_mins(1), begun).await.expect("the ingestion does not begin");
        let mut connection = store.inner.pool.acquire().await.unwrap();
        let reservation = reserve_request_id(&mut connection, &request_id, RunId::now());
        assert!(timeout(Duration::from_secs(10), reservation).await.expect("it waits for the ingestion").unwrap());
        finish.send(()).unwrap();
        assert!(matches!(ingestion.await.unwrap(), Err(IngestError::Conflict { .. })));
        drop(connection);
        store.close().await;
    }

    #[tokio::test]
    async fn removal_of_the_run_with_the_same_id_is_no_database_error() {
        let (_folder, store) = test_store::open().await;
        // Neither the reservation nor the lookup of the other run succeeds.
        let hide_keys = "
            create function skip() returns trigger language plpgsql as 'begin return null; end';
            create trigger skip before insert on run_keys for each row execute function skip()";
        sqlx::raw_sql(hide_keys).execute(&store.inner.pool).await.unwrap();
        let result = store.ingest(&Scope::All, None, document()).await;
        assert!(matches!(result, Err(IngestError::Unavailable { retry_after_s: 1 })));
        store.ready().await.unwrap();
        store.close().await;
    }
}
