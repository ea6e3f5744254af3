//! Deletions that can be undone for a limited time: across servers, after a crash, and with concurrent locks.

use super::{Data, document, psql, wait_for_psql};
use chrono::TimeDelta;
use sqlx::{Connection, PgConnection};
use thunder::events::{RunId, Scope, system};
use thunder::store::{IngestError, RunQuery, Store};

async fn ingest(store: &Store, name: &str) -> RunId {
    store.ingest(&Scope::All, None, document(name, 3)).await.unwrap().run_id
}

async fn names(store: &Store) -> Vec<String> {
    let runs = store.runs(&Scope::All, &RunQuery::default()).await.unwrap().runs;
    runs.into_iter().map(|run| run.request_id).collect()
}

#[tokio::test]
async fn deletion_can_be_undone_on_another_server_for_a_limited_time() {
    let data = Data::new();
    let store = data.open().await;
    let ids = [ingest(&store, "one").await, ingest(&store, "two").await];
    let now = system::now();
    let deletion = store.schedule_deletion(&Scope::All, &[ids[1], ids[0]], now).await.unwrap();
    assert_eq!(deletion.runs, 2);
    for events in [3, 4] {
        let error = store.ingest(&Scope::All, None, document("one", events)).await.unwrap_err();
        let is_expected = matches!(error, IngestError::Unavailable { retry_after_s: 20..=35 });
        assert!(is_expected, "the id of a deleted run must stay in use until its removal: {error:?}");
    }
    store.ready().await.expect("the database has not failed");
    let bob = Scope::Owned { tenant: Some("bob".into()), includes_unowned: false };
    let error = store.ingest(&bob, Some("bob".into()), document("one", 3)).await.unwrap_err();
    assert!(matches!(error, IngestError::Conflict { .. }), "the run belongs to another tenant: {error:?}");
    store.close().await;

    let other = data.open().await;
    assert_eq!(names(&other).await, Vec::<String>::new());
    assert_eq!(other.deletions(&Scope::All, now).await.unwrap()[0].deletion_id, deletion.deletion_id);
    let late = now + TimeDelta::seconds(32);
    assert!(other.deletions(&Scope::All, late).await.unwrap().is_empty());
    assert!(other.undo_deletion(&Scope::All, deletion.deletion_id, late).await.unwrap().is_empty());
    assert!(other.deletions(&bob, now).await.unwrap().is_empty());
    assert!(other.undo_deletion(&bob, deletion.deletion_id, now).await.unwrap().is_empty());
    assert_eq!(
        other.remove_deleted(late).await.unwrap(),
        0,
        "the removal must wait longer, because clocks of servers may differ"
    );
    assert_eq!(other.undo_deletion(&Scope::All, deletion.deletion_id, now).await.unwrap(), ids);
    assert_eq!(names(&other).await, ["two", "one"]);

    other.schedule_deletion(&Scope::All, &ids[..1], now).await.unwrap();
    assert_eq!(other.remove_deleted(now + TimeDelta::seconds(40)).await.unwrap(), 1);
    assert_eq!(psql(&data.url(), "select string_agg(request_id, ' ') from runs").await, "two");
    let rows = format!("select count(*) from events where run_id = '{}'", ids[0]);
    assert_eq!(psql(&data.url(), &rows).await, "0");
    assert!(other.ingest(&Scope::All, None, document("one", 3)).await.unwrap().created);
    other.close().await;
}

#[tokio::test]
async fn deletion_is_completed_after_a_crash() {
    let data = Data::new();
    let store = data.open().await;
    let id = ingest(&store, "crashed").await;
    store.schedule_deletion(&Scope::All, &[id], system::now()).await.unwrap();
    // The time to undo ends while no server runs.
    psql(&data.url(), "update runs set deletion = '01900000-0000-7000-8000-000000000000'").await;
    store.close().await;
    let store = data.open().await;
    wait_for_psql(&data.url(), "select count(*) from runs", "0").await;
    store.close().await;
}

#[tokio::test]
async fn deletion_locks_runs_in_order_of_their_ids() {
    let data = Data::new();
    let store = data.open().await;
    let ids = [ingest(&store, "first").await, ingest(&store, "second").await];
    let mut blocker = PgConnection::connect(&data.url()).await.unwrap();
    sqlx::raw_sql("begin").execute(&mut blocker).await.unwrap();
    sqlx::query("select 1 from runs where run_id = $1 for update").bind(ids[0].0).execute(&mut blocker).await.unwrap();
    let (other, reversed) = (store.clone(), [ids[1], ids[0]]);
    let deletion = tokio::spawn(async move { other.schedule_deletion(&Scope::All, &reversed, system::now()).await });
    let waiting =
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like 'select status%'";
    wait_for_psql(&data.url(), waiting, "1").await;
    // The deletion waits for the first run and has not locked the second one.
    let free = format!("select 1 from runs where run_id = '{}' for no key update nowait", ids[1]);
    assert_eq!(psql(&data.url(), &free).await, "1");
    sqlx::raw_sql("rollback").execute(&mut blocker).await.unwrap();
    assert_eq!(deletion.await.unwrap().unwrap().runs, 2);
    blocker.close().await.unwrap();
    store.close().await;
}
