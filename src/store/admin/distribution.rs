//! Distribution of the tables over the nodes of Citus.

use super::plan::{DistributionOptions, DistributionStep, PartitionUnit, Schema};
use super::tables::{ClusterNode, citus_tables, nodes, setting, unreachable_nodes};
use super::{Admin, advice};
use crate::store::{Error, citus, migrate};
use chrono::NaiveDate;
use sqlx::{Connection as _, QueryBuilder};
use std::time::{Duration, Instant};

/// Citus' own default of `citus.shard_count`.
const DEFAULT_SHARDS: u64 = 32;

/// The plan of `thunder db distribute`.
#[derive(Debug, Clone)]
pub struct DistributionPlan {
    /// Version of Citus; `None` if the database has no Citus.
    pub citus: Option<String>,
    /// Reasons that prevent the steps, one sentence each.
    pub obstacles: Vec<String>,
    /// The steps that are still to be executed.
    pub steps: Vec<DistributionStep>,
    /// Number of shards that tables will have.
    pub shards: u64,
    /// Time span that new partitions will have.
    pub unit: PartitionUnit,
    /// Recommendations on the number of shards and partitions.
    pub advice: Vec<String>,
}

/// The result of a step.
#[derive(Debug, Clone, Copy)]
pub struct StepResult {
    /// Time that the step took.
    pub elapsed: Duration,
}

impl Admin {
    /// Brings the schema up to date.
    ///
    /// # Errors
    /// The database failed, or its schema belongs to a later release.
    pub async fn migrate(&mut self, progress: impl Fn(&str)) -> Result<(), Error> {
        let mut connection = self.addresses.direct().await?;
        migrate::migrate(&self.addresses, &mut connection, &progress).await?;
        Ok(connection.close().await?)
    }

    /// Returns the steps that distribute the schema and the obstacles to them, without executing anything.
    ///
    /// # Errors
    /// The schema is not up to date, a table is distributed in another way, or the database failed.
    pub async fn distribution(&mut self, options: &DistributionOptions) -> Result<DistributionPlan, Error> {
        migrate::check_current(&mut self.connection).await?;
        let has_citus = citus::is_installed(&mut self.connection).await?;
        let schema = self.schema(has_citus).await?;
        let (citus, nodes, obstacles) = if has_citus {
            self.cluster().await?
        } else {
            (None, Vec::new(), vec![self.missing_citus_reason().await?])
        };
        let (shards, unit) = (schema.shards(options), schema.unit(options));
        let shard_nodes = nodes.iter().filter(|node| node.takes_shards && node.is_active).count() as u64;
        let advice = if has_citus { advice::advice(shards, shard_nodes, unit) } else { Vec::new() };
        Ok(DistributionPlan { citus, obstacles, steps: schema.steps(options)?, shards, unit, advice })
    }

    /// Executes a step in one transaction.
    ///
    /// # Errors
    /// The database rejected a statement; the step was rolled back.
    pub async fn execute(&mut self, step: &DistributionStep) -> Result<StepResult, Error> {
        let begin = Instant::now();
        let mut transaction = self.connection.raw().begin().await?;
        for statement in &step.statements {
            let sql = QueryBuilder::<sqlx::Postgres>::new(statement.as_str()).into_sql();
            sqlx::raw_sql(sql).execute(&mut *transaction).await?;
        }
        transaction.commit().await?;
        Ok(StepResult { elapsed: begin.elapsed() })
    }

    async fn schema(&mut self, has_citus: bool) -> Result<Schema, Error> {
        let connection = &mut self.connection;
        let tables = if has_citus { citus_tables(connection).await? } else { Vec::new() };
        let spans: Vec<(NaiveDate, NaiveDate)> =
            sqlx::query_as("select distinct first_day, next_day from run_partitions order by 1")
                .fetch_all(&mut *connection)
                .await?;
        let unit: PartitionUnit =
            sqlx::query_scalar("select unit from partitioning").fetch_one(&mut *connection).await?;
        let has_foreign_key: bool = sqlx::query_scalar(
            "select exists (select 1 from pg_constraint
            where conrelid = 'feedback'::regclass and conname = 'feedback_run_id_fkey')",
        )
        .fetch_one(&mut *connection)
        .await?;
        let default_shards = setting(connection, "citus.shard_count").await?;
        let default_shards = default_shards.and_then(|text| text.parse().ok()).unwrap_or(DEFAULT_SHARDS);
        Ok(Schema { tables, spans, unit, has_foreign_key, default_shards })
    }

    /// Returns the version of Citus, the nodes, and the problems of the nodes.
    async fn cluster(&mut self) -> Result<(Option<String>, Vec<ClusterNode>, Vec<String>), Error> {
        let connection = &mut self.connection;
        let version: Option<String> = sqlx::query_scalar("select extversion from pg_extension where extname = 'citus'")
            .fetch_optional(&mut *connection)
            .await?;
        let nodes = nodes(connection).await?;
        let mut obstacles = Vec::new();
        if !nodes.iter().any(|node| node.takes_shards && node.is_active) {
            obstacles.push(
                "no node of the cluster accepts shards: add workers with select citus_add_node('host', 5432)"
                    .to_owned(),
            );
        }
        for node in nodes.iter().filter(|node| !node.is_active) {
            obstacles.push(format!(
                "the node {} is not active: select citus_activate_node('{}', {})",
                node.address(),
                node.host,
                node.port
            ));
        }
        for address in unreachable_nodes(connection).await? {
            obstacles.push(format!(
                "the coordinator cannot reach the node {address}: start it, or remove it with citus_remove_node"
            ));
        }
        Ok((version, nodes, obstacles))
    }

    /// Returns the reason why the database has no Citus, and the remedy.
    async fn missing_citus_reason(&mut self) -> Result<String, Error> {
        let is_available: bool =
            sqlx::query_scalar("select exists (select 1 from pg_available_extensions where name = 'citus')")
                .fetch_one(&mut self.connection)
                .await?;
        // Only some roles can read `shared_preload_libraries`.
        let is_loaded = setting(&mut self.connection, "citus.shard_count").await?.is_some();
        Ok(match (self.embedded.is_some(), is_available, is_loaded) {
            (true, ..) => "the embedded database has no Citus: give the coordinator's address with --database-url".to_owned(),
            (_, false, _) => {
                "the server has no Citus: install it on every node (https://docs.citusdata.com), add it to \
                 shared_preload_libraries, and restart"
                    .to_owned()
            }
            (_, true, false) => {
                "Citus is installed but not loaded: add it to shared_preload_libraries on every node, and restart".to_owned()
            }
            (_, true, true) => {
                "the database has no extension citus: run create extension citus in the database of this name on every node, \
                 then select citus_set_coordinator_host('host', 5432) and select citus_add_node('host', 5432) for each worker"
                    .to_owned()
            }
        })
    }
}
