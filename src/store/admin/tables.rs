//! The tables of the schema and the placement of their rows.

use crate::store::pool::PgConnection;
use serde::Serialize;
use sqlx::{FromRow, QueryBuilder};

/// Placement of a table's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TablePlacement {
    /// In the database itself; with Citus in the coordinator's database.
    Local,
    /// In shards, by the value of a column of each row.
    Distributed,
    /// On every node.
    Reference,
}

/// A distributed table or a reference table, from the catalog of Citus.
#[derive(Debug, Clone, PartialEq, Eq, FromRow)]
pub(super) struct CitusTable {
    pub name: String,
    /// The distribution column; `None` for a reference table.
    pub column: Option<String>,
    /// Citus's colocation group: in tables of one group, shards of equal values are on one node.
    pub colocation: i64,
    pub shards: i64,
}

impl CitusTable {
    pub fn placement(&self) -> TablePlacement {
        if self.column.is_some() { TablePlacement::Distributed } else { TablePlacement::Reference }
    }
}

/// Returns the tables that are not local, without their partitions.
pub(super) async fn citus_tables(connection: &mut PgConnection) -> Result<Vec<CitusTable>, sqlx::Error> {
    sqlx::query_as(
        "select c.relname::text as name, column_to_column_name(p.logicalrelid, p.partkey) as \"column\",
            p.colocationid::bigint as colocation,
            (select count(*) from pg_dist_shard s where s.logicalrelid = p.logicalrelid) as shards
        from pg_dist_partition p join pg_class c on c.oid = p.logicalrelid
        where c.relnamespace = current_schema()::text::regnamespace and not c.relispartition
            and (p.partkey is not null or p.repmodel = 't')",
    )
    .fetch_all(connection)
    .await
}

/// A node that may hold shards, or the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, FromRow)]
pub(super) struct ClusterNode {
    pub host: String,
    pub port: i32,
    pub is_coordinator: bool,
    pub is_active: bool,
    pub takes_shards: bool,
}

impl ClusterNode {
    pub fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// Returns all primary nodes, the coordinator first.
pub(super) async fn nodes(connection: &mut PgConnection) -> Result<Vec<ClusterNode>, sqlx::Error> {
    sqlx::query_as(
        "select nodename as host, nodeport as port, groupid = 0 as is_coordinator, isactive as is_active,
            shouldhaveshards as takes_shards
        from pg_dist_node where noderole = 'primary' order by groupid <> 0, nodeid",
    )
    .fetch_all(connection)
    .await
}

/// Returns the addresses of the nodes that the coordinator cannot reach.
pub(super) async fn unreachable_nodes(connection: &mut PgConnection) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar(
        "select to_nodename || ':' || to_nodeport from citus_check_cluster_node_health() h
        join pg_dist_node n on n.groupid = 0 and n.nodename = h.from_nodename and n.nodeport = h.from_nodeport
        where h.result is not true order by 1",
    )
    .fetch_all(connection)
    .await
}

/// Returns the value of a setting of the server or of Citus.
pub(super) async fn setting(connection: &mut PgConnection, name: &str) -> Result<Option<String>, sqlx::Error> {
    QueryBuilder::new("select current_setting(")
        .push_bind(name)
        .push(", true)")
        .build_query_scalar()
        .fetch_one(connection)
        .await
}
