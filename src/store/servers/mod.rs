//! The servers on one database: their list, their liveness, and their notifications to each other.
//!
//! Each server has a row in `servers` that it renews by heartbeats, and one dedicated connection, see [`link`]. The runs of
//! a dead server are marked as interrupted by any of the others.

pub(super) mod link;
mod liveness;
pub(super) mod notification;

use super::scope::{owned, owners};
use super::writer::RunWriter;
use super::{Error, LiveHub, Store};
use crate::events::{RunId, RunStatus, Scope, Tenant, system};
use chrono::{DateTime, Utc};
use sqlx::postgres::PgExecutor;
use uuid::Uuid;

/// The data that a server publishes for the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Announcement {
    /// Its address; `None` if the others cannot reach it.
    pub url: Option<String>,
    /// Names of its models.
    pub models: Vec<String>,
}

/// A server on the database.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct ServerInfo {
    /// Its id, new with each start.
    pub server_id: Uuid,
    /// Its address, if it announces one.
    pub url: Option<String>,
    /// Names of its models.
    pub models: Vec<String>,
    /// Time of its start, by the database's clock.
    pub started_at: DateTime<Utc>,
}

impl Store {
    /// Returns the id of this server.
    #[must_use]
    pub fn server_id(&self) -> Uuid {
        self.inner.server_id
    }

    /// Changes the published data of this server.
    pub fn announce(&self, announcement: Announcement) {
        self.inner.announcement.send_if_modified(|now| {
            let is_changed = *now != announcement;
            *now = announcement;
            is_changed
        });
    }

    /// Returns the other servers on the database.
    ///
    /// # Errors
    /// The database failed.
    pub async fn other_servers(&self) -> Result<Vec<ServerInfo>, Error> {
        let servers = sqlx::query_as(
            "select server_id, url, models, started_at from servers where server_id <> $1 order by started_at, server_id",
        );
        Ok(servers.bind(self.inner.server_id).fetch_all(&self.inner.pool).await?)
    }

    /// Returns the other server that generates a run; `None` if this one does, if the run is over or not covered
    /// by the scope, or if that server is not listed.
    ///
    /// # Errors
    /// The database failed.
    pub async fn generating_server(&self, scope: &Scope, run_id: RunId) -> Result<Option<ServerInfo>, Error> {
        let server: Option<Option<Uuid>> = sqlx::query_scalar(concat!(
            "select server_id from runs where run_id = $1 and status = 'running' and ",
            owned!(2)
        ))
        .bind(run_id.0)
        .bind(owners(scope))
        .fetch_optional(&self.inner.pool)
        .await?;
        let Some(server) = server.flatten().filter(|server| *server != self.inner.server_id) else { return Ok(None) };
        let found = sqlx::query_as("select server_id, url, models, started_at from servers where server_id = $1");
        Ok(found.bind(server).fetch_optional(&self.inner.pool).await?)
    }

    /// Returns a secret shared by all servers on the database, and creates it on the first call.
    ///
    /// # Errors
    /// The database failed.
    pub async fn shared_secret(&self, name: &str) -> Result<Vec<u8>, Error> {
        let random: [u8; 32] = system::random();
        sqlx::query("insert into shared_secrets (name, secret) values ($1, $2) on conflict (name) do nothing")
            .bind(name)
            .bind(&random[..])
            .execute(&self.inner.pool)
            .await?;
        let secret = sqlx::query_scalar("select secret from shared_secrets where name = $1");
        Ok(secret.bind(name).fetch_one(&self.inner.pool).await?)
    }
}

/// Inserts or renews the row of this server.
pub(super) async fn renew_heartbeat(
    executor: impl PgExecutor<'_>,
    server_id: Uuid,
    announcement: &Announcement,
) -> Result<DateTime<Utc>, sqlx::Error> {
    sqlx::query_scalar(
        "insert into servers (server_id, url, models) values ($1, $2, $3)
        on conflict (server_id) do update set url = excluded.url, models = excluded.models,
            heartbeat = servers.heartbeat + 1, seen_at = clock_timestamp()
        returning seen_at",
    )
    .bind(server_id)
    .bind(announcement.url.as_deref())
    .bind(&announcement.models)
    .fetch_one(executor)
    .await
}

/// Returns the servers that are listed or have running runs, each with its count of heartbeats.
pub(super) async fn heartbeats<'c, E>(executor: E) -> Result<Vec<(Uuid, Option<i64>)>, sqlx::Error>
where
    E: PgExecutor<'c>,
{
    // Two reads in one statement, without a join, which Citus could not execute.
    sqlx::query_as(
        "select server_id, max(heartbeat) from (
            select server_id, heartbeat from servers
            union all
            select coalesce(server_id, '00000000-0000-0000-0000-000000000000'), null::bigint from runs
                where status = 'running'
        ) known group by server_id",
    )
    .fetch_all(executor)
    .await
}

/// Marks the runs of a dead server as interrupted, and removes the server from the list unless it has come back. Returns
/// the number of marked runs.
pub(super) async fn interrupt_runs_of(
    writer: &RunWriter,
    live: &LiveHub,
    dead: Uuid,
    count: Option<i64>,
) -> Result<usize, Error> {
    let runs: Vec<(Uuid, Option<String>)> = sqlx::query_as(
        "select run_id, owner from runs where status = 'running'
            and coalesce(server_id, '00000000-0000-0000-0000-000000000000') = $1",
    )
    .bind(dead)
    .fetch_all(&writer.pool)
    .await?;
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()").fetch_one(&writer.pool).await?;
    let mut marked = 0;
    for (run_id, owner) in runs.into_iter().map(|(run_id, owner)| (RunId(run_id), owner.map(Tenant::from))) {
        match writer.interrupt(run_id, now).await {
            Ok(true) => {
                live.report_change(run_id, owner, RunStatus::Interrupted);
                marked += 1;
            }
            Ok(false) => {}
            Err(error @ Error::Unavailable(_)) => return Err(error),
            // The other runs must not wait for this one.
            Err(error) => tracing::error!(run.id = %run_id, %error, "cannot mark a run as interrupted"),
        }
    }
    sqlx::query("delete from servers where server_id = $1 and heartbeat = coalesce($2, heartbeat)")
        .bind(dead)
        .bind(count)
        .execute(&writer.pool)
        .await?;
    Ok(marked)
}
