//! Writes of records of live runs to the database. The records come from the engine or from a spool file.

use super::pool::{PgConnection, PgPool};
use super::record::Record;
use super::removed_runs::{self, MissingRun};
use super::rows::{InsertMode, Rows};
use super::runs::{mark_interrupted, request_id_owner, reserve_request_id, save, stored_run};
use super::servers::notification::{RunNotification, notify};
use super::summary_builder::{RunRow, RunSummaryBuilder};
use super::text::clean;
use super::{Error, images, items};
use crate::events::{RunId, RunStart, RunStatus};
use chrono::{DateTime, Utc};
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use uuid::Uuid;

/// The first or a later attempt to write a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// The first attempt: none of its rows exists.
    First,
    /// A later attempt: some or all of its rows may exist.
    Retry,
}

/// Writes runs on behalf of this server.
#[derive(Clone)]
pub struct RunWriter {
    pub pool: PgPool,
    /// This server, which receives no notifications of its own writes.
    pub server_id: Uuid,
}

impl RunWriter {
    /// Writes records and the resulting rows of their runs in one transaction, and notifies the other servers.
    /// Skips runs that were removed, and returns them.
    pub async fn write<'r>(
        &self,
        records: &[Record],
        rows: impl IntoIterator<Item = &'r RunRow>,
        attempt: Attempt,
    ) -> Result<BTreeSet<RunId>, sqlx::Error> {
        let rows: Vec<&RunRow> = rows.into_iter().collect();
        let mut runs: BTreeSet<RunId> = records.iter().map(Record::run_id).collect();
        runs.extend(rows.iter().map(|row| row.summary.run_id));
        if attempt == Attempt::First {
            // No other server knows a run before its start is stored.
            for run_id in started_runs(records) {
                runs.remove(&run_id);
            }
        }
        let mut transaction = self.pool.begin().await?;
        let missing = removed_runs::lock(&mut transaction, &runs).await?;
        // A run that was not removed is stored again, for example after a failover to a standby without the latest changes.
        let removed: BTreeSet<RunId> = missing.into_iter().filter(|run| run.is_removed).map(|run| run.run_id).collect();
        let kept = without_runs(records, &removed);
        write_records(&mut transaction, &kept, attempt).await?;
        for row in rows.into_iter().filter(|row| !removed.contains(&row.summary.run_id)) {
            save(&mut transaction, row).await?;
        }
        notify(&mut transaction, self.server_id, notifications(&kept)).await?;
        transaction.commit().await?;
        Ok(removed)
    }

    /// Writes records of a spool file, some or all of which may be stored already. Computes the runs' rows from the stored
    /// items. Skips runs that were removed, and those that neither exist nor start with one of the records.
    pub async fn write_spooled(&self, records: &[Record]) -> Result<(), Error> {
        let started: BTreeSet<RunId> = started_runs(records).collect();
        let is_skipped = |run: &MissingRun| run.is_removed || !started.contains(&run.run_id);
        let mut transaction = self.pool.begin().await?;
        let missing = removed_runs::lock(&mut transaction, &records.iter().map(Record::run_id).collect()).await?;
        let skipped: BTreeSet<RunId> = missing.into_iter().filter(is_skipped).map(|run| run.run_id).collect();
        let kept = without_runs(records, &skipped);
        write_records(&mut transaction, &kept, Attempt::Retry).await?;
        for record in kept.iter() {
            if let Record::Ended { run_id, end } = record {
                recompute_row(&mut transaction, *run_id, |summary| summary.end(end)).await?;
            }
        }
        notify(&mut transaction, self.server_id, notifications(&kept)).await?;
        transaction.commit().await?;
        if !skipped.is_empty() {
            let count = records.len() - kept.len();
            tracing::warn!(
                runs = skipped.len(),
                records = count,
                "skipped spooled records of runs whose beginning is not stored"
            );
        }
        Ok(())
    }

    /// Marks the run of a dead server as interrupted, and computes its row from the stored items if they can be read. Returns
    /// false if the run is not running.
    pub async fn interrupt(&self, run_id: RunId, at: DateTime<Utc>) -> Result<bool, Error> {
        let mut transaction = self.pool.begin().await?;
        // The server may still be alive. The row lock keeps this write from overwriting a row that the server is writing,
        // and the later writes of the server replace this one.
        let running = sqlx::query_scalar::<_, bool>("select status = 'running' from runs where run_id = $1 for update");
        if running.bind(run_id.0).fetch_optional(&mut *transaction).await? != Some(true) {
            return Ok(false);
        }
        let change = RunNotification::new(run_id, Some(RunStatus::Interrupted));
        // Attention is encoded in parallel with the run and may have been stored before its event. If the server is alive
        // after all, these few rows are lost.
        let orphans = "delete from attention t where t.run_id = $1 and not exists \
                       (select 1 from events e where e.run_id = t.run_id and e.sequence_order = t.sequence_order)";
        sqlx::query(orphans).bind(run_id.0).execute(&mut *transaction).await?;
        let failure = match recompute_row(&mut transaction, run_id, |summary| summary.interrupt(at)).await {
            Ok(()) => {
                notify(&mut transaction, self.server_id, vec![change]).await?;
                transaction.commit().await?;
                return Ok(true);
            }
            Err(failure @ Error::Unavailable(_)) => return Err(failure),
            Err(failure) => failure,
        };
        transaction.rollback().await?;
        tracing::error!(run.id = %run_id, error = %failure, "cannot read the stored rows of an interrupted run; its counts are not updated");
        let mut transaction = self.pool.begin().await?;
        mark_interrupted(&mut transaction, run_id, at).await?;
        notify(&mut transaction, self.server_id, vec![change]).await?;
        transaction.commit().await?;
        Ok(true)
    }

    /// Computes the row of a run again that is marked as interrupted, after further items were stored. Its status and its
    /// end do not change.
    pub async fn update_interrupted(&self, run_id: RunId) -> Result<(), Error> {
        let mut transaction = self.pool.begin().await?;
        let interrupted = sqlx::query_scalar::<_, bool>("select status = $2 from runs where run_id = $1 for update");
        let interrupted = interrupted.bind(run_id.0).bind(RunStatus::Interrupted.as_str());
        if interrupted.fetch_optional(&mut *transaction).await? == Some(true) {
            recompute_row(&mut transaction, run_id, |_| {}).await?;
            notify(&mut transaction, self.server_id, vec![RunNotification::new(run_id, None)]).await?;
        }
        Ok(transaction.commit().await?)
    }

    /// Returns those of the runs that are marked as interrupted.
    pub async fn interrupted_runs(&self, runs: &BTreeSet<RunId>) -> Result<Vec<RunId>, sqlx::Error> {
        let run_ids: Vec<Uuid> = runs.iter().map(|run_id| run_id.0).collect();
        let interrupted: Vec<Uuid> =
            sqlx::query_scalar("select run_id from runs where run_id = any($1) and status = $2")
                .bind(run_ids)
                .bind(RunStatus::Interrupted.as_str())
                .fetch_all(&self.pool)
                .await?;
        Ok(interrupted.into_iter().map(RunId).collect())
    }

    /// Returns the number of stored items of a run, without attention.
    pub async fn count_items(&self, run_id: RunId) -> Result<i64, sqlx::Error> {
        sqlx::query_scalar(
            "select (select count(*) from events where run_id = $1) + (select count(*) from mod_calls where run_id = $1)
                + (select count(*) from mod_logs where run_id = $1) + (select count(*) from actions where run_id = $1)",
        )
        .bind(run_id.0)
        .fetch_one(&self.pool)
        .await
    }
}

