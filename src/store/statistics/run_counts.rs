//! SQL of the counts of runs: counting a span of time, storing the counts, and reading stored ones.

use super::days::{TimeSpan, first_run_id};
use super::groups::{BucketRow, CountRow};
use super::{Selection, StatisticsUnit, midnight};
use crate::store::pool::PgConnection;
use chrono::NaiveDate;
use uuid::Uuid;

/// SQL of the ended runs from the id `$from` up to and without the id `$until`, each once with an empty mod and once per mod.
/// Only the first of several mods of a run counts if their names begin with the same 100 characters.
macro_rules! ended {
    ($from:literal, $until:literal) => {
        concat!(
            "
    select ",
            key_name!("named.mod"),
            " as mod, coalesce(owner, '') as owner, coalesce(",
            key_name!("model"),
            ", '') as model,
        to_timestamp(('x' || left(replace(run_id::text, '-', ''), 12))::bit(48)::bigint / 3600000 * 3600) as hour,
        status, coalesce(finish_reason, '') as reason, prompt_tokens, completion_tokens, cached_tokens,
        coalesce(generation_us, 0) as generation_us, first_token_us, backtracked, forced, actions, errors
    from runs, unnest(array[''] || mods) with ordinality as named (mod, place)
    where run_id >= ",
            $from,
            "::uuid and run_id < ",
            $until,
            "::uuid and status <> 'running' and deletion is null
        and array_position(array[''] || mods, named.mod) = named.place
        and (length(named.mod) < 100 or position(E'\\x01' || left(named.mod, 100) in
            E'\\x01' || array_to_string(mods[:named.place::integer - 2], E'\\x01')) = 0)"
        )
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

/// SQL that groups the rows of a query in three ways: those of the selected mod by step and by model, and all rows by mod.
/// `$hint` decides whether PostgreSQL reads the rows once and keeps them, or twice.
macro_rules! grouped {
    ($columns:expr, $bucket:literal, $hint:literal, $rows:expr) => {
        concat!(
            "with rows as ",
            $hint,
            " (select date_trunc($3, hour, 'utc') as step, * from ",
            $rows,
            " where ($1::text[] is null or owner = any($1)) and ($2::text is null or model = $2))
            select step, model, null as mod, ",
            $columns,
            " from rows where mod = $6 group by grouping sets ((step",
            $bucket,
            "), (model",
            $bucket,
            ")) union all select null, null, mod, ",
            $columns,
            " from rows group by mod",
            $bucket
        )
    };
}

/// Reads the stored counts from a day on.
pub(super) async fn read_counted(
    connection: &mut PgConnection,
    selection: &Selection<'_>,
    first: NaiveDate,
) -> Result<(Vec<CountRow>, Vec<BucketRow>), sqlx::Error> {
    let (counts, buckets) = match selection.unit {
        StatisticsUnit::Hour => (
            grouped!(summed!(), "", "not materialized", stored!("run_stats")),
            grouped!("bucket, sum(runs)::bigint as runs", ", bucket", "not materialized", stored!("first_token_stats")),
        ),
        StatisticsUnit::Day => (
            grouped!(summed!(), "", "not materialized", stored!("run_stats_by_day")),
            grouped!(
                "bucket, sum(runs)::bigint as runs",
                ", bucket",
                "not materialized",
                stored!("first_token_stats_by_day")
            ),
        ),
    };
    let from = midnight(first);
    Ok((
        selection.fetch_stored(connection, counts, from).await?,
        selection.fetch_stored(connection, buckets, from).await?,
    ))
}

/// Counts the runs of a span of time that is not counted.
pub(super) async fn count(
    connection: &mut PgConnection,
    selection: &Selection<'_>,
    span: TimeSpan,
) -> Result<(Vec<CountRow>, Vec<BucketRow>), sqlx::Error> {
    let counts = grouped!(counted!(), "", "materialized", concat!("(", ended!("$4", "$5"), ") ended"));
    let buckets = grouped!(
        "bucket, count(*) as runs",
        ", bucket",
        "materialized",
        concat!(
            "(select *, ",
            bucket!(),
            " as bucket from (",
            ended!("$4", "$5"),
            ") ended where first_token_us > 0) measured"
        )
    );
    Ok((selection.fetch(connection, counts, span).await?, selection.fetch(connection, buckets, span).await?))
}

/// Adds runs of a span to the stored counts.
pub(super) async fn add(connection: &mut PgConnection, span: TimeSpan, run_ids: &[Uuid]) -> Result<(), sqlx::Error> {
    for insert in [
        concat!(
            "insert into run_stats as stored (hour, owner, model, mod, runs, failed, cancelled, interrupted, finish_stop,
                finish_length, finish_tool_calls, prompt_tokens, completion_tokens, cached_tokens, timed_tokens,
                generation_us, backtracked, forced, actions, errors)
            select hour, owner, model, mod, ",
            counted!(),
            " from (",
            ended!("$1", "$2"),
            " and run_id = any($3)) ended group by hour, owner, model, mod
            on conflict (hour, owner, model, mod) do update set runs = stored.runs + excluded.runs,
                failed = stored.failed + excluded.failed, cancelled = stored.cancelled + excluded.cancelled,
                interrupted = stored.interrupted + excluded.interrupted,
                finish_stop = stored.finish_stop + excluded.finish_stop,
                finish_length = stored.finish_length + excluded.finish_length,
                finish_tool_calls = stored.finish_tool_calls + excluded.finish_tool_calls,
                prompt_tokens = stored.prompt_tokens + excluded.prompt_tokens,
                completion_tokens = stored.completion_tokens + excluded.completion_tokens,
                cached_tokens = stored.cached_tokens + excluded.cached_tokens,
                timed_tokens = stored.timed_tokens + excluded.timed_tokens,
                generation_us = stored.generation_us + excluded.generation_us,
                backtracked = stored.backtracked + excluded.backtracked, forced = stored.forced + excluded.forced,
                actions = stored.actions + excluded.actions, errors = stored.errors + excluded.errors"
        ),
        concat!(
            "insert into first_token_stats as stored (hour, owner, model, mod, bucket, runs)
            select hour, owner, model, mod, ",
            bucket!(),
            " as bucket, count(*) from (",
            ended!("$1", "$2"),
            " and run_id = any($3)) ended where first_token_us > 0 group by hour, owner, model, mod, bucket
            on conflict (hour, owner, model, mod, bucket) do update set runs = stored.runs + excluded.runs"
        ),
    ] {
        sqlx::query(insert)
            .bind(first_run_id(span.0))
            .bind(first_run_id(span.1))
            .bind(run_ids)
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}
