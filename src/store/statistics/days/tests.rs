use super::{count_days, uncounted_spans};
use crate::store::statistics::midnight;
use crate::store::test_store::{self, INSERT_RUNS};
use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use std::collections::HashSet;
use std::time::Duration;
use tokio::time::{sleep, timeout};

fn day(day: u32) -> NaiveDate {
    NaiveDate::from_ymd_opt(2026, 3, day).unwrap()
}

fn hour(on: u32, hour: i64) -> DateTime<Utc> {
    midnight(day(on)) + TimeDelta::hours(hour)
}

#[test]
fn spans_are_the_times_that_are_not_counted() {
    let spans = |first, today, days: &[u32], hours: &[DateTime<Utc>]| {
        let days: HashSet<NaiveDate> = days.iter().copied().map(day).collect();
        uncounted_spans(day(first), day(today), &days, &hours.iter().copied().collect())
    };
    assert_eq!(spans(4, 7, &[5], &[]), [(hour(4, 0), hour(5, 0)), (hour(6, 0), hour(9, 0))]);
    assert_eq!(spans(4, 5, &[4, 5, 6], &[]), []);
    let expected = [(hour(5, 0), hour(5, 3)), (hour(5, 5), hour(6, 23))];
    assert_eq!(spans(4, 5, &[4], &[hour(5, 3), hour(5, 4), hour(6, 23)]), expected);
}

#[tokio::test]
async fn run_that_is_deleted_during_a_count_is_counted_with_its_id() {
    let (_folder, store) = test_store::open().await;
    let pool = &store.inner.pool;
    sqlx::query(INSERT_RUNS).bind(1).bind(3).execute(pool).await.unwrap();
    // The count waits for this lock after it has read the ids.
    let mut blocker = pool.begin().await.unwrap();
    sqlx::query("lock table run_stats in access exclusive mode").execute(&mut *blocker).await.unwrap();
    let count = count_days(pool, NaiveDate::from_ymd_opt(2100, 1, 2).unwrap());
    let delete = async {
        let waits = "select exists (select from pg_locks where relation = 'run_stats'::regclass and not granted)";
        while !sqlx::query_scalar::<_, bool>(waits).fetch_one(pool).await.unwrap() {
            sleep(Duration::from_millis(10)).await;
        }
        let delete = "update runs set deletion = gen_random_uuid() where request_id = 'r1'";
        sqlx::query(delete).execute(pool).await.unwrap();
        blocker.rollback().await.unwrap();
    };
    let both = async { tokio::join!(count, delete) };
    timeout(Duration::from_mins(1), Box::pin(both)).await.expect("the count does not wait for the lock").0.unwrap();
    let counts = "select sum(runs)::bigint, (select sum(cardinality(run_ids)) from counted_runs)
        from run_stats where mod = ''";
    assert_eq!(sqlx::query_as::<_, (i64, i64)>(counts).fetch_one(pool).await.unwrap(), (3, 3));
    store.close().await;
}

/// Counts the hour like a server of an earlier version.
const EARLIER_COUNT: &str = "
    delete from run_stats;
    insert into run_stats select timestamptz '2100-01-01 00:00Z', '', '', '', count(*),
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 from runs";

#[tokio::test]
async fn count_waits_for_a_server_of_an_earlier_version() {
    let (_folder, store) = test_store::open().await;
    let pool = &store.inner.pool;
    sqlx::query(INSERT_RUNS).bind(1).bind(3).execute(pool).await.unwrap();
    let mut earlier = pool.begin().await.unwrap();
    sqlx::query("select pg_advisory_xact_lock(7237120550118)").execute(&mut *earlier).await.unwrap();
    let mut count = Box::pin(count_days(pool, NaiveDate::from_ymd_opt(2100, 1, 2).unwrap()));
    timeout(Duration::from_millis(50), &mut count).await.expect_err("both servers count at the same time");
    sqlx::raw_sql(EARLIER_COUNT).execute(&mut *earlier).await.unwrap();
    let count_day = "insert into run_stats_days (day, runs) values ('2100-01-01', 3)";
    sqlx::query(count_day).execute(&mut *earlier).await.expect("the counts of both servers are a deadlock");
    earlier.commit().await.unwrap();
    timeout(Duration::from_mins(1), count).await.expect("the count still waits").unwrap();
    let sum = "select sum(runs)::bigint from run_stats where mod = ''";
    assert_eq!(sqlx::query_scalar::<_, i64>(sum).fetch_one(pool).await.unwrap(), 3);
    store.close().await;
}

#[tokio::test]
async fn server_of_an_earlier_version_causes_no_double_counts() {
    let (_folder, store) = test_store::open().await;
    let pool = &store.inner.pool;
    let insert = async |first: i32, last: i32| {
        sqlx::query(INSERT_RUNS).bind(first).bind(last).execute(pool).await.unwrap();
    };
    let count = async || {
        count_days(pool, NaiveDate::from_ymd_opt(2100, 1, 2).unwrap()).await.unwrap();
        let sum = "select sum(runs)::bigint from run_stats where mod = ''";
        sqlx::query_scalar::<_, i64>(sum).fetch_one(pool).await.unwrap()
    };
    insert(1, 2).await;
    assert_eq!(count().await, 2);
    insert(3, 3).await;
    sqlx::raw_sql(EARLIER_COUNT).execute(pool).await.unwrap();
    assert_eq!(count().await, 3, "run 3 is counted once");
    insert(4, 4).await;
    assert_eq!((count().await, count().await), (4, 4));
    sqlx::query("delete from runs where request_id = 'r1'").execute(pool).await.unwrap();
    insert(5, 5).await;
    assert_eq!((count().await, count().await), (5, 5), "the ids are those of the counted runs again");
    store.close().await;
}
