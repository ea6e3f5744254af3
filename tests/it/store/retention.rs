//! Retention by age and by size.

use super::{Data, LiveRun, document, psql, wait_for_status};
use chrono::{Datelike, Days, Months, NaiveDate};
use serde_json::json;
use std::time::{Duration, Instant};
use thunder::events::{RunId, RunStatus, Scope, system};
use thunder::recording::RecorderHandle;
use thunder::store::{NewResponse, Retention, Store};
use uuid::{NoContext, Timestamp, Uuid};

/// Records a run that started at noon of a day; returns its id.
async fn record_run(store: &Store, day: NaiveDate, name: &str) -> RunId {
    let mut run = LiveRun::on_day(name, day);
    store.start_recorder();
    let RecorderHandle { signals, .. } = store.recorder();
    for signal in run.all(3) {
        signals.send(signal).await.unwrap();
    }
    wait_for_status(store, name, RunStatus::Done).await;
    run.run_id()
}

async fn names(store: &Store) -> Vec<String> {
    let runs = store.runs(&Scope::All, &thunder::store::RunQuery::default()).await.unwrap().runs;
    runs.into_iter().map(|run| run.request_id).collect()
}

#[tokio::test]
async fn old_days_are_dropped_as_partitions() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    let today = system::now().date_naive();
    let ago = |days| today - Days::new(days);
    let partition = |day: NaiveDate| format!("select to_regclass('events_{}') is not null", day.format("%Y%m%d"));
    // One day has separate partitions; the rows of the others are in the default partitions.
    psql(&url, &format!("select make_partitions('{}', 1)", ago(10))).await;
    record_run(&store, ago(10), "ten").await;
    record_run(&store, ago(8), "eight").await;
    let seven = record_run(&store, ago(7), "seven").await;
    store.ingest(&Scope::All, None, document("today", 3)).await.unwrap();
    assert_eq!(psql(&url, "select count(*) from events_default").await, "20");

    // The last two begin before 1970, and before the first day that PostgreSQL knows.
    for days in [None, Some(36_500), Some(3_000_000)] {
        assert!(store.prune(Retention { days, bytes: None }, today).await.unwrap().is_empty(), "{days:?}");
    }
    assert_eq!(names(&store).await.len(), 4);
    let week = Retention { days: Some(7), bytes: None };
    assert_eq!(store.prune(week, today).await.unwrap(), [(ago(10), 1), (ago(8), 1)]);
    assert_eq!(names(&store).await, ["today", "seven"]);
    assert!(store.find(&Scope::All, "ten").await.unwrap().is_none());
    assert_eq!(store.items(&Scope::All, seven, 0..i32::MAX).await.unwrap().len(), 19);
    assert_eq!(psql(&url, &partition(ago(10))).await, "f");
    assert_eq!(psql(&url, &partition(today)).await, "t");
    assert_eq!(psql(&url, "select count(*) from events_default").await, "10");
    assert!(store.damaged_links().await.unwrap().is_empty());
    // The id of a run that was removed with its day can be used again.
    store.ingest(&Scope::All, None, document("ten", 3)).await.unwrap();
    store.close().await;
}

#[tokio::test]
async fn responses_are_deleted_with_day_of_their_run() {
    let data = Data::new();
    let store = data.open().await;
    let today = system::now().date_naive();
    let response = |days: u64, id: &str| {
        let noon = (today - Days::new(days)).and_hms_opt(12, 0, 0).unwrap().and_utc();
        let timestamp = Timestamp::from_unix(NoContext, noon.timestamp().cast_unsigned(), 0);
        NewResponse {
            id: id.to_owned(),
            run_id: RunId(Uuid::new_v7(timestamp)),
            owner: (id == "b").then(|| "ann".into()),
            response: json!({"id": id, "text": "a\0b"}),
            items: vec![json!({"role": "user", "content": id})],
        }
    };
    let scope =
        |tenant: Option<&str>| Scope::Owned { tenant: tenant.map(Into::into), includes_unowned: tenant.is_none() };
    let (unowned, ann) = (scope(None), scope(Some("ann")));
    // The runs of these responses are not recorded.
    for (days, id) in [(9, "a"), (2, "b"), (0, "c")] {
        store.save_response(&response(days, id), system::now()).await.unwrap();
    }
    assert_eq!(store.response(&unowned, "a").await.unwrap(), Some(response(9, "a").response));
    assert_eq!(store.response_items(&ann, "b").await.unwrap(), Some(response(2, "b").items));
    assert_eq!(store.response(&unowned, "b").await.unwrap(), None, "the response belongs to another tenant");
    let week = Retention { days: Some(7), bytes: None };
    store.prune(week, today).await.unwrap();
    assert_eq!(store.response(&unowned, "a").await.unwrap(), None);
    assert!(!store.delete_response(&unowned, "b").await.unwrap());
    assert!(store.delete_response(&ann, "b").await.unwrap());
    assert!(store.response_items(&ann, "b").await.unwrap().is_none());
    assert!(store.response(&unowned, "c").await.unwrap().is_some());
    store.close().await;
}

