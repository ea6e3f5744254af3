//! Citus: PostgreSQL on several nodes. A coordinator executes all statements and distributes the tables' rows to workers.

use super::Error;
use super::pool::PgConnection;

/// Returns true if the database has the extension.
pub async fn is_installed(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select to_regclass('pg_catalog.pg_dist_local_group') is not null").fetch_one(connection).await
}

/// Returns an error for a worker node, because schema changes are only possible on the coordinator.
pub async fn check_coordinator(connection: &mut PgConnection) -> Result<(), Error> {
    if !is_installed(connection).await? {
        return Ok(());
    }
    let is_worker: bool = sqlx::query_scalar("select exists (select 1 from pg_dist_local_group where groupid <> 0)")
        .fetch_one(&mut *connection)
        .await?;
    if !is_worker {
        return Ok(());
    }
    let coordinator: Option<String> =
        sqlx::query_scalar("select nodename || ':' || nodeport from pg_dist_node where groupid = 0 limit 1")
            .fetch_optional(connection)
            .await?;
    Err(Error::WorkerNode { coordinator })
}
