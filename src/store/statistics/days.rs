//! Decides which days and hours are counted, and counts them.
//!
//! Servers of earlier versions leave counts with three differences, which are handled here:
//! - A day can be counted without the durations of its mod calls, see [`CallCount`].
//! - A day can be counted without its sums, see [`is_summed`].
//! - The counts of an hour can be replaced without its ids in `counted_runs`, see [`UncountedRuns::read`].

use super::calls;
use super::midnight;
use super::run_counts;
use crate::store::error::is_transient;
use crate::store::pool::{PgConnection, PgPool, Transaction};
use crate::store::uuid_v7::first_id_at;
use chrono::{DateTime, Days, NaiveDate, TimeDelta, Utc};
use std::collections::HashSet;
use std::fmt::Display;
use std::time::Duration;
use tokio::time::sleep;
use uuid::Uuid;

/// Number of past days whose runs are counted again after runs were stored late.
const RECOUNTED_DAYS: u64 = 7;

/// Minimum age of an hour that is counted before its day. Most runs of the hour have ended then.
const HOUR_DELAY: TimeDelta = TimeDelta::minutes(10);
/// Minimum runs of such an hour. Fewer runs are counted quickly when statistics are read.
const MIN_HOUR_RUNS: usize = 200;
/// Delay before the next attempt to count while a server of an earlier version counts.
const COUNT_LOCK_DELAY: Duration = Duration::from_millis(200);

/// Returns the first day with runs or with counts.
pub(super) async fn first_day(connection: &mut PgConnection) -> Result<Option<NaiveDate>, sqlx::Error> {
    let stored: Option<NaiveDate> = sqlx::query_scalar("select run_day(run_id) from runs order by run_id limit 1")
        .fetch_optional(&mut *connection)
        .await?;
    let counted: Option<NaiveDate> =
        sqlx::query_scalar("select min(day) from run_stats_days where runs > 0").fetch_one(connection).await?;
    Ok(stored.into_iter().chain(counted).min())
}

/// A time span: its first instant, and the first one after it.
pub(super) type TimeSpan = (DateTime<Utc>, DateTime<Utc>);

/// Returns the spans from `first` to `today` whose days and hours are not counted.
pub(super) fn uncounted_spans(
    first: NaiveDate,
    today: NaiveDate,
    days: &HashSet<NaiveDate>,
    hours: &HashSet<DateTime<Utc>>,
) -> Vec<TimeSpan> {
    // Ids contain times from the clocks of servers, which may be ahead.
    let days = first.iter_days().take_while(|day| *day <= today + Days::new(1)).filter(|day| !days.contains(day));
    join_hours(days.flat_map(hours_of).filter(|hour| !hours.contains(hour)))
}

/// Returns the spans of ascending hours.
fn join_hours(hours: impl Iterator<Item = DateTime<Utc>>) -> Vec<TimeSpan> {
    let mut spans: Vec<TimeSpan> = Vec::new();
    for hour in hours {
        let until = hour + TimeDelta::hours(1);
        match spans.last_mut() {
            Some((_, last)) if *last == hour => *last = until,
            _ => spans.push((hour, until)),
        }
    }
    spans
}

fn hours_of(day: NaiveDate) -> impl Iterator<Item = DateTime<Utc>> {
    (0..24).map(move |hour| midnight(day) + TimeDelta::hours(hour))
}

/// The past hours that are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HourCount {
    /// Hours that are not counted.
    New,
    /// All hours: runs may have been added to those that are counted.
    All,
}

/// Counts the past hours of today and of yesterday that have many runs, if their day is not counted.
pub(in crate::store) async fn count_hours(
    pool: &PgPool,
    now: DateTime<Utc>,
    hours: HourCount,
) -> Result<(), sqlx::Error> {
    let yesterday = now.date_naive() - Days::new(1);
    let mut connection = pool.acquire().await?;
    let days: Vec<NaiveDate> = sqlx::query_scalar("select day from run_stats_days where day >= $1")
        .bind(yesterday)
        .fetch_all(&mut connection)
        .await?;
    let counted: HashSet<DateTime<Utc>> =
        sqlx::query_scalar("select hour from run_stats_hours").fetch_all(&mut connection).await?.into_iter().collect();
    drop(connection);
    let is_past = |hour: &DateTime<Utc>| *hour + TimeDelta::hours(1) + HOUR_DELAY <= now;
    let mut result = Ok(());
    for day in [now.date_naive(), yesterday].into_iter().filter(|day| !days.contains(day)) {
        for hour in hours_of(day).filter(is_past) {
            let is_counted = counted.contains(&hour);
            if !is_counted || hours == HourCount::All {
                let count = count_hour(pool, hour, is_counted).await;
                keep_first_error(&mut result, &hour, count)?;
            }
        }
    }
    result
}

