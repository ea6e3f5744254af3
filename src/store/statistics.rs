//! Statistics of runs: counts and times by hour or day, by model and by mod.
//!
//! The runs of a past day are counted once, into the tables of migration V18; those of other days are counted when
//! statistics are read. Later changes of a day, such as deletions, do not change its counts, except that runs that were
//! stored late are added.

use super::pool::{PgConnection, PgPool};
use super::scope::owners;
use super::{Error, Store};
use crate::events::Scope;
use chrono::{DateTime, Days, NaiveDate, NaiveTime, Utc};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Number of past days whose runs are counted again after runs were stored late.
const RECOUNTED_DAYS: u64 = 7;
/// Maximum number of days of a query.
pub const MAX_STATISTICS_DAYS: u32 = 3650;
/// Maximum number of days with time steps of one hour.
const MAX_HOURLY_DAYS: u32 = 7;
/// Histogram buckets per power of two.
const BUCKETS_PER_OCTAVE: f64 = 4.0;

/// SQL of the ended runs from the day `$1` to the day before `$2`, each once with an empty mod and once per mod.
macro_rules! ended {
    () => {
        "
    select distinct run_id, unnest(array[''] || mods) as mod, coalesce(owner, '') as owner, coalesce(model, '') as model,
        to_timestamp(('x' || left(replace(run_id::text, '-', ''), 12))::bit(48)::bigint / 3600000 * 3600) as hour,
        status, coalesce(finish_reason, '') as reason, prompt_tokens, completion_tokens, cached_tokens,
        coalesce(generation_us, 0) as generation_us, first_token_us, backtracked, forced, actions, errors
    from runs where run_id >= first_run_id($1) and run_id < first_run_id($2) and status <> 'running'
        and deletion is null"
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

/// Length of a time step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StatisticsUnit {
    /// An hour.
    Hour,
    /// A day in UTC.
    Day,
}

impl StatisticsUnit {
    /// Returns the name, which is also PostgreSQL's.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Day => "day",
        }
    }
}

/// The runs that statistics count.
#[derive(Debug, Clone)]
pub struct StatisticsQuery {
    /// First day in UTC; `None` for the day of the first run.
    pub from: Option<NaiveDate>,
    /// Length of a time step.
    pub unit: StatisticsUnit,
    /// Only runs of this model.
    pub model: Option<String>,
    /// Only runs with this mod.
    pub used_mod: Option<String>,
}

impl StatisticsQuery {
    /// Selects the runs of the last days, including today, or all runs.
    #[must_use]
    pub fn last_days(days: Option<u32>, today: NaiveDate) -> Self {
        let from = days.map(|days| today - Days::new(u64::from(days.clamp(1, MAX_STATISTICS_DAYS) - 1)));
        let is_short = days.is_some_and(|days| days <= MAX_HOURLY_DAYS);
        let unit = if is_short { StatisticsUnit::Hour } else { StatisticsUnit::Day };
        Self { from, unit, model: None, used_mod: None }
    }
}

/// Counts of a group of ended runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema, sqlx::FromRow)]
pub struct RunCounts {
    /// Runs.
    pub runs: i64,
    /// Runs that failed.
    pub failed: i64,
    /// Runs that their client cancelled.
    pub cancelled: i64,
    /// Runs that the end of their server interrupted.
    pub interrupted: i64,
    /// Runs that ended with an end-of-generation token or a stop string.
    pub finish_stop: i64,
    /// Runs that ended at a limit.
    pub finish_length: i64,
    /// Runs that ended with tool calls.
    pub finish_tool_calls: i64,
    /// Tokens of the prompts.
    pub prompt_tokens: i64,
    /// Tokens of the answers.
    pub completion_tokens: i64,
    /// Prompt tokens that were in the KV cache.
    pub cached_tokens: i64,
    #[serde(skip)]
    timed_tokens: i64,
    #[serde(skip)]
    generation_us: i64,
    /// Tokens that mods removed.
    pub backtracked: i64,
    /// Tokens that mods forced.
    pub forced: i64,
    /// Actions of mods.
    pub actions: i64,
    /// Errors of mods.
    pub errors: i64,
}

