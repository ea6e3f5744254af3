//! SQL of the counts of runs: counting a span of time, storing the counts, and reading stored ones.

use super::days::TimeSpan;
use super::groups::{BucketRow, CountRow};
use super::{Selection, StatisticsUnit, midnight};
use crate::store::pool::PgConnection;
use crate::store::uuid_v7::first_id_at;
use chrono::NaiveDate;
use std::sync::LazyLock;
use uuid::Uuid;

/// The columns of `run_stats` after its key, with the SQL that computes them from [`ended`]. The fields of
/// [`RunCounts`](super::RunCounts) have the same names, and `sum_statistics` of migration V24 sums them.
const COLUMNS: [(&str, &str); 16] = [
    ("runs", "count(*)"),
    ("failed", "count(*) filter (where status = 'failed')"),
    ("cancelled", "count(*) filter (where status = 'cancelled')"),
    ("interrupted", "count(*) filter (where status = 'interrupted')"),
    ("finish_stop", "count(*) filter (where reason = 'stop')"),
    ("finish_length", "count(*) filter (where reason = 'length')"),
    ("finish_tool_calls", "count(*) filter (where reason = 'tool_calls')"),
    ("prompt_tokens", "sum(prompt_tokens)::bigint"),
    ("completion_tokens", "sum(completion_tokens)::bigint"),
    ("cached_tokens", "sum(cached_tokens)::bigint"),
    ("timed_tokens", "coalesce(sum(completion_tokens) filter (where generation_us > 0), 0)::bigint"),
    ("generation_us", "sum(generation_us)::bigint"),
    ("backtracked", "sum(backtracked)::bigint"),
    ("forced", "sum(forced)::bigint"),
    ("actions", "sum(actions)::bigint"),
    ("errors", "sum(errors)::bigint"),
];

/// SQL of a run's bucket in the histogram of first tokens.
const BUCKET: &str = "floor(4 * ln(first_token_us) / ln(2))::smallint";

/// A statement for `run_stats` and one for `first_token_stats`.
type StatementPair = LazyLock<[String; 2]>;

static READ_HOURS: StatementPair = LazyLock::new(|| read_statements("run_stats", "first_token_stats"));
static READ_DAYS: StatementPair = LazyLock::new(|| read_statements("run_stats_by_day", "first_token_stats_by_day"));

/// Statements that count the runs from the id `$5` up to and without the id `$6`.
static COUNT: StatementPair = LazyLock::new(|| {
    let ended = ended("$5", "$6");
    let counted = columns(|name, sql| format!("{sql} as {name}"));
    let measured = format!("(select *, {BUCKET} as bucket from ({ended}) ended where first_token_us > 0) measured");
    [
        grouped(&counted, "", "materialized", &format!("({ended}) ended")),
        grouped("bucket, count(*) as runs", ", bucket", "materialized", &measured),
    ]
});

/// Statements that add the runs `$3` from the id `$1` up to and without the id `$2` to the stored counts.
static ADD: StatementPair = LazyLock::new(|| {
    let ended = ended("$1", "$2");
    let (names, counted) = (columns(|name, _| name.to_owned()), columns(|_, sql| sql.to_owned()));
    let sums = columns(|name, _| format!("{name} = stored.{name} + excluded.{name}"));
    [
        format!(
            "insert into run_stats as stored (hour, owner, model, mod, {names})
            select hour, owner, model, mod, {counted} from ({ended} and run_id = any($3)) ended
            group by hour, owner, model, mod
            on conflict (hour, owner, model, mod) do update set {sums}"
        ),
        format!(
            "insert into first_token_stats as stored (hour, owner, model, mod, bucket, runs)
            select hour, owner, model, mod, {BUCKET} as bucket, count(*) from ({ended} and run_id = any($3)) ended
            where first_token_us > 0 group by hour, owner, model, mod, bucket
            on conflict (hour, owner, model, mod, bucket) do update set runs = stored.runs + excluded.runs"
        ),
    ]
});

/// Returns an SQL list with an entry for each of [`COLUMNS`].
fn columns(entry: impl Fn(&str, &str) -> String) -> String {
    COLUMNS.map(|(name, sql)| entry(name, sql)).join(", ")
}

