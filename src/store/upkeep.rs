//! Regular maintenance: partitions ahead of time, and days that need not be kept dropped.

use super::migrate;
use super::retention::{Retention, prune};
use chrono::Utc;
use sqlx::PgPool;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;

/// Interval of checks for changed retention settings.
const PULSE: Duration = Duration::from_secs(5);
/// A new day's partitions are made days ahead, and days go one at a time, so this need not be often.
const PARTITION_PULSES: u32 = 720;

/// Runs until it is aborted.
pub async fn keep_up(pool: PgPool, mut retention: watch::Receiver<Retention>) {
    for pulse in 1u32.. {
        sleep(PULSE).await;
        if pulse.is_multiple_of(PARTITION_PULSES)
            && let Err(error) = make_partitions(&pool).await
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

async fn make_partitions(pool: &PgPool) -> Result<(), sqlx::Error> {
    migrate::make_partitions(&mut *pool.acquire().await?, Utc::now().date_naive()).await.map(drop)
}
