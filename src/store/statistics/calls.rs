//! Durations of mod calls: per run, and by mod, model and time step.

use super::days::TimeSpan;
use super::{Selection, StatisticsUnit, midnight};
use crate::store::pool::{PgConnection, PgPool};
use crate::store::uuid_v7::first_id_at;
use chrono::{DateTime, NaiveDate, Utc};
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;
use uuid::Uuid;

/// Maximum sum of durations of a run, and maximum duration, in microseconds. An ingested trace may contain any number.
pub(in crate::store) const MAX_CALL_US: f64 = 1e12;
/// Maximum mods of a run whose calls are measured.
pub(in crate::store) const MAX_CALL_MODS: usize = 64;
/// Maximum runs that are measured in one transaction.
const MAX_MEASURED_RUNS: i64 = 200;

/// Durations of mod calls. Calls without a measured duration do not count.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, ToSchema)]
pub struct CallTime {
    /// Calls.
    pub calls: i64,
    /// Sum of their durations in milliseconds.
    pub total_ms: f64,
    /// Mean duration in milliseconds.
    pub mean_ms: f64,
    /// Longest duration in milliseconds.
    pub max_ms: f64,
}

/// Durations of mod calls in the runs of a time step.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct CallTimeStep {
    /// Start of the hour or day.
    pub at: DateTime<Utc>,
    /// Durations.
    #[serde(flatten)]
    pub time: CallTime,
}

/// Durations of mod calls in the runs of a model.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ModelCallTime {
    /// Name of the model; empty if the runs name none.
    pub model: String,
    /// Durations.
    #[serde(flatten)]
    pub time: CallTime,
}

/// Durations of the calls of a mod.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ModCallStatistics {
    /// Name of the mod.
    #[serde(rename = "mod")]
    pub name: String,
    /// Durations in all runs.
    #[serde(flatten)]
    pub time: CallTime,
    /// Time steps with calls, oldest first.
    pub steps: Vec<CallTimeStep>,
    /// Models by total duration, largest first.
    pub models: Vec<ModelCallTime>,
}

/// Statement that stores the durations of the mod calls of a run that an earlier version recorded, limited to
/// [`MAX_CALL_US`] and [`MAX_CALL_MODS`].
const MEASURE: &str = "
    update runs set (mod_call_names, mod_call_counts, mod_call_us, mod_call_max_us) =
        (select coalesce(array_agg(mod_name), '{}'), coalesce(array_agg(calls), '{}'), coalesce(array_agg(total), '{}'),
            coalesce(array_agg(slowest), '{}')
        from (select mod_name, count(*) as calls, round(least(sum(least(execution_time_ms, 1e9)) * 1000, 1e12))::bigint as total,
                round(max(least(execution_time_ms, 1e9)) * 1000)::bigint as slowest
            from mod_calls where run_id = $1 and execution_time_ms >= 0 and execution_time_ms < 'infinity'
            group by mod_name order by min(call_index) limit 64) measured)
    where run_id = $1 and mod_call_names is null and status <> 'running'";

/// Measures the mod calls of up to 200 ended runs that an earlier version recorded. Returns true if more such runs may exist.
/// Only one server measures at a time; the others return false.
pub(in crate::store) async fn measure_some(pool: &PgPool) -> Result<bool, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let is_free: bool =
        sqlx::query_scalar("select pg_try_advisory_xact_lock(7237120550122)").fetch_one(&mut *transaction).await?;
    if !is_free {
        return Ok(false);
    }
    let unmeasured: Vec<Uuid> = sqlx::query_scalar(
        "select run_id from runs where mod_call_names is null and status <> 'running' order by run_id limit $1",
    )
    .bind(MAX_MEASURED_RUNS)
    .fetch_all(&mut *transaction)
    .await?;
    for run_id in &unmeasured {
        sqlx::query(MEASURE).bind(run_id).execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    Ok(unmeasured.len() as i64 == MAX_MEASURED_RUNS)
}

/// SQL of the durations of mod calls in the ended runs from the id `$from` up to and without the id `$until`.
macro_rules! measured {
    ($from:literal, $until:literal) => {
        concat!("
    select ", hour!(), " as hour,
        coalesce(owner, '') as owner, coalesce(", key_name!("model"), ", '') as model, ", key_name!("call.mod"), " as mod,
        call.calls, call.total_us, call.max_us
    from runs, unnest(mod_call_names, mod_call_counts, mod_call_us, mod_call_max_us) as call (mod, calls, total_us, max_us)
    where run_id >= ", $from, "::uuid and run_id < ", $until, "::uuid
        and status <> 'running' and deletion is null")
    };
}

/// SQL of the sums of the columns of `mod_call_stats`.
macro_rules! summed {
    () => {
        "sum(calls)::bigint as calls, sum(total_us)::bigint as total_us, max(max_us) as max_us"
    };
}

/// Durations of the calls of a mod in the runs of a step or of a model.
#[derive(sqlx::FromRow)]
pub(super) struct CallRow {
    /// `None` for the sums of a model.
    step: Option<DateTime<Utc>>,
    /// `None` for the sums of a step.
    model: Option<String>,
    #[sqlx(rename = "mod")]
    used_mod: String,
    #[sqlx(flatten)]
    sums: Sums,
}

/// Number of calls, with the sum and the maximum of their durations.
#[derive(Debug, Clone, Copy, Default, sqlx::FromRow)]
struct Sums {
    calls: i64,
    total_us: i64,
    max_us: i64,
}

impl Sums {
    fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.total_us = self.total_us.saturating_add(other.total_us);
        self.max_us = self.max_us.max(other.max_us);
    }

    fn time(self) -> CallTime {
        let total_ms = self.total_us as f64 / 1e3;
        let mean_ms = total_ms / self.calls.max(1) as f64;
        CallTime { calls: self.calls, total_ms, mean_ms, max_ms: self.max_us as f64 / 1e3 }
    }
}

