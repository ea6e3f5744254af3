//! What must happen now and then: partitions ahead of time, days that need not be kept dropped, and runs of dead servers
//! marked as interrupted.
//!
//! Each Thunder holds an advisory lock under its `server_id` on a connection of its own. The database lets go of it when
//! that connection ends, however it ends; whoever can take the lock knows that its owner is dead.

use super::retention::{Retention, prune};
use super::{Error, migrate, writer};
use crate::events::RunId;
use chrono::Utc;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{Connection, PgPool};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;
use uuid::Uuid;

/// How often the connection is tried.
const PULSE: Duration = Duration::from_secs(5);
/// After so many pulses, the first time earlier: a server that was killed a moment ago may still seem alive.
const SWEEP_PULSES: u32 = 12;
/// A new day's partitions are made days ahead, and days go one at a time, so this need not be often.
const PARTITION_PULSES: u32 = 720;

/// Opens the connection that says that we live.
pub async fn announce(options: &PgConnectOptions, server_id: Uuid) -> Result<PgConnection, sqlx::Error> {
    let mut connection = PgConnection::connect_with(options).await?;
    // a host that vanishes without a word is noticed within two minutes
    sqlx::raw_sql("set tcp_keepalives_idle = 30; set tcp_keepalives_interval = 15; set tcp_keepalives_count = 6")
        .execute(&mut connection)
        .await?;
    sqlx::query("select pg_advisory_lock(hashtextextended($1, 0))")
        .bind(server_id.to_string())
        .execute(&mut connection)
        .await?;
    Ok(connection)
}

/// Marks the runs of dead servers as interrupted; returns how many.
pub async fn sweep(pool: &PgPool, server_id: Uuid) -> Result<usize, Error> {
    let running: Vec<(Uuid, Option<Uuid>)> =
        sqlx::query_as("select run_id, server_id from runs where status = 'running' order by server_id")
            .fetch_all(pool)
            .await?;
    let mut swept = 0;
    for runs in running.chunk_by(|a, b| a.1 == b.1) {
        let owner = runs[0].1.unwrap_or_default();
        if owner == server_id || is_alive(pool, owner).await? {
            continue;
        }
        for (run_id, _) in runs {
            writer::interrupt(pool, RunId(*run_id), Utc::now()).await?;
            swept += 1;
        }
    }
    Ok(swept)
}

async fn is_alive(pool: &PgPool, server_id: Uuid) -> Result<bool, sqlx::Error> {
    // released with the transaction: another connection of the pool would not hold it
    let mut transaction = pool.begin().await?;
    let free: bool = sqlx::query_scalar("select pg_try_advisory_xact_lock(hashtextextended($1, 0))")
        .bind(server_id.to_string())
        .fetch_one(&mut *transaction)
        .await?;
    transaction.rollback().await?;
    Ok(!free)
}

/// Runs until it is aborted.
pub async fn keep_up(
    pool: PgPool,
    options: PgConnectOptions,
    server_id: Uuid,
    mut announced: PgConnection,
    mut retention: watch::Receiver<Retention>,
) {
    for pulse in 1u32.. {
        sleep(PULSE).await;
        if announced.ping().await.is_err() {
            match announce(&options, server_id).await {
                Ok(connection) => announced = connection,
                Err(error) => {
                    tracing::debug!(%error, "the database is away");
                    continue;
                }
            }
        }
        if pulse == 1 || pulse.is_multiple_of(SWEEP_PULSES) {
            match sweep(&pool, server_id).await {
                Ok(0) => {}
                Ok(runs) => tracing::info!(runs, "runs of a server that has died are marked as interrupted"),
                Err(error) => tracing::warn!(%error, "runs of dead servers could not be looked for"),
            }
        }
        if pulse.is_multiple_of(PARTITION_PULSES)
            && let Err(error) = migrate::make_partitions(&mut announced, Utc::now().date_naive()).await
        {
            tracing::warn!(%error, "the partitions of the next days could not be made");
        }
        if pulse.is_multiple_of(PARTITION_PULSES) || retention.has_changed().unwrap_or(false) {
            let keep = *retention.borrow_and_update();
            match prune(&pool, keep, Utc::now().date_naive()).await {
                Ok(days) => {
                    for (day, runs) in days {
                        tracing::info!(%day, runs, "the runs of a day need not be kept and are removed");
                    }
                }
                Err(error) => tracing::warn!(%error, "old runs could not be removed; the next try is in an hour"),
            }
        }
    }
}
