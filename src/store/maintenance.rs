//! Regular maintenance: creates partitions in advance, counts runs for statistics, and removes deleted runs and runs beyond
//! the retention.

use super::deletions::remove_deleted;
use super::migrate;
use super::pool::PgPool;
use super::retention::{Retention, prune};
use super::statistics;
use crate::events::system;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::time::sleep;

/// Interval of checks for a changed retention.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Time per check for measuring the mod calls of runs of earlier versions.
const MEASURING_TIME: Duration = Duration::from_secs(2);
/// Number of checks between two maintenance passes: one hour. Partitions are created days in advance.
const CHECKS_PER_MAINTENANCE: u32 = 720;

/// Number of checks between two counts of past hours: one minute.
const CHECKS_PER_HOUR_COUNT: u32 = 12;

/// Runs the maintenance until the task is aborted.
pub async fn run(pool: PgPool, mut retention: watch::Receiver<Retention>) {
    let mut failed = false;
    for check in 1u32.. {
        sleep(CHECK_INTERVAL).await;
        let removed = remove_deleted(&pool, system::now()).await;
        if let Err(error) = &removed
            && !failed
        {
            tracing::warn!(%error, "cannot remove deleted runs; retrying every few seconds");
        }
        failed = removed.is_err();
        if let Err(error) = measure_mod_calls(&pool).await {
            tracing::warn!(%error, "cannot measure the mod calls of earlier runs; retrying every few seconds");
        }
        if check.is_multiple_of(CHECKS_PER_MAINTENANCE)
            && let Err(error) = make_partitions(&pool).await
        {
            tracing::warn!(%error, "cannot create the partitions of the next days");
        }
        // Every hour, also those hours to which runs were added.
        if check % CHECKS_PER_HOUR_COUNT == 1
            && let Err(error) = statistics::count_hours(&pool, system::now(), check % CHECKS_PER_MAINTENANCE == 1).await
        {
            tracing::warn!(%error, "cannot count the runs of past hours; retrying every minute");
        }
        // The count is also due soon after the start, because the server may not have run at the end of the day. It precedes
        // the removal of runs, which would otherwise not be counted.
        if check % CHECKS_PER_MAINTENANCE == 1
            && let Err(error) = statistics::count_days(&pool, system::now().date_naive()).await
        {
            tracing::warn!(%error, "cannot count the runs of past days; the next attempt is in an hour");
        }
        if check.is_multiple_of(CHECKS_PER_MAINTENANCE) || retention.has_changed().unwrap_or(false) {
            let keep = *retention.borrow_and_update();
            match prune(&pool, keep, system::now().date_naive()).await {
                Ok(days) => {
                    for (day, runs) in days {
                        tracing::info!(%day, runs, "removed the runs of a day beyond the retention");
                    }
                }
                Err(error) => tracing::warn!(%error, "cannot remove old runs; the next attempt is in an hour"),
            }
        }
    }
}

/// Measures mod calls for a limited time, so that runs are still removed meanwhile.
async fn measure_mod_calls(pool: &PgPool) -> Result<(), sqlx::Error> {
    let begun = Instant::now();
    while begun.elapsed() < MEASURING_TIME && statistics::measure_some(pool).await? {}
    Ok(())
}

async fn make_partitions(pool: &PgPool) -> Result<(), sqlx::Error> {
    migrate::make_partitions(pool, system::now().date_naive()).await.map(drop)
}