/// Returns the runs that start with one of the records.
fn started_runs(records: &[Record]) -> impl Iterator<Item = RunId> {
    records.iter().filter(|record| matches!(record, Record::Started { .. })).map(Record::run_id)
}

/// Returns the records of the other runs.
fn without_runs<'r>(records: &'r [Record], runs: &BTreeSet<RunId>) -> Cow<'r, [Record]> {
    if runs.is_empty() {
        return Cow::Borrowed(records);
    }
    records.iter().filter(|record| !runs.contains(&record.run_id())).cloned().collect()
}

/// Returns one notification for each run of the records.
fn notifications(records: &[Record]) -> Vec<RunNotification> {
    let mut notifications: Vec<RunNotification> = Vec::new();
    let mut positions = HashMap::new();
    for record in records {
        let run_id = record.run_id();
        let status = match record {
            Record::Started { .. } => Some(RunStatus::Running),
            Record::Items { .. } => None,
            Record::Ended { end, .. } => Some(end.status),
        };
        let position = *positions.entry(run_id).or_insert_with(|| {
            notifications.push(RunNotification::new(run_id, None));
            notifications.len() - 1
        });
        notifications[position].status = status.or(notifications[position].status);
    }
    notifications
}

async fn write_records(connection: &mut PgConnection, records: &[Record], attempt: Attempt) -> Result<(), sqlx::Error> {
    let starts = records.iter().filter_map(|record| match record {
        Record::Started { start, .. } => Some(&**start),
        Record::Items { .. } | Record::Ended { .. } => None,
    });
    images::insert(connection, &starts.collect::<Vec<_>>()).await?;
    let mut rows = Rows::new(if attempt == Attempt::First { InsertMode::New } else { InsertMode::SkipExisting });
    for record in records {
        match record {
            Record::Started { start, server_id } => insert_run(connection, start, *server_id, attempt).await?,
            Record::Items { run_id, first_numbers, items } => {
                let mut numbering = *first_numbers;
                for item in items.iter() {
                    rows.item(*run_id, item, &mut numbering);
                    rows.insert_if_large(connection).await?;
                }
            }
            Record::Ended { .. } => {}
        }
    }
    rows.insert(connection).await
}

