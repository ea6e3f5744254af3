//! The steps that distribute a schema, as SQL.

use super::TablePlacement;
use super::tables::CitusTable;
use crate::store::Error;
use chrono::{Datelike, Months, NaiveDate};
use serde::Serialize;

/// Tables that are partitioned by time.
pub(super) const PARTITIONED: [&str; 6] = ["events", "mod_calls", "mod_logs", "actions", "attention", "run_columns"];
/// The table with which all others are colocated.
const RUNS: &str = "runs";
/// The distribution column.
const COLUMN: &str = "run_id";
/// Maximum number of partitions times shards. With more tables, planning and maintenance slow down.
const MAX_TABLES: u64 = 10_000;
/// Assumed number of daily partitions if no retention is configured.
const DAYS_WITHOUT_RETENTION: u64 = 365;

/// Time span of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, sqlx::Type)]
#[serde(rename_all = "lowercase")]
#[sqlx(type_name = "text", rename_all = "lowercase")]
pub enum PartitionUnit {
    /// A day.
    Day,
    /// A month.
    Month,
}

/// Configured time span of new partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Partitioning {
    /// A month if daily partitions would result in more than 10,000 tables, else a day.
    Automatic,
    /// This time span.
    Fixed(PartitionUnit),
}

/// Options of a distribution.
#[derive(Debug, Clone, Copy)]
pub struct DistributionOptions {
    /// Number of shards; `None` for `citus.shard_count` of the server.
    pub shards: Option<u32>,
    /// Time span of partitions.
    pub partitioning: Partitioning,
    /// Retention of runs in days; `None` for no limit.
    pub keep_days: Option<u32>,
}

/// The state of the schema before a distribution.
#[derive(Debug, Clone)]
pub(super) struct Schema {
    /// Tables that are not local.
    pub tables: Vec<CitusTable>,
    /// First day and day after the last one of each partition span.
    pub spans: Vec<(NaiveDate, NaiveDate)>,
    /// Time span of a partition.
    pub unit: PartitionUnit,
    /// True if `feedback` has a foreign key to `runs`.
    pub has_foreign_key: bool,
    /// `citus.shard_count` of the server.
    pub default_shards: u64,
}

/// A step of a distribution: statements that are executed in one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DistributionStep {
    /// The subject, e.g. `distribute events`.
    pub title: String,
    /// The statements.
    pub statements: Vec<String>,
}

impl Schema {
    fn find(&self, name: &str) -> Option<&CitusTable> {
        self.tables.iter().find(|table| table.name == name)
    }

    /// Returns the number of shards that tables have, or will have.
    pub fn shards(&self, options: &DistributionOptions) -> u64 {
        let existing = self.find(RUNS).filter(|table| table.placement() == TablePlacement::Distributed);
        let requested = options.shards.map_or(self.default_shards, u64::from);
        existing.and_then(|table| table.shards.try_into().ok()).unwrap_or(requested)
    }

    /// Returns the time span that new partitions will have.
    pub fn unit(&self, options: &DistributionOptions) -> PartitionUnit {
        match options.partitioning {
            Partitioning::Fixed(unit) => unit,
            Partitioning::Automatic if self.unit == PartitionUnit::Month => PartitionUnit::Month,
            Partitioning::Automatic => {
                let days = options.keep_days.map_or(DAYS_WITHOUT_RETENTION, u64::from);
                unit_for(self.shards(options), days.max(self.spans.len() as u64))
            }
        }
    }