/// SQL that sums rows by mod and step, and by mod and model; only those of the mod `$4`, if it is not empty.
macro_rules! grouped {
    ($rows:expr) => {
        concat!(
            "select step, model, mod, ",
            summed!(),
            " from (select date_trunc($3, hour, 'utc') as step, * from ",
            $rows,
            " where ($1::text[] is null or owner = any($1)) and ($2::text is null or model = $2) and ($4 = '' or mod = $4)) rows
            group by grouping sets ((mod, step), (mod, model))"
        )
    };
}

/// Reads the stored sums from a day on.
pub(super) async fn read_counted(
    connection: &mut PgConnection,
    selection: &Selection<'_>,
    first: NaiveDate,
) -> Result<Vec<CallRow>, sqlx::Error> {
    let read = match selection.unit {
        StatisticsUnit::Hour => grouped!("(select * from mod_call_stats where hour >= $5) stored"),
        StatisticsUnit::Day => grouped!("(select * from mod_call_stats_by_day where hour >= $5) stored"),
    };
    selection.query(read).bind(midnight(first)).fetch_all(connection).await
}

/// Sums the durations in the runs of a span without stored sums.
pub(super) async fn count(
    connection: &mut PgConnection,
    selection: &Selection<'_>,
    span: TimeSpan,
) -> Result<Vec<CallRow>, sqlx::Error> {
    let count = grouped!(concat!("(", measured!("$5", "$6"), ") measured"));
    selection.query(count).bind(first_id_at(span.0)).bind(first_id_at(span.1)).fetch_all(connection).await
}

/// Returns true if all ended runs of a span are measured.
pub(super) async fn is_measured(connection: &mut PgConnection, span: TimeSpan) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(
        "select not exists (select 1 from runs where mod_call_names is null and status <> 'running' and deletion is null
            and run_id >= $1 and run_id < $2)",
    )
    .bind(first_id_at(span.0))
    .bind(first_id_at(span.1))
    .fetch_one(connection)
    .await
}

/// Deletes the stored sums of a span.
pub(super) async fn delete(connection: &mut PgConnection, span: TimeSpan) -> Result<(), sqlx::Error> {
    let delete = "delete from mod_call_stats where hour >= $1 and hour < $2";
    sqlx::query(delete).bind(span.0).bind(span.1).execute(connection).await.map(drop)
}

/// Stores the sums of a span whose runs are measured, in place of the stored ones.
pub(super) async fn replace(connection: &mut PgConnection, span: TimeSpan) -> Result<(), sqlx::Error> {
    delete(connection, span).await?;
    let insert = concat!(
        "insert into mod_call_stats (hour, owner, model, mod, calls, total_us, max_us) select hour, owner, model, mod, ",
        summed!(),
        " from (",
        measured!("$1", "$2"),
        ") measured group by hour, owner, model, mod"
    );
    let insert = sqlx::query(insert).bind(first_id_at(span.0)).bind(first_id_at(span.1));
    insert.execute(connection).await.map(drop)
}

/// Adds the durations in runs of a span to the stored sums.
pub(super) async fn add(connection: &mut PgConnection, span: TimeSpan, run_ids: &[Uuid]) -> Result<(), sqlx::Error> {
    let insert = concat!(
        "insert into mod_call_stats as stored (hour, owner, model, mod, calls, total_us, max_us)
        select hour, owner, model, mod, ",
        summed!(),
        " from (",
        measured!("$1", "$2"),
        " and run_id = any($3)) measured group by hour, owner, model, mod
        on conflict (hour, owner, model, mod) do update set calls = stored.calls + excluded.calls,
            total_us = stored.total_us + excluded.total_us, max_us = greatest(stored.max_us, excluded.max_us)"
    );
    let insert = sqlx::query(insert).bind(first_id_at(span.0)).bind(first_id_at(span.1)).bind(run_ids);
    insert.execute(connection).await.map(drop)
}

/// Durations of mod calls while rows are added.
#[derive(Default)]
pub(super) struct CallGroups(BTreeMap<String, CallGroup>);

#[derive(Default)]
struct CallGroup {
    total: Sums,
    steps: BTreeMap<DateTime<Utc>, Sums>,
    models: BTreeMap<String, Sums>,
}

impl CallGroups {
    /// Adds rows.
    pub(super) fn add(&mut self, rows: Vec<CallRow>) {
        for CallRow { step, model, used_mod, sums } in rows {
            let group = self.0.entry(used_mod).or_default();
            if let Some(step) = step {
                group.total.add(sums);
                group.steps.entry(step).or_default().add(sums);
            }
            if let Some(model) = model {
                group.models.entry(model).or_default().add(sums);
            }
        }
    }

    /// Returns the durations by mod, largest total first.
    pub(super) fn finish(self) -> Vec<ModCallStatistics> {
        let mut groups: Vec<(String, CallGroup)> = self.0.into_iter().collect();
        groups.sort_by_key(|(_, group)| std::cmp::Reverse(group.total.total_us));
        let statistics = groups.into_iter().map(|(name, group)| {
            let mut models: Vec<(String, Sums)> = group.models.into_iter().collect();
            models.sort_by_key(|(_, sums)| std::cmp::Reverse(sums.total_us));
            ModCallStatistics {
                name,
                time: group.total.time(),
                steps: group.steps.into_iter().map(|(at, sums)| CallTimeStep { at, time: sums.time() }).collect(),
                models: models.into_iter().map(|(model, sums)| ModelCallTime { model, time: sums.time() }).collect(),
            }
        });
        statistics.collect()
    }
}
