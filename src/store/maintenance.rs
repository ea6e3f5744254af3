//! Regular maintenance: creates partitions in advance, counts runs for statistics, and removes deleted runs and runs beyond
//! the retention.

use super::deletions::remove_deleted;
use super::migrate;
use super::pool::PgPool;
use super::retention::{Retention, prune};
use super::statistics::{self, HourCount};
use crate::events::system;
use chrono::NaiveDate;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// Interval of removals of deleted runs.
const REMOVAL_INTERVAL: Duration = Duration::from_secs(5);
/// Time per interval for measuring the mod calls of runs of earlier versions.
const MEASURING_TIME: Duration = Duration::from_secs(2);
/// Interval of counts of past hours.
const HOUR_COUNT_INTERVAL: Duration = Duration::from_mins(1);
/// Interval of the maintenance of days. Partitions are created days in advance.
const DAY_INTERVAL: Duration = Duration::from_hours(1);

/// Runs the maintenance until the task is aborted.
pub async fn run(pool: PgPool, mut retention: watch::Receiver<Retention>) {
    let start = Instant::now() + REMOVAL_INTERVAL;
    let [mut removals, mut hour_counts, mut days] =
        [REMOVAL_INTERVAL, HOUR_COUNT_INTERVAL, DAY_INTERVAL].map(|period| {
            let mut ticks = interval_at(start, period);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            ticks
        });
    let mut failed = false;
    loop {
        // Mod calls are measured before runs are counted.
        tokio::select! {
            biased;
            _ = removals.tick() => {
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
            }
            _ = hour_counts.tick() => count_hours(&pool, HourCount::New).await,
            // Also due soon after the start, because the server may not have run at the end of a day.
            _ = days.tick() => {
                if let Err(error) = make_partitions(&pool).await {
                    tracing::warn!(%error, "cannot create the partitions of the next days");
                }
                count_hours(&pool, HourCount::All).await;
                let retention = *retention.borrow_and_update();
                apply_retention(&pool, retention, system::now().date_naive()).await;
            }
            Ok(()) = retention.changed() => {
                let retention = *retention.borrow_and_update();
                apply_retention(&pool, retention, system::now().date_naive()).await;
            }
        }
    }
}

async fn count_hours(pool: &PgPool, hours: HourCount) {
    if let Err(error) = statistics::count_hours(pool, system::now(), hours).await {
        tracing::warn!(%error, "cannot count the runs of past hours; a later count includes them");
    }
}

/// Counts the runs of past days, then removes those beyond the retention. Removed runs are no longer counted.
async fn apply_retention(pool: &PgPool, retention: Retention, today: NaiveDate) {
    if let Err(error) = statistics::count_days(pool, today).await {
        // Days that cannot be counted are removed all the same; the disk may be full.
        tracing::warn!(%error, "cannot count the runs of past days; the next attempt is in an hour");
    }
    match prune(pool, retention, today).await {
        Ok(days) => {
            for (day, runs) in days {
                tracing::info!(%day, runs, "removed the runs of a day beyond the retention");
            }
        }
        Err(error) => tracing::warn!(%error, "cannot remove old runs; the next attempt is in an hour"),
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

#[cfg(test)]
mod tests {
    use super::apply_retention;
    use crate::store::Retention;
    use crate::store::test_store::{self, INSERT_RUNS};
    use chrono::NaiveDate;

    #[tokio::test]
    async fn runs_are_counted_before_their_removal() {
        let (_folder, store) = test_store::open().await;
        let pool = &store.inner.pool;
        sqlx::query(INSERT_RUNS).bind(1).bind(3).execute(pool).await.unwrap();
        let today = NaiveDate::from_ymd_opt(2100, 1, 3).unwrap();
        apply_retention(pool, Retention { days: Some(1), bytes: None }, today).await;
        let counts = "select (select count(*) from runs), (select sum(runs)::bigint from run_stats where mod = '')";
        assert_eq!(sqlx::query_as::<_, (i64, i64)>(counts).fetch_one(pool).await.unwrap(), (0, 3));
        store.close().await;
    }
}
