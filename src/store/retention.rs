//! How long runs are kept: for ever, unless somebody says otherwise. What goes, goes by whole days, oldest first: a day is
//! a partition of every large table, and dropping it costs nothing and leaves no holes.

use super::{Error, Store};
use chrono::{Days, NaiveDate};
use sqlx::postgres::PgConnection;
use sqlx::{Connection, PgPool};

/// Which runs are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// Runs that began more whole days ago, in UTC, go; `None` keeps them.
    pub days: Option<u32>,
    /// The oldest days go while runs take more bytes than this; `None` lets them. Today stays in any case.
    pub bytes: Option<u64>,
}

impl Store {
    /// From now on keeps only these runs: looked after within seconds, and every hour.
    pub fn retain(&self, retention: Retention) {
        self.inner.retention.send_replace(retention);
    }

    /// Removes now what is not to be kept; returns the days that are gone, oldest first, each with its number of runs.
    /// A day with a run that is still running stays for now.
    ///
    /// # Errors
    /// The database failed, or a day was in use for too long; days before it are gone.
    pub async fn prune(&self, retention: Retention, today: NaiveDate) -> Result<Vec<(NaiveDate, u64)>, Error> {
        prune(&self.inner.pool, retention, today).await
    }
}

/// As [`Store::prune`].
pub async fn prune(pool: &PgPool, retention: Retention, today: NaiveDate) -> Result<Vec<(NaiveDate, u64)>, Error> {
    let mut connection = pool.acquire().await?;
    let mut doomed = Vec::new();
    if let Some(first) = retention.days.and_then(|days| today.checked_sub_days(Days::new(days.into()))) {
        doomed = days_before(&mut connection, first).await?;
    }
    if let Some(most) = retention.bytes {
        let mut days = day_sizes(&mut connection).await?;
        days.retain(|(day, _)| !doomed.contains(day));
        let mut total: u64 = days.iter().map(|(_, bytes)| bytes).sum();
        for (day, bytes) in days.into_iter().filter(|(day, _)| *day < today) {
            if total <= most {
                break;
            }
            doomed.push(day);
            total -= bytes;
        }
    }
    let mut gone = Vec::new();
    for day in doomed {
        if let Some(runs) = drop_day(&mut connection, day).await? {
            gone.push((day, runs.unsigned_abs()));
        }
    }
    if !gone.is_empty() {
        let _: i64 = sqlx::query_scalar("select drop_unused_mod_versions()").fetch_one(&mut *connection).await?;
    }
    Ok(gone)
}

/// Days with a partition, with runs that lie in the default partitions, or with responses.
async fn days_before(connection: &mut PgConnection, first: NaiveDate) -> Result<Vec<NaiveDate>, sqlx::Error> {
    sqlx::query_scalar(
        "select day from partition_days where day < $1
        union
        select (to_timestamp(('x' || left(replace(run_id::text, '-', ''), 12))::bit(48)::bigint / 1000) at time zone 'utc')::date
        from (select run_id from runs union all select run_id from responses) began where run_id < first_run_id($1)
        order by 1",
    )
    .bind(first)
    .fetch_all(connection)
    .await
}

async fn day_sizes(connection: &mut PgConnection) -> Result<Vec<(NaiveDate, u64)>, sqlx::Error> {
    let days: Vec<(NaiveDate, i64)> =
        sqlx::query_as("select day, bytes from partition_days order by day").fetch_all(connection).await?;
    Ok(days.into_iter().map(|(day, bytes)| (day, bytes.unsigned_abs())).collect())
}

/// Returns how many runs are gone; `None` when one of them is running.
async fn drop_day(connection: &mut PgConnection, day: NaiveDate) -> Result<Option<i64>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    // whoever writes waits behind us while we wait: not for long
    sqlx::query("set local lock_timeout = '3s'").execute(&mut *transaction).await?;
    let runs = sqlx::query_scalar("select drop_day($1)").bind(day).fetch_one(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(runs)
}
