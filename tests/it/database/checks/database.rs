//! The schema, other programs on the database, and retention.

use crate::database::WAIT_TIMEOUT;
use crate::database::target::Target;
use crate::harness::run_start;
use chrono::Days;
use serde_json::Value;
use sqlx::{Connection, Row};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thunder::events::{RunId, RunStatus, Scope, system};
use thunder::recording::Signal;
use thunder::store::Retention;
use tokio::time::sleep;
use uuid::{NoContext, Timestamp, Uuid};

/// Returns the number that a query selects. It uses the simple query protocol, which works with every pooler.
async fn number(target: &Target, sql: &'static str) -> i64 {
    let mut connection = target.connect().await;
    let row = sqlx::raw_sql(sql).fetch_one(&mut connection).await.unwrap();
    let number = row.try_get(0).unwrap();
    connection.close().await.unwrap();
    number
}

pub async fn all_migrations_are_applied(target: &Target) {
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations")).unwrap().count();
    let applied = number(target, "select count(*) from refinery_schema_history").await;
    assert_eq!(applied, i64::try_from(files).unwrap());
}

pub async fn partition_of_today_exists(target: &Target) {
    // On Citus a partition may span a month.
    let today = "select count(*) from run_partitions where parent in ('events'::regclass, 'attention'::regclass)
        and (now() at time zone 'utc')::date >= first_day and (now() at time zone 'utc')::date < next_day";
    assert_eq!(number(target, today).await, 2);
}

pub async fn second_program_opens_the_database(target: &Target) {
    let store = target.store("second").await;
    store.ready().await.unwrap();
    store.close().await;
}

pub async fn server_is_healthy(target: &Target) {
    assert_eq!(target.server.get("/healthz").await.0, 200);
}

fn start(target: &Target, name: &str, run_id: RunId) -> Signal {
    Signal::Started(Arc::new(run_start(run_id, &target.name(name))))
}

async fn wait_until_stored(target: &Target, name: &str) -> Value {
    let begun = Instant::now();
    while begun.elapsed() < WAIT_TIMEOUT {
        let (status, run) = target.server.get(&format!("/api/v1/runs/{}", target.name(name))).await;
        if status == 200 {
            return run;
        }
        sleep(Duration::from_millis(25)).await;
    }
    panic!("{name} is not stored")
}

pub async fn run_of_dead_program_is_interrupted(target: &Target) {
    let dead = target.store("dead").await;
    dead.start_recorder();
    dead.recorder().signals.send(start(target, "dead", RunId::now())).await.unwrap();
    wait_until_stored(target, "dead").await;
    // The program closes its connections before its run ends.
    dead.close().await;
    let begun = Instant::now();
    while begun.elapsed() < WAIT_TIMEOUT {
        let other = target.store("survivor").await;
        let status = other.find(&Scope::All, &target.name("dead")).await.unwrap().unwrap().status;
        other.close().await;
        if status == RunStatus::Interrupted {
            return;
        }
        sleep(Duration::from_millis(25)).await;
    }
    panic!("the run of a dead program still has the status running");
}

pub async fn old_day_is_dropped(target: &Target) {
    let store = target.store("retention").await;
    let today = system::now().date_naive();
    // This day is before the days of all other runs.
    let noon = (today - Days::new(9000)).and_hms_opt(12, 0, 0).unwrap().and_utc();
    let id = RunId(Uuid::new_v7(Timestamp::from_unix(NoContext, noon.timestamp().cast_unsigned(), 0)));
    store.start_recorder();
    store.recorder().signals.send(start(target, "old", id)).await.unwrap();
    wait_until_stored(target, "old").await;
    store.close().await;
    let store = target.store("retention").await;
    let dropped = store.prune(Retention { days: Some(8999), bytes: None }, today).await.unwrap();
    assert_eq!(dropped, [(noon.date_naive(), 1)]);
    assert_eq!(target.server.get(&format!("/api/v1/runs/{}", target.name("old"))).await.0, 404);
    store.close().await;
}

pub async fn links_between_tables_are_valid(target: &Target) {
    let store = target.store("links").await;
    assert_eq!(store.damaged_links().await.unwrap(), Vec::<String>::new());
    store.close().await;
}

#[expect(clippy::unused_async, reason = "all checks are async functions")]
pub async fn server_log_has_no_database_error(target: &Target) {
    let log = target.server.log();
    for word in ["panic", "prepared statement", "syntax error", "does not exist", "unsupported startup parameter"] {
        assert!(!log.contains(word), "{word}: {log}");
    }
}