/// Returns SQL of the ended runs from the id `from` up to and without the id `until`, each once with an empty mod and once per
/// mod. Only the first of several mods of a run counts if their names begin with the same 100 characters. Durations of ingested
/// runs are those of another server, or any numbers, so they do not count.
fn ended(from: &str, until: &str) -> String {
    let (used_mod, model, hour) = (key_name!("named.mod"), key_name!("model"), hour!());
    format!(
        "select {used_mod} as mod, coalesce(owner, '') as owner, coalesce({model}, '') as model, {hour} as hour,
            status, coalesce(finish_reason, '') as reason, prompt_tokens, completion_tokens, cached_tokens,
            case when surface <> 'ingest' then coalesce(generation_us, 0) else 0 end as generation_us,
            case when surface <> 'ingest' then first_token_us end as first_token_us, backtracked, forced, actions, errors
        from runs, unnest(array[''] || mods) with ordinality as named (mod, place)
        where run_id >= {from}::uuid and run_id < {until}::uuid and status <> 'running' and deletion is null
            and array_position(array[''] || mods, named.mod) = named.place
            and (length(named.mod) < 100 or position(E'\\x01' || left(named.mod, 100) in
                E'\\x01' || array_to_string(mods[:named.place::integer - 2], E'\\x01')) = 0)"
    )
}

/// Returns a statement that groups rows in three ways: those of the mod `$4` by step and by model, and all rows by mod. `hint`
/// decides whether PostgreSQL reads the rows once and keeps them, or twice.
fn grouped(columns: &str, bucket: &str, hint: &str, rows: &str) -> String {
    format!(
        "with rows as {hint} (select date_trunc($3, hour, 'utc') as step, * from {rows}
            where ($1::text[] is null or owner = any($1)) and ($2::text is null or model = $2))
        select step, model, null as mod, {columns} from rows where mod = $4
        group by grouping sets ((step{bucket}), (model{bucket}))
        union all select null, null, mod, {columns} from rows group by mod{bucket}"
    )
}

/// Returns the statements that read stored counts from the time `$5` on.
fn read_statements(counts: &str, buckets: &str) -> [String; 2] {
    let stored = |table: &str| format!("(select * from {table} where hour >= $5) stored");
    let summed = columns(|name, _| format!("sum({name})::bigint as {name}"));
    [
        grouped(&summed, "", "not materialized", &stored(counts)),
        grouped("bucket, sum(runs)::bigint as runs", ", bucket", "not materialized", &stored(buckets)),
    ]
}

/// Reads the stored counts from a day on.
pub(super) async fn read_counted(
    connection: &mut PgConnection,
    selection: &Selection<'_>,
    first: NaiveDate,
) -> Result<(Vec<CountRow>, Vec<BucketRow>), sqlx::Error> {
    let [counts, buckets] = match selection.unit {
        StatisticsUnit::Hour => &*READ_HOURS,
        StatisticsUnit::Day => &*READ_DAYS,
    };
    let from = midnight(first);
    Ok((
        selection.query(counts).bind(from).fetch_all(&mut *connection).await?,
        selection.query(buckets).bind(from).fetch_all(connection).await?,
    ))
}

/// Counts the runs of a span of time that is not counted.
pub(super) async fn count(
    connection: &mut PgConnection,
    selection: &Selection<'_>,
    span: TimeSpan,
) -> Result<(Vec<CountRow>, Vec<BucketRow>), sqlx::Error> {
    let [counts, buckets] = &*COUNT;
    let (from, until) = (first_id_at(span.0), first_id_at(span.1));
    Ok((
        selection.query(counts).bind(from).bind(until).fetch_all(&mut *connection).await?,
        selection.query(buckets).bind(from).bind(until).fetch_all(connection).await?,
    ))
}

/// Adds runs of a span to the stored counts.
pub(super) async fn add(connection: &mut PgConnection, span: TimeSpan, run_ids: &[Uuid]) -> Result<(), sqlx::Error> {
    for insert in &*ADD {
        let insert = sqlx::query(insert.as_str()).bind(first_id_at(span.0)).bind(first_id_at(span.1)).bind(run_ids);
        insert.execute(&mut *connection).await?;
    }
    Ok(())
}
