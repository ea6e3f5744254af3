//! Counting of runs by day, and reading of counted days.

use super::calls;
use super::groups::{BucketRow, CountRow};
use super::{Selection, midnight};
use crate::store::pool::{PgConnection, PgPool};
use chrono::{Days, NaiveDate};

/// Number of past days whose runs are counted again after runs were stored late.
const RECOUNTED_DAYS: u64 = 7;

/// SQL of the ended runs from the day `$from` to the day before `$until`, each once with an empty mod and once per mod.
macro_rules! ended {
    ($from:literal, $until:literal) => {
        concat!("
    select distinct run_id, unnest(array[''] || mods) as mod, coalesce(owner, '') as owner, coalesce(model, '') as model,
        to_timestamp(('x' || left(replace(run_id::text, '-', ''), 12))::bit(48)::bigint / 3600000 * 3600) as hour,
        status, coalesce(finish_reason, '') as reason, prompt_tokens, completion_tokens, cached_tokens,
        coalesce(generation_us, 0) as generation_us, first_token_us, backtracked, forced, actions, errors
    from runs where run_id >= first_run_id(", $from, ") and run_id < first_run_id(", $until, ")
        and status <> 'running' and deletion is null")
    };
}

/// SQL of the columns of `run_stats`, computed from [`ended`].
macro_rules! counted {
    () => {
        "
    count(*) as runs, count(*) filter (where status = 'failed') as failed,
    count(*) filter (where status = 'cancelled') as cancelled,
    count(*) filter (where status = 'interrupted') as interrupted,
    count(*) filter (where reason = 'stop') as finish_stop,
    count(*) filter (where reason = 'length') as finish_length,
    count(*) filter (where reason = 'tool_calls') as finish_tool_calls,
    sum(prompt_tokens)::bigint as prompt_tokens, sum(completion_tokens)::bigint as completion_tokens,
    sum(cached_tokens)::bigint as cached_tokens,
    coalesce(sum(completion_tokens) filter (where generation_us > 0), 0)::bigint as timed_tokens,
    sum(generation_us)::bigint as generation_us, sum(backtracked)::bigint as backtracked,
    sum(forced)::bigint as forced, sum(actions)::bigint as actions, sum(errors)::bigint as errors"
    };
}

/// SQL of the sums of the columns of `run_stats`.
macro_rules! summed {
    () => {
        "
    sum(runs)::bigint as runs, sum(failed)::bigint as failed, sum(cancelled)::bigint as cancelled,
    sum(interrupted)::bigint as interrupted, sum(finish_stop)::bigint as finish_stop,
    sum(finish_length)::bigint as finish_length, sum(finish_tool_calls)::bigint as finish_tool_calls,
    sum(prompt_tokens)::bigint as prompt_tokens, sum(completion_tokens)::bigint as completion_tokens,
    sum(cached_tokens)::bigint as cached_tokens, sum(timed_tokens)::bigint as timed_tokens,
    sum(generation_us)::bigint as generation_us, sum(backtracked)::bigint as backtracked,
    sum(forced)::bigint as forced, sum(actions)::bigint as actions, sum(errors)::bigint as errors"
    };
}

/// SQL of a run's bucket in the histogram of first tokens.
macro_rules! bucket {
    () => {
        "floor(4 * ln(first_token_us) / ln(2))::smallint"
    };
}

/// SQL of the conditions on owner and model.
macro_rules! selected {
    () => {
        "($1::text[] is null or owner = any($1)) and ($2::text is null or model = $2)"
    };
}

/// Reads the stored counts from a day on.
pub(super) async fn read_counted(
    connection: &mut PgConnection,
    selection: &Selection<'_>,
    first: NaiveDate,
) -> Result<(Vec<CountRow>, Vec<BucketRow>), sqlx::Error> {
    let counts = concat!(
        "select date_trunc($3, hour, 'utc') as step, model, mod, ",
        summed!(),
        " from run_stats where hour >= ($4::timestamp at time zone 'utc') and hour < ($5::timestamp at time zone 'utc') and ",
        selected!(),
        " group by step, model, mod"
    );
    let buckets = concat!(
        "select date_trunc($3, hour, 'utc') as step, model, mod, bucket, sum(runs)::bigint as runs from first_token_stats
        where hour >= ($4::timestamp at time zone 'utc') and hour < ($5::timestamp at time zone 'utc') and ",
        selected!(),
        " group by step, model, mod, bucket"
    );
    let span = (first, NaiveDate::from_ymd_opt(9999, 1, 1).unwrap_or(NaiveDate::MAX));
    Ok((selection.fetch(connection, counts, span).await?, selection.fetch(connection, buckets, span).await?))
}

/// Counts the runs of a span of days that are not counted.
pub(super) async fn count(
    connection: &mut PgConnection,
    selection: &Selection<'_>,
    span: (NaiveDate, NaiveDate),
) -> Result<(Vec<CountRow>, Vec<BucketRow>), sqlx::Error> {
    let counts = concat!(
        "select date_trunc($3, hour, 'utc') as step, model, mod, ",
        counted!(),
        " from (",
        ended!("$4", "$5"),
        ") ended where ",
        selected!(),
        " group by step, model, mod"
    );
    let buckets = concat!(
        "select date_trunc($3, hour, 'utc') as step, model, mod, ",
        bucket!(),
        " as bucket, count(*) as runs from (",
        ended!("$4", "$5"),
        ") ended where first_token_us > 0 and ",
        selected!(),
        " group by step, model, mod, bucket"
    );
    Ok((selection.fetch(connection, counts, span).await?, selection.fetch(connection, buckets, span).await?))
}

/// Returns the first day with runs or with counts.
pub(super) async fn first_day(connection: &mut PgConnection) -> Result<Option<NaiveDate>, sqlx::Error> {
    let stored: Option<NaiveDate> = sqlx::query_scalar("select run_day(run_id) from runs order by run_id limit 1")
        .fetch_optional(&mut *connection)
        .await?;
    let counted: Option<NaiveDate> =
        sqlx::query_scalar("select min(day) from run_stats_days where runs > 0").fetch_one(connection).await?;
    Ok(stored.into_iter().chain(counted).min())
}

/// Returns the spans of consecutive days from `first` to `today` that are not counted, each with the day after it.
pub(super) fn uncounted_spans(
    first: NaiveDate,
    today: NaiveDate,
    counted: &[NaiveDate],
) -> Vec<(NaiveDate, NaiveDate)> {
    let mut spans: Vec<(NaiveDate, NaiveDate)> = Vec::new();
    // Ids contain times from the clocks of servers, which may be ahead.
    for day in first.iter_days().take_while(|day| *day <= today + Days::new(1)) {
        if counted.contains(&day) {
            continue;
        }
        match spans.last_mut() {
            Some((_, until)) if *until == day => *until = day + Days::new(1),
            _ => spans.push((day, day + Days::new(1))),
        }
    }
    spans
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
    for day in days.into_iter().rev() {
        count_day(pool, day).await?;
    }
    Ok(())
}

/// Counts the runs of a day and the durations of their mod calls, unless as many are already counted.
async fn count_day(pool: &PgPool, day: NaiveDate) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    // All servers count the same days, so only one of them may count at a time.
    sqlx::query("select pg_advisory_xact_lock(7237120550118)").execute(&mut *transaction).await?;
    let until = day + Days::new(1);
    let mut runs: i64 = sqlx::query_scalar(
        "select count(*) from runs where run_id >= first_run_id($1) and run_id < first_run_id($2) and status <> 'running'
            and deletion is null",
    )
    .bind(day)
    .bind(until)
    .fetch_one(&mut *transaction)
    .await?;
    let counted: Option<(i64, bool)> = sqlx::query_as("select runs, has_mod_calls from run_stats_days where day = $1")
        .bind(day)
        .fetch_optional(&mut *transaction)
        .await?;
    let is_measured = calls::is_measured(&mut transaction, day, until).await?;
    match counted.filter(|(counted, _)| *counted >= runs) {
        Some((_, has_mod_calls)) if has_mod_calls || !is_measured => return Ok(()),
        // An earlier version counted the day. Runs that were deleted since then keep their counts.
        Some((counted, _)) => runs = counted,
        None => count_runs(&mut transaction, day, until).await?,
    }
    let delete = "delete from mod_call_stats where hour >= $1 and hour < $2";
    sqlx::query(delete).bind(midnight(day)).bind(midnight(until)).execute(&mut *transaction).await?;
    if is_measured {
        sqlx::query(calls::STORE_DAY).bind(day).bind(until).execute(&mut *transaction).await?;
    }
    sqlx::query(
        "insert into run_stats_days (day, runs, has_mod_calls) values ($1, $2, $3)
        on conflict (day) do update set runs = excluded.runs, has_mod_calls = excluded.has_mod_calls",
    )
    .bind(day)
    .bind(runs)
    .bind(is_measured)
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await
}

