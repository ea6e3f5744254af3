//! Several stores on one database.

use super::{
    Data, LiveRun, assert_no_rows, document, kill_listeners, next_change, psql, wait_for_psql, wait_for_status,
};
use chrono::Days;
use sqlx::{Connection, PgConnection};
use std::time::{Duration, Instant};
use thunder::events::{EventType, RunStatus, Scope, TraceItem, system};
use thunder::recording::{DurabilityAck, NotStored, RecorderHandle, Signal};
use thunder::store::{Announcement, Database, Retention, RunChange, Store};

/// Opens two stores on one database.
async fn open_two_stores(data: &Data) -> (Store, Store) {
    let first = data.open().await;
    let url = Database::Url { url: data.url(), direct_url: None, data_dir: data.0.join("second") };
    (first, Store::open(url, |_| {}).await.unwrap())
}

async fn send(store: &Store, signals: impl IntoIterator<Item = Signal>) {
    store.start_recorder();
    let RecorderHandle { signals: recorder, .. } = store.recorder();
    for signal in signals {
        recorder.send(signal).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_of_another_server_appear_and_end_in_the_list() {
    let data = Data::new();
    let (first, second) = open_two_stores(&data).await;
    let mut changes = second.live().runs(&Scope::All);
    let mut run = LiveRun::new("elsewhere");
    let run_id = run.run_id();
    send(&first, [run.started(), run.prefilled()]).await;
    assert_eq!(next_change(&mut changes).await, RunChange { run_id, status: RunStatus::Running, owner: None });
    let mut more = second.live().follow_remote(run_id);
    send(&first, [run.token(" a")]).await;
    tokio::time::timeout(Duration::from_mins(1), more.changed())
        .await
        .expect("no notification of a new token")
        .unwrap();
    send(&first, [run.ended()]).await;
    assert_eq!(next_change(&mut changes).await, RunChange { run_id, status: RunStatus::Done, owner: None });
    let ingested = first.ingest(&Scope::All, None, document("ingested elsewhere", 2)).await.unwrap().run_id;
    assert_eq!(next_change(&mut changes).await, RunChange { run_id: ingested, status: RunStatus::Done, owner: None });
    second.close().await;
    first.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_run_is_missed_after_listening_connections_are_lost() {
    let data = Data::new();
    let (first, second) = open_two_stores(&data).await;
    let mut run = LiveRun::new("long");
    let run_id = run.run_id();
    send(&first, [run.started(), run.prefilled()]).await;
    let mut changes = second.live().runs(&Scope::All);
    wait_for_status(&second, &run_id.to_string(), RunStatus::Running).await;
    for round in 0..5 {
        kill_listeners(&data.url()).await;
        // No server listens while this run is added.
        let ingested = first.ingest(&Scope::All, None, document(&format!("round {round}"), 1)).await.unwrap().run_id;
        while next_change(&mut changes).await != (RunChange { run_id: ingested, status: RunStatus::Done, owner: None })
        {
        }
    }
    kill_listeners(&data.url()).await;
    send(&first, [run.ended()]).await;
    while next_change(&mut changes).await != (RunChange { run_id, status: RunStatus::Done, owner: None }) {}
    second.close().await;
    first.close().await;
}

/// The second store is dropped without closing: it sends no heartbeats and does not remove itself from the servers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_of_a_dead_server_are_interrupted() {
    let data = Data::new();
    let (first, second) = open_two_stores(&data).await;
    let mut dead = LiveRun::new("dead");
    let mut alive = LiveRun::new("alive");
    send(&second, [dead.started(), dead.prefilled()]).await;
    send(&first, [alive.started(), alive.prefilled()]).await;
    wait_for_status(&first, &dead.run_id().to_string(), RunStatus::Running).await;
    let mut changes = first.live().runs(&Scope::All);
    drop(second);
    while next_change(&mut changes).await
        != (RunChange { run_id: dead.run_id(), status: RunStatus::Interrupted, owner: None })
    {}
    wait_for_status(&first, &alive.run_id().to_string(), RunStatus::Running).await;
    // The dead server is removed after its runs are marked.
    wait_for_psql(&data.url(), "select count(*) from servers", "1").await;
    first.close().await;
}

/// The run is marked as interrupted while its server still sends items, as after a network failure.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_wrongly_declared_dead_completes_its_run() {
    let data = Data::new();
    let (first, second) = open_two_stores(&data).await;
    let mut run = LiveRun::new("not dead");
    let run_id = run.run_id();
    send(&second, [run.started(), run.prefilled(), run.token(" a")]).await;
    wait_for_status(&first, &run_id.to_string(), RunStatus::Running).await;
    let sql = format!(
        "update runs set status = 'interrupted', completed_at = now() where run_id = '{run_id}'; delete from servers"
    );
    psql(&data.url(), &sql).await;
    send(&second, [run.token(" b")]).await;
    wait_for_status(&first, &run_id.to_string(), RunStatus::Running).await;
    send(&second, [run.token(" c"), run.ended()]).await;
    wait_for_status(&first, &run_id.to_string(), RunStatus::Done).await;
    let items = first.items(&Scope::All, run_id, 0..100).await.unwrap();
    let is_sampled =
        |item: &&TraceItem| matches!(item, TraceItem::Event(event) if event.event_type == EventType::Sampled);
    assert_eq!(items.iter().filter(is_sampled).count(), 3);
    assert_eq!(first.damaged_links().await.unwrap(), Vec::<String>::new());
    second.close().await;
    first.close().await;
}

/// Records the beginning of a run on the second store, and marks the run as interrupted, as after a network failure. Returns
/// the ack of its durability.
async fn record_interrupted(data: &Data, second: &Store, run: &mut LiveRun) -> DurabilityAck {
    second.start_recorder();
    let RecorderHandle { durability_acks, .. } = second.recorder();
    let ack = durability_acks.unwrap().request(run.run_id());
    send(second, [run.started(), run.prefilled(), run.token(" a")]).await;
    let stored = format!("select count(*) from events where run_id = '{}'", run.run_id());
    wait_for_psql(&data.url(), &stored, "4").await;
    let interrupt =
        format!("update runs set status = 'interrupted', completed_at = now() where run_id = '{}'", run.run_id());
    psql(&data.url(), &interrupt).await;
    ack
}

/// Waits until the second store notices the removal of a run, and records the rest of it and another run.
async fn assert_stays_removed(data: &Data, second: &Store, run: &mut LiveRun, ack: DurabilityAck) {
    let outcome = tokio::time::timeout(Duration::from_mins(1), ack).await.expect("the removal is not noticed");
    assert_eq!(outcome.unwrap(), Err(NotStored::Removed));
    let mut next = LiveRun::new("next");
    let signals = [run.token(" c"), run.ended()].into_iter().chain(next.all(2));
    send(second, signals).await;
    wait_for_status(second, &next.run_id().to_string(), RunStatus::Done).await;
    assert_no_rows(&data.url(), run.run_id()).await;
    assert_eq!(second.damaged_links().await.unwrap(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_run_is_not_stored_again_by_its_server() {
    let data = Data::new();
    let (first, second) = open_two_stores(&data).await;
    let mut run = LiveRun::new("removed");
    let ack = record_interrupted(&data, &second, &mut run).await;
    assert!(first.delete(&Scope::All, run.run_id()).await.unwrap());
    send(&second, [run.token(" b")]).await;
    assert_stays_removed(&data, &second, &mut run, ack).await;
    second.close().await;
    first.close().await;
}

/// The retention removes the day of a run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_of_removed_day_is_not_stored_again_by_its_server() {
    let data = Data::new();
    let (first, second) = open_two_stores(&data).await;
    let today = system::now().date_naive();
    let day = today - Days::new(3);
    let mut run = LiveRun::on_day("expired", day);
    let ack = record_interrupted(&data, &second, &mut run).await;
    assert_eq!(first.prune(Retention { days: Some(1), bytes: None }, today).await.unwrap(), [(day, 1)]);
    send(&second, [run.token(" b")]).await;
    assert_stays_removed(&data, &second, &mut run, ack).await;
    second.close().await;
    first.close().await;
}

/// The removal is not committed yet when the server writes its next batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_waits_for_concurrent_removal_of_its_run() {
    let data = Data::new();
    let (first, second) = open_two_stores(&data).await;
    let mut run = LiveRun::new("removed meanwhile");
    let ack = record_interrupted(&data, &second, &mut run).await;
    let mut blocker = PgConnection::connect(&data.url()).await.unwrap();
    sqlx::raw_sql("begin; lock table responses in share mode").execute(&mut blocker).await.unwrap();
    let (remover, run_id) = (first.clone(), run.run_id());
    let removal = tokio::spawn(async move { remover.delete(&Scope::All, run_id).await });
    let waiting =
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
    wait_for_psql(&data.url(), waiting, "1").await;
    send(&second, [run.token(" b")]).await;
    wait_for_psql(&data.url(), waiting, "2").await;
    sqlx::raw_sql("rollback").execute(&mut blocker).await.unwrap();
    assert!(removal.await.unwrap().unwrap());
    assert_stays_removed(&data, &second, &mut run, ack).await;
    blocker.close().await.unwrap();
    second.close().await;
    first.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_list_each_other_and_the_generator_of_a_run() {
    let data = Data::new();
    let (first, second) = open_two_stores(&data).await;
    let url = Some("http://first.example:6767".to_owned());
    first.announce(Announcement { url: url.clone(), models: vec!["demo".into()] });
    let begun = Instant::now();
    let info = loop {
        let servers = second.other_servers().await.unwrap();
        if let [info] = servers.as_slice()
            && info.url == url
        {
            break info.clone();
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "{servers:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!((info.server_id, info.models.as_slice()), (first.server_id(), &["demo".to_owned()][..]));
    let run = LiveRun::new("run of the first server");
    send(&first, [run.started()]).await;
    wait_for_status(&second, &run.run_id().to_string(), RunStatus::Running).await;
    assert_eq!(second.generating_server(&Scope::All, run.run_id()).await.unwrap(), Some(info));
    assert_eq!(first.generating_server(&Scope::All, run.run_id()).await.unwrap(), None);
    assert_eq!(first.shared_secret("s").await.unwrap(), second.shared_secret("s").await.unwrap());
    first.close().await;
    drop(second);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_another_server_reach_their_tenant_only() {
    let data = Data::new();
    let (first, second) = open_two_stores(&data).await;
    let scope = |name: &str| Scope::Owned { tenant: Some(name.into()), includes_unowned: false };
    let (mut changes_for_ann, mut changes_for_bob) =
        (second.live().runs(&scope("ann")), second.live().runs(&scope("bob")));
    let run_of_ann = first.ingest(&scope("ann"), Some("ann".into()), document("of ann", 1)).await.unwrap().run_id;
    let run_of_bob = first.ingest(&scope("bob"), Some("bob".into()), document("of bob", 1)).await.unwrap().run_id;
    assert_eq!(next_change(&mut changes_for_ann).await.run_id, run_of_ann);
    assert_eq!(next_change(&mut changes_for_bob).await.run_id, run_of_bob);
    second.close().await;
    first.close().await;
}
