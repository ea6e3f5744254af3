//! Deletions of runs that can be undone.
//!
//! `runs.deletion` is the id of the run's deletion. Reads on behalf of clients ignore such runs. The id is a `UUIDv7`, so it
//! contains the time of the deletion. The maintenance of any server removes the runs when the time for undoing is over, so a
//! deletion survives a crash.

use super::pool::PgPool;
use super::runs::{lock_ended, remove, request_id_owner};
use super::scope::{owned, owners};
use super::uuid_v7::{first_id_at, time_of};
use super::{Error, Store};
use crate::events::{RunId, Scope, system};
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

/// Time in which a deletion can be undone.
const UNDO_TIME: TimeDelta = TimeDelta::seconds(30);

/// Time between the last possible undo and the removal. Clocks of servers may differ by this much.
const REMOVAL_DELAY: TimeDelta = TimeDelta::seconds(5);

/// Maximum runs that are looked up for removal at once.
const MAX_REMOVAL_BATCH: i64 = 100;

/// A deletion that can be undone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Deletion {
    /// Id of the deletion.
    pub deletion_id: Uuid,
    /// Number of its runs.
    pub runs: u64,
    /// Time until which it can be undone.
    pub undo_until: DateTime<Utc>,
    /// Milliseconds until then.
    pub remaining_ms: u64,
}

impl Deletion {
    fn new(deletion_id: Uuid, runs: u64, now: DateTime<Utc>) -> Self {
        let undo_until = time_of(deletion_id) + UNDO_TIME;
        let remaining_ms = u64::try_from((undo_until - now).num_milliseconds()).unwrap_or(0);
        Self { deletion_id, runs, undo_until, remaining_ms }
    }
}

impl Store {
    /// Hides stored runs and schedules their removal. After an error, none of them is hidden. Runs outside the scope are left
    /// out.
    ///
    /// # Errors
    /// [`Error::StillRunning`], or the database failed.
    pub async fn schedule_deletion(
        &self,
        scope: &Scope,
        runs: &[RunId],
        now: DateTime<Utc>,
    ) -> Result<Deletion, Error> {
        // Other changes of runs lock them in order of their ids, too. Another order could cause a deadlock.
        let mut ids = runs.to_vec();
        ids.sort_unstable();
        ids.dedup();
        let deletion_id = system::new_id();
        let mut transaction = self.inner.pool.begin().await?;
        let mut hidden = 0;
        for run_id in ids {
            if lock_ended(&mut transaction, scope, run_id).await? {
                let hide = sqlx::query("update runs set deletion = $2 where run_id = $1");
                hide.bind(run_id.0).bind(deletion_id).execute(&mut *transaction).await?;
                hidden += 1;
            }
        }
        transaction.commit().await?;
        Ok(Deletion::new(deletion_id, hidden, now))
    }

    /// Returns the deletions that can be undone, oldest first.
    ///
    /// # Errors
    /// The database failed.
    pub async fn deletions(&self, scope: &Scope, now: DateTime<Utc>) -> Result<Vec<Deletion>, Error> {
        let select = concat!(
            "select deletion, count(*) from runs where deletion >= $1 and ",
            owned!(2),
            " group by deletion order by deletion"
        );
        let rows: Vec<(Uuid, i64)> = sqlx::query_as(select)
            .bind(first_id_at(now - UNDO_TIME))
            .bind(owners(scope))
            .fetch_all(&self.inner.pool)
            .await?;
        Ok(rows.into_iter().map(|(id, runs)| Deletion::new(id, runs.unsigned_abs(), now)).collect())
    }

    /// Makes the runs of a deletion visible again and returns them in order of their ids. Returns an empty list if the scope has no such
    /// deletion, or if its time is over.
    ///
    /// # Errors
    /// The database failed.
    pub async fn undo_deletion(
        &self,
        scope: &Scope,
        deletion_id: Uuid,
        now: DateTime<Utc>,
    ) -> Result<Vec<RunId>, Error> {
        if time_of(deletion_id) + UNDO_TIME < now {
            return Ok(Vec::new());
        }
        let select = concat!("select run_id from runs where deletion = $1 and ", owned!(2), " order by run_id");
        let show = "update runs set deletion = null where run_id = $1 and deletion = $2 returning run_id";
        let mut transaction = self.inner.pool.begin().await?;
        let ids: Vec<Uuid> =
            sqlx::query_scalar(select).bind(deletion_id).bind(owners(scope)).fetch_all(&mut *transaction).await?;
        let mut shown = Vec::new();
        for run_id in ids {
            let row = sqlx::query_scalar(show).bind(run_id).bind(deletion_id).fetch_optional(&mut *transaction).await?;
            shown.extend(row.map(RunId));
        }
        transaction.commit().await?;
        Ok(shown)
    }

    /// Removes the runs of all deletions that can no longer be undone, and returns their number.
    ///
    /// # Errors
    /// The database failed. Runs that were removed before stay removed.
    pub async fn remove_deleted(&self, now: DateTime<Utc>) -> Result<u64, Error> {
        Ok(remove_deleted(&self.inner.pool, now).await?)
    }
}

/// Returns the seconds until the deleted run with a `request_id` is removed. Returns `None` if the scope has no such run, or if
/// it is not deleted.
pub(super) async fn seconds_until_removal(
    pool: &PgPool,
    scope: &Scope,
    request_id: &str,
    now: DateTime<Utc>,
) -> Result<Option<u32>, sqlx::Error> {
    let mut connection = pool.acquire().await?;
    let Some((run_id, _)) = request_id_owner(&mut connection, request_id).await? else { return Ok(None) };
    let select = concat!("select deletion from runs where run_id = $1 and deletion is not null and ", owned!(2));
    let deletion: Option<Uuid> =
        sqlx::query_scalar(select).bind(run_id.0).bind(owners(scope)).fetch_optional(&mut connection).await?;
    let remaining = deletion.map(|id| time_of(id) + UNDO_TIME + REMOVAL_DELAY - now);
    Ok(remaining.map(|time| u32::try_from((time.num_milliseconds() + 999) / 1000).unwrap_or(1).max(1)))
}

/// Removes the runs of all deletions that can no longer be undone; see [`Store::remove_deleted`].
pub(super) async fn remove_deleted(pool: &PgPool, now: DateTime<Utc>) -> Result<u64, sqlx::Error> {
    let end = first_id_at(now - UNDO_TIME - REMOVAL_DELAY);
    let select = "select run_id from runs where deletion < $1 order by run_id limit $2";
    let mut removed = 0;
    loop {
        let due: Vec<Uuid> = sqlx::query_scalar(select).bind(end).bind(MAX_REMOVAL_BATCH).fetch_all(pool).await?;
        if due.is_empty() {
            return Ok(removed);
        }
        for run_id in due {
            let mut transaction = pool.begin().await?;
            // Another server may have removed it.
            let lock = sqlx::query("select 1 from runs where run_id = $1 and deletion < $2 for update");
            if lock.bind(run_id).bind(end).fetch_optional(&mut *transaction).await?.is_some() {
                remove(&mut transaction, RunId(run_id)).await?;
                removed += 1;
            }
            transaction.commit().await?;
        }
    }
}