    /// Returns the remaining steps; none if the schema is distributed already.
    pub fn steps(&self, options: &DistributionOptions) -> Result<Vec<DistributionStep>, Error> {
        let mut steps = Vec::new();
        let unit = self.unit(options);
        if unit != self.unit {
            let name = if unit == PartitionUnit::Month { "month" } else { "day" };
            steps.push(step(
                &format!("make a partition for each {name}"),
                [format!("update partitioning set unit = '{name}'")],
            ));
        }
        if unit == PartitionUnit::Month && PARTITIONED.iter().all(|table| self.find(table).is_none()) {
            steps.extend(self.months_to_merge().into_iter().map(|month| {
                step(
                    &format!("merge the partitions of {}", month.format("%Y-%m")),
                    [format!("select merge_partitions('{month}')")],
                )
            }));
        }
        let runs = self.is_distributed(RUNS)?;
        let feedback = self.is_distributed("feedback")?;
        if !runs || !feedback || !self.has_foreign_key {
            let mut statements = vec!["set local citus.multi_shard_modify_mode = 'sequential'".to_owned()];
            if self.has_foreign_key {
                statements.push("alter table feedback drop constraint feedback_run_id_fkey".to_owned());
            }
            if !runs {
                let shards = self.shards(options);
                statements.push(format!(
                    "select create_distributed_table('runs', '{COLUMN}', colocate_with => 'none', shard_count => {shards})"
                ));
            }
            if !feedback {
                statements.push(distribute("feedback"));
            }
            statements.push(
                "delete from feedback f where not exists (select 1 from runs r where r.run_id = f.run_id)".to_owned(),
            );
            statements.push(
                "alter table feedback add constraint feedback_run_id_fkey foreign key (run_id) references runs \
                 on delete cascade"
                    .to_owned(),
            );
            steps.push(step("distribute runs and feedback", statements));
            let local = [("runs", runs), ("feedback", feedback)].into_iter().filter(|(_, done)| !done);
            steps.extend(local.map(|(table, _)| truncate(table)));
        }
        for table in PARTITIONED {
            if !self.is_distributed(table)? {
                steps.push(step(&format!("distribute {table}"), [distribute(table)]));
                steps.push(truncate(table));
            }
        }
        match self.find("run_keys").map(CitusTable::placement) {
            Some(TablePlacement::Reference) => {}
            Some(_) => {
                let found = "distributed".to_owned();
                return Err(Error::DistributionPlan { table: "run_keys".into(), found, expected: "a reference table" });
            }
            None => {
                steps.push(step(
                    "copy run_keys to every node",
                    ["select create_reference_table('run_keys')".to_owned()],
                ));
                steps.push(truncate("run_keys"));
            }
        }
        Ok(steps)
    }

    /// Returns true for a table that is distributed as required, false for a local one.
    fn is_distributed(&self, name: &str) -> Result<bool, Error> {
        let Some(table) = self.find(name) else { return Ok(false) };
        let found = match &table.column {
            None => "a reference table".to_owned(),
            Some(column) if column != COLUMN => format!("distributed by {column}"),
            Some(_) => {
                let mismatch = self.find(RUNS).filter(|runs| runs.colocation != table.colocation);
                if mismatch.is_none() {
                    return Ok(true);
                }
                "not colocated with runs".to_owned()
            }
        };
        Err(Error::DistributionPlan {
            table: name.to_owned(),
            found,
            expected: "distributed by run_id, colocated with runs",
        })
    }

    /// Returns the first day of each month with several partitions.
    fn months_to_merge(&self) -> Vec<NaiveDate> {
        let first_of = |day: NaiveDate| day.with_day(1).unwrap_or(day);
        let mut months: Vec<NaiveDate> = self
            .spans
            .iter()
            .filter(|(first, until)| *first != first_of(*first) || *until != first_of(*first) + Months::new(1))
            .map(|(first, _)| first_of(*first))
            .collect();
        months.sort_unstable();
        months.dedup();
        months
    }
}

/// Returns the shortest time span with which the partitions of this number of days stay within the maximum number of
/// tables.
pub(super) fn unit_for(shards: u64, days: u64) -> PartitionUnit {
    if shards * PARTITIONED.len() as u64 * days > MAX_TABLES { PartitionUnit::Month } else { PartitionUnit::Day }
}

fn step(title: &str, statements: impl IntoIterator<Item = String>) -> DistributionStep {
    DistributionStep { title: title.to_owned(), statements: statements.into_iter().collect() }
}

