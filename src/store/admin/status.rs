//! Status of the database.

use super::plan::{PARTITIONED, PartitionUnit};
use super::tables::{CitusTable, TablePlacement, citus_tables, nodes, setting, unreachable_nodes};
use super::{Admin, advice};
use crate::store::error::{READ_ONLY, is_transient};
use crate::store::spool::{Spool, SpoolStatus};
use crate::store::{Error, citus, migrate};
use chrono::NaiveDate;
use serde::Serialize;

/// Versions of the server and of its schema.
#[derive(Debug, Clone)]
pub struct DatabaseVersion {
    /// Version of PostgreSQL.
    pub server: String,
    /// Version of the schema; `None` if the next start of Thunder creates or updates it.
    pub schema: Option<i32>,
}

/// The status of the database, its tables and the spool files.
#[derive(Debug, Clone, Serialize)]
pub struct DatabaseStatus {
    /// Version of PostgreSQL.
    pub server_version: String,
    /// Version of the schema.
    pub schema_version: i32,
    /// Number of runs; `None` if a node with some of them cannot be reached.
    pub runs: Option<u64>,
    /// Disk space of all tables with their indexes, on all nodes.
    pub bytes: u64,
    /// The tables, largest first.
    pub tables: Vec<TableStatus>,
    /// Partitions of the large tables.
    pub partitions: PartitionStatus,
    /// The nodes of Citus; `None` if the database has no Citus.
    pub citus: Option<CitusStatus>,
    /// Records in spool files that are not stored in the database yet.
    pub spool: SpoolStatus,
}

/// A table with its partitions.
#[derive(Debug, Clone, Serialize)]
pub struct TableStatus {
    /// Name of the table.
    pub name: String,
    /// Placement of its rows.
    pub placement: TablePlacement,
    /// Number of shards; 0 for a local table.
    pub shards: u64,
    /// Number of partitions; 0 for a table without partitions.
    pub partitions: u64,
    /// Disk space with indexes, on all nodes.
    pub bytes: u64,
}

/// Partitions of the large tables.
#[derive(Debug, Clone, Serialize)]
pub struct PartitionStatus {
    /// Time span of new partitions.
    pub unit: PartitionUnit,
    /// Number of time spans that have partitions.
    pub count: u64,
    /// First day of the oldest partition; `None` if there are none.
    pub first_day: Option<NaiveDate>,
    /// Last day of the newest partition.
    pub last_day: Option<NaiveDate>,
}

/// The nodes of Citus.
#[derive(Debug, Clone, Serialize)]
pub struct CitusStatus {
    /// Version of the extension.
    pub version: String,
    /// `citus.shard_count`: number of shards that a newly distributed table has.
    pub shard_count: u64,
    /// Number of shards of all partitions, on all nodes; each is a table.
    pub shard_tables: u64,
    /// The nodes, the coordinator first.
    pub nodes: Vec<NodeStatus>,
    /// Recommendations about the number of shards.
    pub advice: Vec<String>,
}

/// A node of Citus.
#[derive(Debug, Clone, Serialize)]
pub struct NodeStatus {
    /// Host and port.
    pub address: String,
    /// True for the coordinator.
    pub is_coordinator: bool,
    /// True if Citus uses the node.
    pub is_active: bool,
    /// True if the coordinator can connect to it.
    pub is_reachable: bool,
    /// Number of shards, including those of partitions.
    pub shards: u64,
    /// Disk space of these shards; 0 if the node cannot be reached.
    pub bytes: u64,
}

