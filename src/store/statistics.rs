//! Statistics of runs: counts and times by hour or day, by model and by mod.
//!
//! The runs of a past day, and those of a past hour with many runs, are counted once, into the tables of migration V18;
//! others are counted when statistics are read. Later changes of such a time, such as deletions, do not change its counts,
//! except that runs that were stored late are added. Migration V26 keeps the ids of the counted runs for this. The durations
//! of mod calls are counted in the same way, into the table of migration V22. The tables of migration V24 hold the sums of
//! each day.

/// SQL of the hour in the id of a run.
macro_rules! hour {
    () => {
        "to_timestamp(('x' || left(replace(run_id::text, '-', ''), 12))::bit(48)::bigint / 3600000 * 3600)"
    };
}

/// SQL of a name of a model or of a mod in the tables: its first [`MAX_NAME_CHARS`] characters. Names are parts of keys, and an
/// ingested trace may contain any name.
macro_rules! key_name {
    ($name:literal) => {
        concat!("left(", $name, ", 100)")
    };
}

mod calls;
mod days;
mod groups;
mod run_counts;

use super::scope::owners;
use super::text::clean;
use super::{Error, Store};
use crate::events::Scope;
use calls::CallGroups;
use chrono::{DateTime, Days, NaiveDate, NaiveTime, Utc};
use groups::Groups;
use serde::{Deserialize, Serialize};
use sqlx::FromRow;
use sqlx::postgres::{PgArguments, PgRow, Postgres};
use sqlx::query::QueryAs;
use std::collections::HashSet;
use utoipa::ToSchema;

pub use calls::{CallTime, CallTimeStep, ModCallStatistics, ModelCallTime};
pub(super) use calls::{MAX_CALL_MODS, MAX_CALL_US, measure_some};
pub use days::HourCount;
pub(super) use days::{count_days, count_hours};

/// Maximum number of days of a query.
pub const MAX_STATISTICS_DAYS: u32 = 3650;
/// Maximum number of days with time steps of one hour.
const MAX_HOURLY_DAYS: u32 = 7;
/// Maximum characters of names of models and mods in statistics.
const MAX_NAME_CHARS: usize = 100;

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
    /// Runs that were interrupted because their server ended.
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
    /// Returns the sum of these counts and `sign` times the counts of another group.
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
    /// Median time from the request to the first token in milliseconds, accurate to 10%; missing if not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_token_ms_p50: Option<f64>,
    /// The time within which 95% of the runs had their first token, in milliseconds, accurate to 10%.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_token_ms_p95: Option<f64>,
}

/// Statistics of the runs in a time step.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct TimeStep {
    /// Start of the hour or day.
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
    /// Start of the first day.
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
    /// Durations of mod calls by mod, largest total first. If the query names a mod, only its calls.
    pub mod_calls: Vec<ModCallStatistics>,
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
        let first = days::first_day(&mut snapshot).await?.unwrap_or(today).max(query.from.unwrap_or(NaiveDate::MIN));
        let counted: Vec<(NaiveDate, bool)> =
            sqlx::query_as("select day, has_mod_calls from run_stats_days where day >= $1")
                .bind(first)
                .fetch_all(&mut *snapshot)
                .await?;
        let hours: HashSet<DateTime<Utc>> = sqlx::query_scalar("select hour from run_stats_hours where hour >= $1")
            .bind(midnight(first))
            .fetch_all(&mut *snapshot)
            .await?
            .into_iter()
            .collect();
        let measured = counted.iter().filter(|(_, measured)| *measured).map(|(day, _)| *day).collect();
        let counted = counted.iter().map(|(day, _)| *day).collect();
        let mut groups = Groups::default();
        let model = query.model.as_deref().map(key_name);
        let used_mod = key_name(query.used_mod.as_deref().unwrap_or_default());
        let selection =
            Selection { owners: owners(scope), model: model.as_deref(), unit: query.unit, used_mod: &used_mod };
        let (counts, buckets) = run_counts::read_counted(&mut snapshot, &selection, first).await?;
        groups.add(counts, buckets);
        for span in days::uncounted_spans(first, today, &counted, &hours) {
            let (counts, buckets) = run_counts::count(&mut snapshot, &selection, span).await?;
            groups.add(counts, buckets);
        }
        let mut call_groups = CallGroups::default();
        call_groups.add(calls::read_counted(&mut snapshot, &selection, first).await?);
        for span in days::uncounted_spans(first, today, &measured, &hours) {
            call_groups.add(calls::count(&mut snapshot, &selection, span).await?);
        }
        // `first` also depends on the runs of other tenants, so it is not reported.
        let from = query.from.or(groups.first_day()).unwrap_or(today);
        Ok(Statistics { mod_calls: call_groups.finish(), ..groups.finish(from, query.unit) })
    }

    /// Counts the past hours of today and yesterday that have many runs.
    ///
    /// # Errors
    /// The database failed. The other hours are counted if it can be reached.
    pub async fn count_hours(&self, now: DateTime<Utc>, hours: HourCount) -> Result<(), Error> {
        Ok(days::count_hours(&self.inner.pool, now, hours).await?)
    }

    /// Measures the mod calls of runs of earlier versions, then counts the runs of the days before `today` that are not
    /// counted yet.
    ///
    /// # Errors
    /// The database failed. The other days are counted if it can be reached.
    pub async fn count_days(&self, today: NaiveDate) -> Result<(), Error> {
        while calls::measure_some(&self.inner.pool).await? {}
        Ok(days::count_days(&self.inner.pool, today).await?)
    }
}

/// The rows that a query reads.
struct Selection<'a> {
    /// Owners as in [`owners`].
    owners: Option<Vec<&'a str>>,
    model: Option<&'a str>,
    unit: StatisticsUnit,
    /// Name of the mod, or empty.
    used_mod: &'a str,
}

impl Selection<'_> {
    /// Returns a query with the owners as `$1`, the model as `$2`, the unit as `$3` and the mod as `$4`.
    fn query<'q, T>(&'q self, sql: &'static str) -> QueryAs<'q, Postgres, T, PgArguments>
    where
        T: for<'r> FromRow<'r, PgRow>,
    {
        sqlx::query_as(sql).bind(&self.owners).bind(self.model).bind(self.unit.as_str()).bind(self.used_mod)
    }
}

/// Shortens a name of a model or of a mod to the form in the tables.
fn key_name(name: &str) -> String {
    clean(name).chars().take(MAX_NAME_CHARS).collect()
}

fn midnight(day: NaiveDate) -> DateTime<Utc> {
    day.and_time(NaiveTime::MIN).and_utc()
}
