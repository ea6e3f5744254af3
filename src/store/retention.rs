//! Removal of old runs by whole time spans, oldest first. A day, or a month on Citus, is a partition of every large table,
//! and dropping a partition is fast and frees its disk space.

use super::pool::{PgConnection, PgPool};
use super::{Error, Store, images, removed_runs};
use chrono::{DateTime, Days, NaiveDate};
use std::collections::HashMap;
use uuid::Uuid;

/// Limits of age and size for stored runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// Maximum age of runs in whole UTC days; `None` for no limit.
    pub days: Option<u32>,
    /// Maximum bytes of all dated partitions and images; `None` for no limit. Beyond this size, the oldest partitions are
    /// dropped, except today's. The other tables do not count, because their size does not decrease when runs are removed.
    pub bytes: Option<u64>,
}

impl Store {
    /// Changes the retention. It is applied within seconds and then every hour.
    pub fn set_retention(&self, retention: Retention) {
        self.inner.retention.send_replace(retention);
    }

    /// Removes all runs beyond the retention now. Returns the first day and the number of runs of each removed time span,
    /// oldest first. A span with a running run is kept until that run has ended.
    ///
    /// # Errors
    /// The database failed, or a day was locked for too long. Earlier days stay removed.
    pub async fn prune(&self, retention: Retention, today: NaiveDate) -> Result<Vec<(NaiveDate, u64)>, Error> {
        prune(&self.inner.pool, retention, today).await
    }
}

/// Removes all runs beyond the retention, and the old entries of removed runs; see [`Store::prune`].
pub async fn prune(pool: &PgPool, retention: Retention, today: NaiveDate) -> Result<Vec<(NaiveDate, u64)>, Error> {
    let mut connection = pool.acquire().await?;
    let mut spans = spans(&mut connection).await?;
    let mut expired = Vec::new();
    let first = retention.days.and_then(|days| today.checked_sub_days(Days::new(days.into())));
    // Ids contain times since 1970.
    if let Some(first) = first.filter(|first| *first > DateTime::UNIX_EPOCH.date_naive()) {
        let (old, kept): (Vec<Span>, Vec<Span>) = spans.into_iter().partition(|span| span.until <= first);
        let days = other_days_before(&mut connection, first, &old).await?;
        (expired, spans) = (old, kept);
        expired.extend(days);
        expired.iter_mut().for_each(|span| span.is_old = true);
        expired.sort_unstable_by_key(|span| span.first);
    }
    if let Some(max_bytes) = retention.bytes {
        let mut total: u64 = spans.iter().map(|span| span.bytes).sum();
        for span in spans.into_iter().filter(|span| span.until <= today) {
            if total <= max_bytes {
                break;
            }
            total -= span.bytes;
            expired.push(span);
        }
    }
    let mut removed = Vec::new();
    let mut end = None;
    for span in expired {
        if let Some(runs) = drop_days(pool, span).await? {
            removed.push((span.first, runs.unsigned_abs()));
            end = end.max(Some(span.until));
        }
    }
    if let Some(end) = end {
        remove_images(pool, end).await?;
        let _: i64 = sqlx::query_scalar("select drop_unused_mod_versions()").fetch_one(&mut connection).await?;
    }
    removed_runs::delete_old_entries(&mut connection, today).await?;
    Ok(removed)
}

/// The days of a partition.
#[derive(Clone, Copy)]
struct Span {
    first: NaiveDate,
    /// The day after the last one.
    until: NaiveDate,
    bytes: u64,
    /// True if the runs are older than the retention permits; false if they are removed because of their size.
    is_old: bool,
}

/// Returns the spans of all partitions, oldest first.
async fn spans(connection: &mut PgConnection) -> Result<Vec<Span>, sqlx::Error> {
    let spans: Vec<(NaiveDate, NaiveDate, i64)> =
        sqlx::query_as("select day, next_day, bytes from partition_days order by day")
            .fetch_all(&mut *connection)
            .await?;
    let images = image_bytes(connection).await?;
    let span = |(first, until, bytes): (NaiveDate, NaiveDate, i64)| {
        let images = images.iter().filter(|(day, _)| (first..until).contains(*day));
        Span { first, until, bytes: bytes.unsigned_abs() + images.map(|(_, bytes)| bytes).sum::<u64>(), is_old: false }
    };
    Ok(spans.into_iter().map(span).collect())
}

/// Returns the bytes of image files by day. An image is removed with the last run that refers to it, so it counts on the
/// day of that run.
async fn image_bytes(connection: &mut PgConnection) -> Result<HashMap<NaiveDate, u64>, sqlx::Error> {
    let days: Vec<(NaiveDate, i64)> = sqlx::query_as(
        "select run_day(last.run_id::uuid), sum(octet_length(i.data))::bigint
        from images i cross join lateral (
            select max(r.run_id::text) as run_id from run_images r where r.owner = i.owner and r.sha256 = i.sha256
        ) last
        where last.run_id is not null group by 1",
    )
    .fetch_all(connection)
    .await?;
    Ok(days.into_iter().map(|(day, bytes)| (day, bytes.unsigned_abs())).collect())
}

/// Returns the days with runs or responses outside these spans. Their rows are in the default partitions, or in a partition
/// that also has newer rows.
async fn other_days_before(
    connection: &mut PgConnection,
    first: NaiveDate,
    spans: &[Span],
) -> Result<Vec<Span>, sqlx::Error> {
    let days: Vec<NaiveDate> = sqlx::query_scalar(
        "select distinct run_day(run_id) from (select run_id from runs union all select run_id from responses) began
        where run_id < first_run_id($1)",
    )
    .bind(first)
    .fetch_all(connection)
    .await?;
    let is_other = |day: &NaiveDate| !spans.iter().any(|span| (span.first..span.until).contains(day));
    let span = |day| Span { first: day, until: day + Days::new(1), bytes: 0, is_old: false };
    Ok(days.into_iter().filter(is_other).map(span).collect())
}

/// Removes the runs of a span. Returns their number, or `None` if one of them is running.
async fn drop_days(pool: &PgPool, span: Span) -> Result<Option<i64>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    // Writers wait while this transaction waits for its locks, so the wait is short.
    sqlx::query("set local lock_timeout = '3s'").execute(&mut *transaction).await?;
    let lock = sqlx::query("select lock_days($1, $2)").bind(span.first).bind(span.until);
    lock.execute(&mut *transaction).await?;
    let runs: Option<i64> = sqlx::query_scalar("select drop_days($1, $2)")
        .bind(span.first)
        .bind(span.until)
        .fetch_one(&mut *transaction)
        .await?;
    // A server may still have runs of a day that is removed because of its size.
    if span.is_old && runs.is_some_and(|runs| runs > 0) {
        removed_runs::add_days(&mut transaction, span.first, span.until).await?;
    }
    transaction.commit().await?;
    Ok(runs)
}

/// Removes the images of the removed runs before a day, up to the oldest stored run. Uses a transaction of its own,
/// because removing large files takes long, and removing days locks tables against writers.
async fn remove_images(pool: &PgPool, end: NaiveDate) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let end: Uuid = sqlx::query_scalar("select first_run_id($1)").bind(end).fetch_one(&mut *transaction).await?;
    let stored: Option<Uuid> =
        sqlx::query_scalar("select run_id from runs order by run_id limit 1").fetch_optional(&mut *transaction).await?;
    let end = stored.map_or(end, |stored| stored.min(end));
    images::remove(&mut transaction, Uuid::nil(), Uuid::from_u128(end.as_u128().saturating_sub(1))).await?;
    transaction.commit().await
}