fn distribute(table: &str) -> String {
    format!("select create_distributed_table('{table}', '{COLUMN}', colocate_with => 'runs')")
}

/// Returns the step that frees the coordinator's table: Citus copies the rows to the shards and leaves the originals.
fn truncate(table: &str) -> DistributionStep {
    let sql = format!("select truncate_local_data_after_distributing_table('{table}')");
    step(&format!("free the coordinator's copy of {table}"), [sql])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day(text: &str) -> NaiveDate {
        text.parse().unwrap()
    }

    fn schema() -> Schema {
        let spans = [("2026-10-31", "2026-11-01"), ("2026-11-22", "2026-11-23"), ("2026-11-23", "2026-11-24")];
        Schema {
            tables: Vec::new(),
            spans: spans.map(|(first, until)| (day(first), day(until))).to_vec(),
            unit: PartitionUnit::Day,
            has_foreign_key: true,
            default_shards: 32,
        }
    }

    const OPTIONS: DistributionOptions =
        DistributionOptions { shards: None, partitioning: Partitioning::Automatic, keep_days: None };

    fn distributed(name: &str) -> CitusTable {
        CitusTable { name: name.into(), column: Some("run_id".into()), colocation: 7, shards: 16 }
    }

    fn finished() -> Schema {
        let mut tables: Vec<CitusTable> =
            PARTITIONED.iter().chain(&["runs", "feedback"]).map(|name| distributed(name)).collect();
        tables.push(CitusTable { name: "run_keys".into(), column: None, colocation: 2, shards: 1 });
        Schema { tables, unit: PartitionUnit::Month, ..schema() }
    }

    #[test]
    fn distributed_schema_needs_no_step() {
        assert_eq!(finished().steps(&OPTIONS).unwrap(), []);
    }

    #[test]
    fn interrupted_distribution_is_continued() {
        let mut schema = finished();
        schema.tables.retain(|table| table.name != "actions" && table.name != "feedback");
        schema.has_foreign_key = false;
        let sql: Vec<String> = schema.steps(&OPTIONS).unwrap().into_iter().flat_map(|step| step.statements).collect();
        assert!(sql.iter().any(|sql| sql.contains("create_distributed_table('feedback'")), "{sql:?}");
        assert!(sql.iter().any(|sql| sql.contains("create_distributed_table('actions'")), "{sql:?}");
        assert!(!sql.iter().any(|sql| sql.contains("'runs', 'run_id'") || sql.contains("merge_partitions")), "{sql:?}");
    }

    #[test]
    fn table_distributed_in_another_way_is_rejected_with_a_remedy() {
        let mut schema = finished();
        schema.tables[0].column = Some("step".into());
        let error = schema.steps(&OPTIONS).unwrap_err().to_string();
        assert!(error.contains("'events' is distributed by step"), "{error}");
        assert!(error.contains("select undistribute_table('events')"), "{error}");
        schema.tables[0] = CitusTable { colocation: 8, ..distributed("events") };
        assert!(schema.steps(&OPTIONS).unwrap_err().to_string().contains("not colocated with runs"));
    }

    #[test]
    fn partitions_span_a_month_if_days_would_create_too_many_tables() {
        assert_eq!(unit_for(32, 52), PartitionUnit::Day);
        assert_eq!(unit_for(32, 53), PartitionUnit::Month);
        let few = DistributionOptions { shards: Some(8), keep_days: Some(200), ..OPTIONS };
        assert_eq!(schema().unit(&few), PartitionUnit::Day);
        assert_eq!(schema().unit(&OPTIONS), PartitionUnit::Month);
        assert_eq!(schema().months_to_merge(), [day("2026-10-01"), day("2026-11-01")]);
        let merged = Schema { spans: vec![(day("2026-11-01"), day("2026-12-01"))], ..schema() };
        assert!(merged.months_to_merge().is_empty());
    }
}