impl RunCounts {
    /// Returns the counts with those of another group, `sign` times.
    fn plus(mut self, other: &Self, sign: i64) -> Self {
        let Self { runs, failed, cancelled, interrupted, finish_stop, finish_length, finish_tool_calls, .. } = other;
        self.runs += sign * runs;
        self.failed += sign * failed;
        self.cancelled += sign * cancelled;
        self.interrupted += sign * interrupted;
        self.finish_stop += sign * finish_stop;
        self.finish_length += sign * finish_length;
        self.finish_tool_calls += sign * finish_tool_calls;
        self.prompt_tokens += sign * other.prompt_tokens;
        self.completion_tokens += sign * other.completion_tokens;
        self.cached_tokens += sign * other.cached_tokens;
        self.timed_tokens += sign * other.timed_tokens;
        self.generation_us += sign * other.generation_us;
        self.backtracked += sign * other.backtracked;
        self.forced += sign * other.forced;
        self.actions += sign * other.actions;
        self.errors += sign * other.errors;
        self
    }
}

/// Statistics of a group of ended runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, ToSchema)]
pub struct GroupStatistics {
    /// Counts.
    #[serde(flatten)]
    pub counts: RunCounts,
    /// Tokens of answers per second of generation; missing if no duration was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// Median time from the request to the first token in milliseconds, exact to 10 %; missing if not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_token_ms_p50: Option<f64>,
    /// The time within which 95 % of the runs had their first token, in milliseconds, exact to 10 %.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_token_ms_p95: Option<f64>,
}

/// Statistics of the runs in a time step.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct TimeStep {
    /// Begin of the hour or day.
    pub at: DateTime<Utc>,
    /// Statistics of its runs.
    #[serde(flatten)]
    pub statistics: GroupStatistics,
}

/// Statistics of the runs of a model.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ModelStatistics {
    /// Name of the model; empty if the runs name none.
    pub model: String,
    /// Statistics of its runs.
    #[serde(flatten)]
    pub statistics: GroupStatistics,
}

/// Statistics of the runs with a mod, and of all others.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ModStatistics {
    /// Name of the mod.
    #[serde(rename = "mod")]
    pub name: String,
    /// Runs with the mod.
    pub with: GroupStatistics,
    /// Runs without it.
    pub without: GroupStatistics,
}

/// Statistics of ended runs.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Statistics {
    /// Begin of the first day.
    pub from: DateTime<Utc>,
    /// Length of a time step.
    pub unit: StatisticsUnit,
    /// All runs.
    pub total: GroupStatistics,
    /// Time steps with runs, oldest first.
    pub steps: Vec<TimeStep>,
    /// Models by number of runs, largest first.
    pub models: Vec<ModelStatistics>,
    /// Mods by number of runs, largest first.
    pub mods: Vec<ModStatistics>,
}

/// Counts, and the histogram of times to the first token.
#[derive(Debug, Clone, Default)]
struct Group {
    counts: RunCounts,
    buckets: BTreeMap<i16, i64>,
}

impl Group {
    fn minus(&self, other: &Self) -> Self {
        let mut buckets = self.buckets.clone();
        for (bucket, runs) in &other.buckets {
            *buckets.entry(*bucket).or_default() -= runs;
        }
        Self { counts: self.counts.plus(&other.counts, -1), buckets }
    }

    fn statistics(&self) -> GroupStatistics {
        let counts = self.counts;
        let seconds = counts.generation_us as f64 / 1e6;
        GroupStatistics {
            counts,
            tokens_per_second: (seconds > 0.0).then(|| counts.timed_tokens as f64 / seconds),
            first_token_ms_p50: self.percentile(0.5),
            first_token_ms_p95: self.percentile(0.95),
        }
    }

