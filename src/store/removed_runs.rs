//! Runs that were removed. A server that still has records of such a run, in a batch or in its spool file, must not store it
//! again.
//!
//! The transaction that removes a run, or the runs of a day because of their age, adds an entry. A transaction that writes records locks their
//! runs first. Either it locks a run before the removal, which then waits and removes the new rows, too; or it waits for the
//! removal and finds the entry. Run ids are never used twice, so a document that is ingested again is not affected.

use super::pool::PgConnection;
use crate::events::RunId;
use chrono::{Days, NaiveDate, NaiveTime};
use std::collections::BTreeSet;
use uuid::Uuid;

/// Number of days for which entries are kept. Records that wait longer in a spool file are stored again.
const KEPT_DAYS: u64 = 30;

/// A run that does not exist.
#[derive(Debug)]
pub struct MissingRun {
    /// Id of the run.
    pub run_id: RunId,
    /// True if it was removed, false if it was never stored.
    pub is_removed: bool,
}

/// Keeps runs from being removed until the transaction ends. Returns those that do not exist.
pub async fn lock(connection: &mut PgConnection, runs: &BTreeSet<RunId>) -> Result<Vec<MissingRun>, sqlx::Error> {
    if runs.is_empty() {
        return Ok(Vec::new());
    }
    // The set is in order of the ids, and other changes of runs lock them in this order, too. Another order could cause a
    // deadlock.
    let ids: Vec<Uuid> = runs.iter().map(|run_id| run_id.0).collect();
    let missing: Vec<(Uuid, bool)> =
        sqlx::query_as("select missing_run, is_removed from lock_runs($1)").bind(ids).fetch_all(connection).await?;
    Ok(missing.into_iter().map(|(run_id, is_removed)| MissingRun { run_id: RunId(run_id), is_removed }).collect())
}

/// Adds a run.
pub async fn add(connection: &mut PgConnection, run_id: RunId) -> Result<(), sqlx::Error> {
    let insert = sqlx::query("insert into removed_runs (run_id) values ($1) on conflict do nothing");
    insert.bind(run_id.0).execute(connection).await?;
    Ok(())
}

/// Adds all runs from the day `first` to the day before `until`.
pub async fn add_days(connection: &mut PgConnection, first: NaiveDate, until: NaiveDate) -> Result<(), sqlx::Error> {
    sqlx::query(
        "insert into removed_days (first_day, next_day) values ($1, $2)
        on conflict (first_day, next_day) do update set removed_at = excluded.removed_at",
    )
    .bind(first)
    .bind(until)
    .execute(connection)
    .await?;
    Ok(())
}

/// Deletes the entries that are older than [`KEPT_DAYS`].
pub async fn delete_old_entries(connection: &mut PgConnection, today: NaiveDate) -> Result<(), sqlx::Error> {
    let Some(oldest) = today.checked_sub_days(Days::new(KEPT_DAYS)) else { return Ok(()) };
    let oldest = oldest.and_time(NaiveTime::MIN).and_utc();
    for delete in ["delete from removed_runs where removed_at < $1", "delete from removed_days where removed_at < $1"] {
        sqlx::query(delete).bind(oldest).execute(&mut *connection).await?;
    }
    Ok(())
}