/// Reserves the `request_id` and inserts the run's first row. If a client uses a `request_id` twice, the run is recorded
/// with the id `REQUEST_ID~RUN_ID`.
async fn insert_run(
    connection: &mut PgConnection,
    start: &RunStart,
    server_id: Uuid,
    attempt: Attempt,
) -> Result<(), sqlx::Error> {
    let run_id = start.run_id;
    if attempt == Attempt::Retry && stored_run(connection, run_id).await?.is_some() {
        return Ok(());
    }
    let mut request_id = clean(&start.request_id).into_owned();
    if !reserve_request_id(connection, &request_id, run_id).await?
        && request_id_owner(connection, &request_id).await?.is_none_or(|(owner, _)| owner != run_id)
    {
        request_id = format!("{request_id}~{run_id}");
        reserve_request_id(connection, &request_id, run_id).await?;
    }
    let start = RunStart { request_id, ..start.clone() };
    save(connection, &RunSummaryBuilder::from_start(&start, server_id).row()).await
}

/// Computes the row of a run from its stored items, applies `change`, and writes it.
async fn recompute_row(
    connection: &mut PgConnection,
    run_id: RunId,
    change: impl FnOnce(&mut RunSummaryBuilder),
) -> Result<(), Error> {
    let Some(run) = stored_run(connection, run_id).await? else { return Ok(()) };
    let mut summary = RunSummaryBuilder::from_stored(run, None);
    for item in items::all_items(connection, run_id).await? {
        summary.apply(&item);
    }
    // The items read above have no attention.
    let attention = sqlx::query_scalar("select exists (select 1 from attention where run_id = $1)");
    summary.set_has_attention(attention.bind(run_id.0).fetch_one(&mut *connection).await?);
    change(&mut summary);
    Ok(save(connection, &summary.row()).await?)
}