    /// Returns a percentile of the time to the first token in milliseconds: the geometric middle of its bucket.
    fn percentile(&self, share: f64) -> Option<f64> {
        let total: i64 = self.buckets.values().sum();
        let mut left = (share * total as f64).ceil().max(1.0) as i64;
        for (bucket, runs) in &self.buckets {
            left -= runs;
            if left <= 0 {
                return Some(((f64::from(*bucket) + 0.5) / BUCKETS_PER_OCTAVE).exp2() / 1e3);
            }
        }
        None
    }
}

#[derive(sqlx::FromRow)]
struct CountRow {
    step: DateTime<Utc>,
    model: String,
    #[sqlx(rename = "mod")]
    used_mod: String,
    #[sqlx(flatten)]
    counts: RunCounts,
}

#[derive(sqlx::FromRow)]
struct BucketRow {
    step: DateTime<Utc>,
    model: String,
    #[sqlx(rename = "mod")]
    used_mod: String,
    bucket: i16,
    runs: i64,
}

/// Groups of runs while rows are added.
#[derive(Default)]
struct Groups {
    total: Group,
    steps: BTreeMap<DateTime<Utc>, Group>,
    models: BTreeMap<String, Group>,
    mods: BTreeMap<String, Group>,
    /// All runs of the selected model, with which the runs with a mod are compared.
    all: Group,
}

impl Groups {
    /// Applies `add` to the groups that a row belongs to. `selected` is the mod of the query, or empty.
    fn each(&mut self, step: DateTime<Utc>, model: String, used_mod: String, selected: &str, add: impl Fn(&mut Group)) {
        if used_mod.is_empty() {
            add(&mut self.all);
        }
        if used_mod == selected {
            add(&mut self.total);
            add(self.steps.entry(step).or_default());
            add(self.models.entry(model).or_default());
        }
        if !used_mod.is_empty() {
            add(self.mods.entry(used_mod).or_default());
        }
    }

    fn add_counts(&mut self, row: CountRow, selected: &str) {
        let CountRow { step, model, used_mod, counts } = row;
        self.each(step, model, used_mod, selected, |group| group.counts = group.counts.plus(&counts, 1));
    }

    fn add_bucket(&mut self, row: BucketRow, selected: &str) {
        let BucketRow { step, model, used_mod, bucket, runs } = row;
        self.each(step, model, used_mod, selected, |group| *group.buckets.entry(bucket).or_default() += runs);
    }

    fn finish(self, from: NaiveDate, unit: StatisticsUnit) -> Statistics {
        let mut models: Vec<ModelStatistics> = self
            .models
            .iter()
            .map(|(model, group)| ModelStatistics { model: model.clone(), statistics: group.statistics() })
            .collect();
        models.sort_by_key(|model| std::cmp::Reverse(model.statistics.counts.runs));
        let compared = |(name, group): (&String, &Group)| ModStatistics {
            name: name.clone(),
            with: group.statistics(),
            without: self.all.minus(group).statistics(),
        };
        let mut mods: Vec<ModStatistics> = self.mods.iter().map(compared).collect();
        mods.sort_by_key(|one| std::cmp::Reverse(one.with.counts.runs));
        let steps = self.steps.iter().map(|(at, group)| TimeStep { at: *at, statistics: group.statistics() }).collect();
        Statistics { from: midnight(from), unit, total: self.total.statistics(), steps, models, mods }
    }
}

fn midnight(day: NaiveDate) -> DateTime<Utc> {
    day.and_time(NaiveTime::MIN).and_utc()
}