/// Stores the counts of the runs of a day, in place of earlier ones.
async fn count_runs(connection: &mut PgConnection, day: NaiveDate, until: NaiveDate) -> Result<(), sqlx::Error> {
    for delete in [
        "delete from run_stats where hour >= $1 and hour < $2",
        "delete from first_token_stats where hour >= $1 and hour < $2",
    ] {
        sqlx::query(delete).bind(midnight(day)).bind(midnight(until)).execute(&mut *connection).await?;
    }
    for insert in [
        concat!(
            "insert into run_stats (hour, owner, model, mod, runs, failed, cancelled, interrupted, finish_stop, finish_length,
                finish_tool_calls, prompt_tokens, completion_tokens, cached_tokens, timed_tokens, generation_us,
                backtracked, forced, actions, errors)
            select hour, owner, model, mod, ",
            counted!(),
            " from (",
            ended!("$1", "$2"),
            ") ended group by hour, owner, model, mod"
        ),
        concat!(
            "insert into first_token_stats (hour, owner, model, mod, bucket, runs) select hour, owner, model, mod, ",
            bucket!(),
            " as bucket, count(*) from (",
            ended!("$1", "$2"),
            ") ended where first_token_us > 0 group by hour, owner, model, mod, bucket"
        ),
    ] {
        sqlx::query(insert).bind(day).bind(until).execute(&mut *connection).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::uncounted_spans;
    use chrono::NaiveDate;

    fn day(day: u32) -> NaiveDate {
        NaiveDate::from_ymd_opt(2026, 3, day).unwrap()
    }

    #[test]
    fn spans_are_the_days_that_are_not_counted() {
        assert_eq!(uncounted_spans(day(4), day(7), &[day(5)]), [(day(4), day(5)), (day(6), day(9))]);
        assert_eq!(uncounted_spans(day(4), day(5), &[day(4), day(5), day(6)]), []);
    }
}