/// Logs the error of a count and keeps the first one, so that the other times are counted. Returns a transient error, because
/// the next counts would fail, too.
fn keep_first_error(
    first: &mut Result<(), sqlx::Error>,
    time: &dyn Display,
    count: Result<(), sqlx::Error>,
) -> Result<(), sqlx::Error> {
    let Err(error) = count else { return Ok(()) };
    if is_transient(&error) {
        return Err(error);
    }
    tracing::warn!(%time, %error, "cannot count the runs of an hour or day");
    if first.is_ok() {
        *first = Err(error);
    }
    Ok(())
}

/// Counts the runs of an hour that are not counted, unless one still runs, or the hour is not counted and has few runs.
async fn count_hour(pool: &PgPool, hour: DateTime<Utc>, is_counted: bool) -> Result<(), sqlx::Error> {
    let span = hour_span(hour);
    let mut transaction = begin_count(pool).await?;
    let is_complete: bool = sqlx::query_scalar(
        "select not exists (select 1 from runs where run_id >= $1 and run_id < $2 and deletion is null
            and (status = 'running' or mod_call_names is null))",
    )
    .bind(first_id_at(span.0))
    .bind(first_id_at(span.1))
    .fetch_one(&mut *transaction)
    .await?;
    if !is_complete {
        return Ok(());
    }
    let uncounted = UncountedRuns::read(&mut transaction, hour).await?;
    if uncounted.run_ids.len() < if is_counted { 1 } else { MIN_HOUR_RUNS } {
        return Ok(());
    }
    uncounted.count(&mut transaction).await?;
    calls::add(&mut transaction, span, &uncounted.run_ids).await?;
    sqlx::query(
        "insert into run_stats_hours (hour, runs) values ($1, $2) on conflict (hour) do update set runs = excluded.runs",
    )
    .bind(hour)
    .bind(counted_runs(&mut transaction, span).await?)
    .execute(&mut *transaction)
    .await?;
    sum_day(&mut transaction, hour.date_naive()).await?;
    transaction.commit().await
}

/// Begins a transaction that counts runs. Its statements see the same runs: one that is deleted meanwhile is counted with its
/// id. All servers count the same times, so only one of them may count at a time.
async fn begin_count(pool: &PgPool) -> Result<Transaction, sqlx::Error> {
    loop {
        let mut transaction = pool.begin_with("begin isolation level repeatable read").await?;
        // Unlike an advisory lock, it is taken before the snapshot, which then contains the counts of the other servers. Its
        // mode permits the inserts of servers of earlier versions, which do not take it.
        sqlx::query("lock table run_stats_days in share update exclusive mode").execute(&mut *transaction).await?;
        // The lock of servers of earlier versions. A snapshot from before a wait for it would lack their counts.
        let is_locked: bool =
            sqlx::query_scalar("select pg_try_advisory_xact_lock(7237120550118)").fetch_one(&mut *transaction).await?;
        if is_locked {
            return Ok(transaction);
        }
        transaction.rollback().await?;
        sleep(COUNT_LOCK_DELAY).await;
    }
}

/// Sums the counts of the hours of a day.
async fn sum_day(connection: &mut PgConnection, day: NaiveDate) -> Result<(), sqlx::Error> {
    sqlx::query("select sum_statistics($1)").bind(day).execute(connection).await?;
    Ok(())
}

/// Returns true if the counts of a day are summed, or if it has none.
async fn is_summed(connection: &mut PgConnection, midnight: DateTime<Utc>) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(
        "select exists (select from run_stats_by_day where hour = $1)
            or not exists (select from run_stats where hour >= $1 and hour < $1 + interval '1 day')",
    )
    .bind(midnight)
    .fetch_one(connection)
    .await
}

/// Counts the runs of past days, newest first.
pub(in crate::store) async fn count_days(pool: &PgPool, today: NaiveDate) -> Result<(), sqlx::Error> {
    let mut connection = pool.acquire().await?;
    let Some(first) = first_day(&mut connection).await? else { return Ok(()) };
    let first_recounted = today - Days::new(RECOUNTED_DAYS);
    let counted: Vec<NaiveDate> = sqlx::query_scalar("select day from run_stats_days where day < $1 and has_mod_calls")
        .bind(first_recounted)
        .fetch_all(&mut connection)
        .await?;
    sqlx::query("delete from counted_runs where hour < $1")
        .bind(midnight(first_recounted))
        .execute(&mut connection)
        .await?;
    drop(connection);
    let days: Vec<NaiveDate> =
        first.iter_days().take_while(|day| *day < today).filter(|day| !counted.contains(day)).collect();
    let mut result = Ok(());
    for day in days.into_iter().rev() {
        let count = count_day(pool, day).await;
        keep_first_error(&mut result, &day, count)?;
    }
    result
}

/// The ended runs of an hour that are not counted.
struct UncountedRuns {
    hour: DateTime<Utc>,
    run_ids: Vec<Uuid>,
    /// True if the stored counts of the hour are replaced, false if these runs are added.
    replaces: bool,
}