impl Store {
    /// Returns statistics of the ended runs in the scope, up to `today`.
    ///
    /// # Errors
    /// The database failed.
    pub async fn statistics(
        &self,
        scope: &Scope,
        query: &StatisticsQuery,
        today: NaiveDate,
    ) -> Result<Statistics, Error> {
        let mut snapshot = self.inner.pool.begin_with(super::read::SNAPSHOT).await?;
        let first = match first_day(&mut snapshot).await? {
            Some(first) => query.from.map_or(first, |from| from.max(first)),
            None => query.from.unwrap_or(today),
        };
        let counted: Vec<NaiveDate> = sqlx::query_scalar("select day from run_stats_days where day >= $1")
            .bind(first)
            .fetch_all(&mut *snapshot)
            .await?;
        let mut groups = Groups::default();
        let unit = query.unit.as_str();
        let selected = query.used_mod.as_deref().unwrap_or_default();
        let rows: Vec<CountRow> = sqlx::query_as(concat!(
            "select date_trunc($3, hour, 'utc') as step, model, mod, ",
            summed!(),
            " from run_stats where ($1::text[] is null or owner = any($1)) and ($2::text is null or model = $2) and hour >= $4
            group by step, model, mod"
        ))
        .bind(owners(scope))
        .bind(query.model.as_deref())
        .bind(unit)
        .bind(midnight(first))
        .fetch_all(&mut *snapshot)
        .await?;
        rows.into_iter().for_each(|row| groups.add_counts(row, selected));
        let rows: Vec<BucketRow> = sqlx::query_as(
            "select date_trunc($3, hour, 'utc') as step, model, mod, bucket, sum(runs)::bigint as runs from first_token_stats
            where ($1::text[] is null or owner = any($1)) and ($2::text is null or model = $2) and hour >= $4
            group by step, model, mod, bucket",
        )
        .bind(owners(scope))
        .bind(query.model.as_deref())
        .bind(unit)
        .bind(midnight(first))
        .fetch_all(&mut *snapshot)
        .await?;
        rows.into_iter().for_each(|row| groups.add_bucket(row, selected));
        for (from, until) in other_spans(first, today, &counted) {
            let rows: Vec<CountRow> = sqlx::query_as(concat!(
                "select date_trunc($5, hour, 'utc') as step, model, mod, ",
                counted!(),
                " from (",
                ended!(),
                ") ended where ($3::text[] is null or owner = any($3)) and ($4::text is null or model = $4)
                group by step, model, mod"
            ))
            .bind(from)
            .bind(until)
            .bind(owners(scope))
            .bind(query.model.as_deref())
            .bind(unit)
            .fetch_all(&mut *snapshot)
            .await?;
            rows.into_iter().for_each(|row| groups.add_counts(row, selected));
            let rows: Vec<BucketRow> = sqlx::query_as(concat!(
                "select date_trunc($5, hour, 'utc') as step, model, mod, ",
                bucket!(),
                " as bucket, count(*) as runs from (",
                ended!(),
                ") ended where ($3::text[] is null or owner = any($3)) and ($4::text is null or model = $4)
                and first_token_us > 0 group by step, model, mod, bucket"
            ))
            .bind(from)
            .bind(until)
            .bind(owners(scope))
            .bind(query.model.as_deref())
            .bind(unit)
            .fetch_all(&mut *snapshot)
            .await?;
            rows.into_iter().for_each(|row| groups.add_bucket(row, selected));
        }
        Ok(groups.finish(first, query.unit))
    }

    /// Counts the runs of the days before `today` that are not counted yet.
    ///
    /// # Errors
    /// The database failed. Earlier days stay counted.
    pub async fn count_days(&self, today: NaiveDate) -> Result<(), Error> {
        Ok(count_days(&self.inner.pool, today).await?)
    }
}

/// Returns the first day with runs or with counts.
async fn first_day(connection: &mut PgConnection) -> Result<Option<NaiveDate>, sqlx::Error> {
    let stored: Option<NaiveDate> = sqlx::query_scalar("select run_day(run_id) from runs order by run_id limit 1")
        .fetch_optional(&mut *connection)
        .await?;
    let counted: Option<NaiveDate> =
        sqlx::query_scalar("select min(day) from run_stats_days where runs > 0").fetch_one(connection).await?;
    Ok(stored.into_iter().chain(counted).min())
}

