//! Decides which days and hours are counted, and counts them.

use super::calls;
use super::midnight;
use super::run_counts::count_runs;
use crate::store::error::is_transient;
use crate::store::pool::{PgConnection, PgPool};
use chrono::{DateTime, Days, NaiveDate, TimeDelta, Utc};
use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use uuid::Uuid;

/// Number of past days whose runs are counted again after runs were stored late.
const RECOUNTED_DAYS: u64 = 7;

/// Minimum age of an hour that is counted before its day. Most runs of the hour have ended then.
const HOUR_DELAY: TimeDelta = TimeDelta::minutes(10);
/// Minimum runs of such an hour. Fewer runs are counted quickly when statistics are read.
const MIN_HOUR_RUNS: i64 = 200;

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

/// Returns the first id of a run at this time.
pub(super) fn first_run_id(time: DateTime<Utc>) -> Uuid {
    Uuid::from_u128(u128::from(u64::try_from(time.timestamp_millis()).unwrap_or(0)) << 80)
}

/// Counts the past hours of today and of yesterday that have many runs, if their day is not counted. With `again`, counts
/// hours again to which runs were added.
pub(in crate::store) async fn count_hours(pool: &PgPool, now: DateTime<Utc>, again: bool) -> Result<(), sqlx::Error> {
    let yesterday = now.date_naive() - Days::new(1);
    let mut connection = pool.acquire().await?;
    let days: Vec<NaiveDate> = sqlx::query_scalar("select day from run_stats_days where day >= $1")
        .bind(yesterday)
        .fetch_all(&mut connection)
        .await?;
    let counted: HashMap<DateTime<Utc>, i64> = sqlx::query_as("select hour, runs from run_stats_hours")
        .fetch_all(&mut connection)
        .await?
        .into_iter()
        .collect();
    drop(connection);
    let is_past = |hour: &DateTime<Utc>| *hour + TimeDelta::hours(1) + HOUR_DELAY <= now;
    let mut result = Ok(());
    for day in [now.date_naive(), yesterday].into_iter().filter(|day| !days.contains(day)) {
        for hour in hours_of(day).filter(is_past) {
            let before = counted.get(&hour).copied();
            if before.is_none() || again {
                let count = count_hour(pool, hour, before.unwrap_or(0)).await;
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

/// Counts the runs of an hour, unless it has few, not more than before, or one that still runs.
async fn count_hour(pool: &PgPool, hour: DateTime<Utc>, before: i64) -> Result<(), sqlx::Error> {
    let span = (hour, hour + TimeDelta::hours(1));
    let mut transaction = pool.begin().await?;
    lock(&mut transaction).await?;
    let (ended, others): (i64, i64) = sqlx::query_as(
        "select count(*) filter (where status <> 'running' and mod_call_names is not null),
            count(*) filter (where status = 'running' or mod_call_names is null)
        from runs where run_id >= $1 and run_id < $2 and deletion is null",
    )
    .bind(first_run_id(span.0))
    .bind(first_run_id(span.1))
    .fetch_one(&mut *transaction)
    .await?;
    if ended < MIN_HOUR_RUNS || ended <= before || others > 0 {
        return Ok(());
    }
    count_runs(&mut transaction, span).await?;
    calls::store(&mut transaction, span, true).await?;
    sqlx::query(
        "insert into run_stats_hours (hour, runs) values ($1, $2) on conflict (hour) do update set runs = excluded.runs",
    )
    .bind(hour)
    .bind(ended)
    .execute(&mut *transaction)
    .await?;
    sum_day(&mut transaction, hour.date_naive()).await?;
    transaction.commit().await
}

/// Locks the counting. All servers count the same times, so only one of them may count at a time.
async fn lock(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query("select pg_advisory_xact_lock(7237120550118)").execute(connection).await?;
    Ok(())
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
    let counted: Vec<NaiveDate> = sqlx::query_scalar("select day from run_stats_days where day < $1 and has_mod_calls")
        .bind(today - Days::new(RECOUNTED_DAYS))
        .fetch_all(&mut connection)
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

/// The runs of an hour.
struct HourRuns {
    hour: DateTime<Utc>,
    /// Ended runs that exist.
    ended: i64,
    /// Runs in the stored counts. Some may have been deleted since they were counted.
    counted: i64,
}

impl HourRuns {
    /// Returns true if runs were added to the counted ones.
    fn has_added_runs(&self) -> bool {
        self.ended > self.counted
    }
}

/// Returns the runs of each hour of a day.
async fn hour_runs(connection: &mut PgConnection, day: NaiveDate) -> Result<Vec<HourRuns>, sqlx::Error> {
    let span = (midnight(day), midnight(day + Days::new(1)));
    let first_ids: Vec<Uuid> = hours_of(day).map(first_run_id).collect();
    let ended: HashMap<i32, i64> = sqlx::query_as(
        "select width_bucket(run_id, $1::uuid[]), count(*) from runs
        where run_id >= $2 and run_id < $3 and status <> 'running' and deletion is null group by 1",
    )
    .bind(first_ids)
    .bind(first_run_id(span.0))
    .bind(first_run_id(span.1))
    .fetch_all(&mut *connection)
    .await?
    .into_iter()
    .collect();
    let counted: HashMap<DateTime<Utc>, i64> = sqlx::query_as(
        "select hour, sum(runs)::bigint from run_stats where hour >= $1 and hour < $2 and mod = '' group by hour",
    )
    .bind(span.0)
    .bind(span.1)
    .fetch_all(connection)
    .await?
    .into_iter()
    .collect();
    // The first bucket is 1.
    let hours = hours_of(day).zip(1..).map(|(hour, bucket)| HourRuns {
        hour,
        ended: ended.get(&bucket).copied().unwrap_or(0),
        counted: counted.get(&hour).copied().unwrap_or(0),
    });
    Ok(hours.collect())
}

/// Counts the runs of a day and the durations of their mod calls, except those of the hours of which as many runs are already
/// counted: the counts of deleted runs stay.
async fn count_day(pool: &PgPool, day: NaiveDate) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    lock(&mut transaction).await?;
    let day_span = (midnight(day), midnight(day + Days::new(1)));
    let hours = hour_runs(&mut transaction, day).await?;
    let has_mod_calls: Option<bool> = sqlx::query_scalar("select has_mod_calls from run_stats_days where day = $1")
        .bind(day)
        .fetch_optional(&mut *transaction)
        .await?;
    let is_measured = calls::is_measured(&mut transaction, day_span).await?;
    let is_counted = has_mod_calls.is_some_and(|has_mod_calls| has_mod_calls || !is_measured);
    if is_counted && !hours.iter().any(HourRuns::has_added_runs) {
        // A server of an earlier version counts a day without its sums.
        if !is_summed(&mut transaction, day_span.0).await? {
            sum_day(&mut transaction, day).await?;
        }
        return transaction.commit().await;
    }
    // Hours without counts are included, so that there are few spans.
    let uncounted = hours.iter().filter(|hour| hour.counted == 0 || hour.has_added_runs());
    let uncounted = join_hours(uncounted.map(|hour| hour.hour));
    for span in &uncounted {
        count_runs(&mut transaction, *span).await?;
    }
    if is_measured && has_mod_calls != Some(false) {
        for span in uncounted {
            calls::store(&mut transaction, span, true).await?;
        }
    } else {
        // An earlier version counted the day without its mod calls, or some runs are not measured.
        calls::store(&mut transaction, day_span, is_measured).await?;
    }
    sum_day(&mut transaction, day).await?;
    let delete = "delete from run_stats_hours where hour >= $1 and hour < $2";
    sqlx::query(delete).bind(day_span.0).bind(day_span.1).execute(&mut *transaction).await?;
    sqlx::query(
        "insert into run_stats_days (day, runs, has_mod_calls) values ($1, $2, $3)
        on conflict (day) do update set runs = excluded.runs, has_mod_calls = excluded.has_mod_calls",
    )
    .bind(day)
    .bind(hours.iter().map(|hour| hour.ended.max(hour.counted)).sum::<i64>())
    .bind(is_measured)
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await
}

#[cfg(test)]
mod tests {
    use super::uncounted_spans;
    use crate::store::statistics::midnight;
    use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
    use std::collections::HashSet;

    fn day(day: u32) -> NaiveDate {
        NaiveDate::from_ymd_opt(2026, 3, day).unwrap()
    }

    fn hour(on: u32, hour: i64) -> DateTime<Utc> {
        midnight(day(on)) + TimeDelta::hours(hour)
    }

    #[test]
    fn spans_are_the_times_that_are_not_counted() {
        let spans = |first, today, days: &[u32], hours: &[DateTime<Utc>]| {
            let days: HashSet<NaiveDate> = days.iter().copied().map(day).collect();
            uncounted_spans(day(first), day(today), &days, &hours.iter().copied().collect())
        };
        assert_eq!(spans(4, 7, &[5], &[]), [(hour(4, 0), hour(5, 0)), (hour(6, 0), hour(9, 0))]);
        assert_eq!(spans(4, 5, &[4, 5, 6], &[]), []);
        let expected = [(hour(5, 0), hour(5, 3)), (hour(5, 5), hour(6, 23))];
        assert_eq!(spans(4, 5, &[4], &[hour(5, 3), hour(5, 4), hour(6, 23)]), expected);
    }
}