impl Admin {
    /// Returns the versions of server and schema.
    ///
    /// # Errors
    /// The schema is newer than this release, or the database failed.
    pub async fn version(&mut self) -> Result<DatabaseVersion, Error> {
        let schema = match migrate::check_current(&mut self.connection).await {
            Ok(schema) => Some(schema),
            Err(Error::OldSchema { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(DatabaseVersion { server: self.server_version().await?, schema })
    }

    /// Checks that tables can be created, which every start and every new day need. Changes nothing.
    ///
    /// # Errors
    /// The server is read-only, or the role lacks the privilege.
    pub async fn check_writable(&mut self) -> Result<(), Error> {
        let connection = &mut self.connection;
        let is_read_only: bool = sqlx::query_scalar("select current_setting('transaction_read_only') = 'on'")
            .fetch_one(&mut *connection)
            .await?;
        if is_read_only {
            return Err(Error::ReadOnly(READ_ONLY));
        }
        connection.begin().await?;
        let created = sqlx::raw_sql("create table thunder_check ()").execute(&mut *connection).await;
        connection.end("rollback").await?;
        Ok(created.map(drop)?)
    }

    async fn server_version(&mut self) -> Result<String, Error> {
        Ok(sqlx::query_scalar("select current_setting('server_version')").fetch_one(&mut self.connection).await?)
    }

    /// Returns the status of the database.
    ///
    /// # Errors
    /// The schema is not up to date, or the database failed.
    pub async fn status(&mut self) -> Result<DatabaseStatus, Error> {
        let schema_version = migrate::check_current(&mut self.connection).await?;
        let has_citus = citus::is_installed(&mut self.connection).await?;
        let server_version = self.server_version().await?;
        let connection = &mut self.connection;
        let distributed = if has_citus { citus_tables(connection).await? } else { Vec::new() };
        let runs: Option<i64> = match sqlx::query_scalar("select count(*) from runs").fetch_one(&mut *connection).await
        {
            Err(error) if has_citus && is_transient(&error) => None,
            counted => Some(counted?),
        };
        let tables = self.tables(&distributed).await?;
        let partitions = self.partitions().await?;
        let citus = if has_citus { Some(self.citus(&tables, partitions.unit).await?) } else { None };
        Ok(DatabaseStatus {
            server_version,
            schema_version,
            runs: runs.map(i64::unsigned_abs),
            bytes: tables.iter().map(|table| table.bytes).sum(),
            tables,
            partitions,
            citus,
            spool: Spool::status(&self.data_dir.join("spool"))?,
        })
    }

    async fn tables(&mut self, distributed: &[CitusTable]) -> Result<Vec<TableStatus>, Error> {
        let tables: Vec<(String, i64, i64)> = sqlx::query_as(
            "with tables as (
                select c.oid, c.relname::text as name from pg_class c
                where c.relnamespace = current_schema()::text::regnamespace and c.relkind in ('r', 'p')
                    and not c.relispartition
                    and not exists (select 1 from pg_depend d where d.objid = c.oid and d.deptype = 'e')
            ), parts as (
                select name, oid::regclass as relation, 0 as is_partition from tables
                union all
                select t.name, i.inhrelid::regclass, 1 from tables t join pg_inherits i on i.inhparent = t.oid
            )
            select name, sum(is_partition)::bigint, sum(s.bytes)::bigint
            from parts join table_sizes(array(select relation from parts)) s on s.relation = parts.relation
            group by name order by 3 desc, 1",
        )
        .fetch_all(&mut self.connection)
        .await?;
        let status = |(name, partitions, bytes): (String, i64, i64)| {
            let distributed = distributed.iter().find(|table| table.name == name);
            TableStatus {
                placement: distributed.map_or(TablePlacement::Local, CitusTable::placement),
                shards: distributed.map_or(0, |table| table.shards.unsigned_abs()),
                name,
                partitions: partitions.unsigned_abs(),
                bytes: bytes.unsigned_abs(),
            }
        };
        Ok(tables.into_iter().map(status).collect())
    }

    async fn partitions(&mut self) -> Result<PartitionStatus, Error> {
        let (unit, count, first_day, next_day): (PartitionUnit, i64, Option<NaiveDate>, Option<NaiveDate>) =
            sqlx::query_as(
                "select unit, count(distinct p.first_day), min(p.first_day), max(p.next_day)
                from partitioning left join run_partitions p on true group by unit",
            )
            .fetch_one(&mut self.connection)
            .await?;
        let last_day = next_day.and_then(|day| day.pred_opt());
        Ok(PartitionStatus { unit, count: count.unsigned_abs(), first_day, last_day })
    }

    async fn citus(&mut self, tables: &[TableStatus], unit: PartitionUnit) -> Result<CitusStatus, Error> {
        let connection = &mut self.connection;
        let version = sqlx::query_scalar("select extversion from pg_extension where extname = 'citus'")
            .fetch_one(&mut *connection)
            .await?;
        let shard_count = setting(connection, "citus.shard_count").await?;
        let shard_count = shard_count.and_then(|text| text.parse().ok()).unwrap_or_default();
        let unreachable = unreachable_nodes(connection).await?;
        let shards_by_node: Vec<(String, i64, i64)> = sqlx::query_as(
            "select n.nodename || ':' || n.nodeport, count(*), coalesce(sum(z.size), 0)::bigint
            from pg_dist_placement p join pg_dist_node n on n.groupid = p.groupid
            left join (select shard_id, max(size) as size from citus_shard_sizes() group by shard_id) z on z.shard_id = p.shardid
            group by 1",
        )
        .fetch_all(&mut *connection)
        .await?;
        let nodes = nodes(connection).await?;
        let shard_nodes = nodes.iter().filter(|node| node.takes_shards && node.is_active).count() as u64;
        let runs = tables.iter().find(|table| table.name == "runs").map_or(0, |table| table.shards);
        let nodes = nodes.into_iter().map(|node| {
            let address = node.address();
            let shards = shards_by_node.iter().find(|(name, ..)| *name == address);
            NodeStatus {
                is_coordinator: node.is_coordinator,
                is_active: node.is_active,
                is_reachable: !unreachable.contains(&address),
                shards: shards.map_or(0, |(_, shards, _)| shards.unsigned_abs()),
                bytes: shards.map_or(0, |(.., bytes)| bytes.unsigned_abs()),
                address,
            }
        });
        let partitioned = tables.iter().filter(|table| PARTITIONED.contains(&table.name.as_str()));
        Ok(CitusStatus {
            version,
            shard_count,
            shard_tables: partitioned.map(|table| table.shards * table.partitions).sum(),
            nodes: nodes.collect(),
            advice: advice::advice(if runs > 0 { runs } else { shard_count }, shard_nodes, unit),
        })
    }
}