/// Returns the spans of consecutive days from `first` to `today` that are not counted, each with the day after it.
fn other_spans(first: NaiveDate, today: NaiveDate, counted: &[NaiveDate]) -> Vec<(NaiveDate, NaiveDate)> {
    let mut spans: Vec<(NaiveDate, NaiveDate)> = Vec::new();
    // The id of a run may be from a clock that is ahead.
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
pub(super) async fn count_days(pool: &PgPool, today: NaiveDate) -> Result<(), sqlx::Error> {
    let mut connection = pool.acquire().await?;
    let Some(first) = first_day(&mut connection).await? else { return Ok(()) };
    let counted: Vec<NaiveDate> = sqlx::query_scalar("select day from run_stats_days where day < $1")
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

/// Counts the runs of a day, unless as many are already counted.
async fn count_day(pool: &PgPool, day: NaiveDate) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    // Servers count the same days.
    sqlx::query("select pg_advisory_xact_lock(7237120550118)").execute(&mut *transaction).await?;
    let until = day + Days::new(1);
    let runs: i64 = sqlx::query_scalar(
        "select count(*) from runs where run_id >= first_run_id($1) and run_id < first_run_id($2) and status <> 'running'
            and deletion is null",
    )
    .bind(day)
    .bind(until)
    .fetch_one(&mut *transaction)
    .await?;
    let counted: Option<i64> = sqlx::query_scalar("select runs from run_stats_days where day = $1")
        .bind(day)
        .fetch_optional(&mut *transaction)
        .await?;
    if counted.is_some_and(|counted| counted >= runs) {
        return Ok(());
    }
    for delete in [
        "delete from run_stats where hour >= $1 and hour < $2",
        "delete from first_token_stats where hour >= $1 and hour < $2",
    ] {
        sqlx::query(delete).bind(midnight(day)).bind(midnight(until)).execute(&mut *transaction).await?;
    }
    for insert in [
        concat!(
            "insert into run_stats (hour, owner, model, mod, runs, failed, cancelled, interrupted, finish_stop, finish_length,
                finish_tool_calls, prompt_tokens, completion_tokens, cached_tokens, timed_tokens, generation_us,
                backtracked, forced, actions, errors)
            select hour, owner, model, mod, ",
            counted!(),
            " from (",
            ended!(),
            ") ended group by hour, owner, model, mod"
        ),
        concat!(
            "insert into first_token_stats (hour, owner, model, mod, bucket, runs) select hour, owner, model, mod, ",
            bucket!(),
            " as bucket, count(*) from (",
            ended!(),
            ") ended where first_token_us > 0 group by hour, owner, model, mod, bucket"
        ),
    ] {
        sqlx::query(insert).bind(day).bind(until).execute(&mut *transaction).await?;
    }
    sqlx::query("insert into run_stats_days values ($1, $2) on conflict (day) do update set runs = excluded.runs")
        .bind(day)
        .bind(runs)
        .execute(&mut *transaction)
        .await?;
    transaction.commit().await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day(day: u32) -> NaiveDate {
        NaiveDate::from_ymd_opt(2026, 3, day).unwrap()
    }

    #[test]
    fn spans_are_the_days_that_are_not_counted() {
        assert_eq!(other_spans(day(4), day(7), &[day(5)]), [(day(4), day(5)), (day(6), day(9))]);
        assert_eq!(other_spans(day(4), day(5), &[day(4), day(5), day(6)]), []);
    }

    #[test]
    fn percentiles_are_within_ten_percent() {
        let mut group = Group::default();
        assert_eq!(group.percentile(0.5), None);
        for us in 1..=1000_u32 {
            let bucket = (4.0 * (f64::from(us) * 100.0).log2()).floor() as i16;
            *group.buckets.entry(bucket).or_default() += 1;
        }
        for (share, exact) in [(0.5, 50.0), (0.95, 95.0), (1.0, 100.0)] {
            let found = group.percentile(share).unwrap();
            assert!((found / exact - 1.0).abs() < 0.1, "{share}: {found}");
        }
    }
}