#[tokio::test]
async fn days_of_a_month_are_deleted_and_its_partition_is_dropped_at_the_end() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    let today = system::now().date_naive();
    let month_start = |months| (today.with_day(1).unwrap()) - Months::new(months);
    let (first, last) = (month_start(3), month_start(2) - Days::new(1));
    // One day has separate partitions, the other is in the default partitions; both are merged into the month.
    psql(&url, &format!("select make_partitions('{last}', 1)")).await;
    record_run(&store, first, "first").await;
    record_run(&store, last, "last").await;
    record_run(&store, month_start(2), "later").await;
    let month = "select day || ' ' || next_day from partition_days order by day limit 1";
    assert_eq!(psql(&url, &format!("select merge_partitions('{last}')")).await, "6");
    assert_eq!(psql(&url, month).await, format!("{first} {}", month_start(2)));
    assert_eq!(
        psql(&url, &format!("select merge_partitions('{first}')")).await,
        "0",
        "the month is one partition already"
    );
    let stored = psql(
        &url,
        "select attstorage from pg_attribute where attrelid in \
        (select partition from run_partitions where parent = 'attention'::regclass) and attname = 't1' limit 1",
    );
    assert_eq!(stored.await, "e", "attention must be stored without further compression");

    let until_last = (today - last).num_days().try_into().unwrap();
    assert_eq!(store.prune(Retention { days: Some(until_last), bytes: None }, today).await.unwrap(), [(first, 1)]);
    assert_eq!(names(&store).await, ["later", "last"]);
    assert_eq!(psql(&url, month).await, format!("{first} {}", month_start(2)), "the partition has newer runs");
    let until_month_end = Retention { days: Some(until_last - 1), bytes: None };
    assert_eq!(store.prune(until_month_end, today).await.unwrap(), [(first, 1)]);
    assert_eq!(names(&store).await, ["later"]);
    assert_ne!(psql(&url, month).await, format!("{first} {}", month_start(2)), "the partition must be dropped");

    // New partitions span the rest of their month.
    psql(&url, "update partitioning set unit = 'month'").await;
    let middle = month_start(0) + Months::new(2) + Days::new(9);
    assert_eq!(psql(&url, &format!("select make_partitions('{middle}', 40)")).await, "12");
    let spans = "select string_agg(day || ' ' || next_day, ', ' order by day) from (\
        select * from partition_days order by day desc limit 2) newest";
    let (next, after) = (month_start(0) + Months::new(3), month_start(0) + Months::new(4));
    assert_eq!(psql(&url, spans).await, format!("{middle} {next}, {next} {after}"));
    assert!(store.damaged_links().await.unwrap().is_empty());
    store.close().await;
}

#[tokio::test]
async fn oldest_days_are_dropped_above_size_limit() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    let today = system::now().date_naive();
    let ago = |days| today - Days::new(days);
    for (days, name) in [(3, "three"), (2, "two"), (1, "one")] {
        psql(&url, &format!("select make_partitions('{}', 1)", ago(days))).await;
        record_run(&store, ago(days), name).await;
    }
    store.ingest(&Scope::All, None, document("today", 400)).await.unwrap();
    let total: u64 = psql(&url, "select sum(bytes) from partition_days").await.parse().unwrap();
    let three: u64 =
        psql(&url, &format!("select bytes from partition_days where day = '{}'", ago(3))).await.parse().unwrap();
    assert!(store.prune(Retention { days: None, bytes: Some(total) }, today).await.unwrap().is_empty());
    // The limit is one byte below the size without the oldest day.
    let limit = Retention { days: None, bytes: Some(total - three - 1) };
    assert_eq!(store.prune(limit, today).await.unwrap(), [(ago(3), 1), (ago(2), 1)]);
    assert_eq!(names(&store).await, ["today", "one"]);
    // The current day is kept regardless of its size.
    let nothing = Retention { days: None, bytes: Some(0) };
    assert_eq!(store.prune(nothing, today).await.unwrap(), [(ago(1), 1)]);
    assert_eq!(names(&store).await, ["today"]);
    assert!(store.damaged_links().await.unwrap().is_empty());
    store.close().await;
}

#[tokio::test]
async fn day_with_active_run_is_kept_until_its_end() {
    let data = Data::new();
    let store = data.open().await;
    let today = system::now().date_naive();
    let day = today - Days::new(5);
    record_run(&store, day, "old").await;
    let url = data.url();
    psql(&url, "update runs set status = 'running' where request_id = 'old'").await;
    let retention = Retention { days: Some(1), bytes: None };
    assert!(store.prune(retention, today).await.unwrap().is_empty());
    psql(&url, "update runs set status = 'done' where request_id = 'old'").await;
    // A server with a retention flag calls this.
    store.set_retention(retention);
    let begun = Instant::now();
    while store.find(&Scope::All, "old").await.unwrap().is_some() {
        assert!(begun.elapsed() < Duration::from_mins(1), "the old run was not removed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    store.close().await;
}