impl UncountedRuns {
    async fn read(connection: &mut PgConnection, hour: DateTime<Utc>) -> Result<Self, sqlx::Error> {
        let span = hour_span(hour);
        let mut run_ids: Vec<Uuid> = sqlx::query_scalar(
            "select run_id from runs where run_id >= $1 and run_id < $2 and status <> 'running' and deletion is null",
        )
        .bind(first_id_at(span.0))
        .bind(first_id_at(span.1))
        .fetch_all(&mut *connection)
        .await?;
        let counted: Option<Vec<Uuid>> = sqlx::query_scalar("select run_ids from counted_runs where hour = $1")
            .bind(hour)
            .fetch_optional(&mut *connection)
            .await?;
        let stored = counted_runs(connection, span).await?;
        // Otherwise an earlier version has replaced the counts, so the ids are those of other runs.
        let counted = counted.filter(|run_ids| run_ids.len() as i64 == stored);
        let replaces = counted.is_none();
        if let Some(counted) = counted {
            let counted: HashSet<Uuid> = counted.into_iter().collect();
            run_ids.retain(|run_id| !counted.contains(run_id));
        } else if run_ids.len() as i64 <= stored {
            // Without the ids, the counts are replaced only if runs were added, more than were deleted.
            run_ids.clear();
        }
        Ok(Self { hour, run_ids, replaces })
    }

    /// Counts these runs without the durations of their mod calls.
    async fn count(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let span = hour_span(self.hour);
        if self.replaces {
            for delete in [
                "delete from run_stats where hour = $1",
                "delete from first_token_stats where hour = $1",
                "delete from mod_call_stats where hour = $1",
            ] {
                sqlx::query(delete).bind(self.hour).execute(&mut *connection).await?;
            }
        }
        run_counts::add(connection, span, &self.run_ids).await?;
        sqlx::query(
            "insert into counted_runs (hour, run_ids) values ($1, $2) on conflict (hour) do update
            set run_ids = case when $3 then excluded.run_ids else counted_runs.run_ids || excluded.run_ids end",
        )
        .bind(self.hour)
        .bind(&self.run_ids)
        .bind(self.replaces)
        .execute(connection)
        .await?;
        Ok(())
    }
}

fn hour_span(hour: DateTime<Utc>) -> TimeSpan {
    (hour, hour + TimeDelta::hours(1))
}

/// Returns the number of runs in the stored counts of a span.
async fn counted_runs(connection: &mut PgConnection, span: TimeSpan) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(
        "select coalesce(sum(runs), 0)::bigint from run_stats where hour >= $1 and hour < $2 and mod = ''",
    )
    .bind(span.0)
    .bind(span.1)
    .fetch_one(connection)
    .await
}

/// The count of the durations of mod calls when a day is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallCount {
    /// Durations in uncounted runs are added to the stored sums.
    Add,
    /// The whole day is summed: it was counted without durations, by an earlier version or as [`CallCount::Omit`].
    Replace,
    /// No sums are stored, because an earlier version recorded some of the runs and they are not measured yet.
    Omit,
}

/// Counts the runs of a day that are not counted, and the durations of their mod calls. The counts of deleted runs stay.
async fn count_day(pool: &PgPool, day: NaiveDate) -> Result<(), sqlx::Error> {
    let mut transaction = begin_count(pool).await?;
    let day_span = (midnight(day), midnight(day + Days::new(1)));
    let has_mod_calls: Option<bool> = sqlx::query_scalar("select has_mod_calls from run_stats_days where day = $1")
        .bind(day)
        .fetch_optional(&mut *transaction)
        .await?;
    let is_measured = calls::is_measured(&mut transaction, day_span).await?;
    let call_count = match has_mod_calls {
        _ if !is_measured => CallCount::Omit,
        Some(false) => CallCount::Replace,
        Some(true) | None => CallCount::Add,
    };
    let mut is_counted = has_mod_calls.is_some() && call_count != CallCount::Replace;
    for hour in hours_of(day) {
        let uncounted = UncountedRuns::read(&mut transaction, hour).await?;
        if !uncounted.run_ids.is_empty() {
            uncounted.count(&mut transaction).await?;
            if call_count == CallCount::Add {
                calls::add(&mut transaction, hour_span(hour), &uncounted.run_ids).await?;
            }
            is_counted = false;
        }
    }
    if is_counted {
        if !is_summed(&mut transaction, day_span.0).await? {
            sum_day(&mut transaction, day).await?;
        }
        return transaction.commit().await;
    }
    match call_count {
        CallCount::Add => {}
        CallCount::Replace => calls::replace(&mut transaction, day_span).await?,
        CallCount::Omit => calls::delete(&mut transaction, day_span).await?,
    }
    sum_day(&mut transaction, day).await?;
    let delete = "delete from run_stats_hours where hour >= $1 and hour < $2";
    sqlx::query(delete).bind(day_span.0).bind(day_span.1).execute(&mut *transaction).await?;
    sqlx::query(
        "insert into run_stats_days (day, runs, has_mod_calls) values ($1, $2, $3)
        on conflict (day) do update set runs = excluded.runs, has_mod_calls = excluded.has_mod_calls",
    )
    .bind(day)
    .bind(counted_runs(&mut transaction, day_span).await?)
    .bind(call_count != CallCount::Omit)
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await
}

#[cfg(test)]
mod tests;
