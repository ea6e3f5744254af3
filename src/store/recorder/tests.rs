//! Tests of the recorder when it panics: the other runs are recorded, and the records that cause the panic are kept.
#![cfg(debug_assertions)] // a count that overflows panics only there

mod readiness;

use super::persist::{Batch, PersistOutcome, WRITE_TIMEOUT, WriteState, drain_batch, persist, row_time};
use super::*;
use crate::events::{Event, EventType, ModCall, RunEnd, RunStart, Scope, Surface, Usage, system};
use crate::recording::NotStored;
use crate::store::test_store::{TestFolder, open as store};
use crate::store::{RunSummary, Store};
use crate::trace::columns;
use tokio::time::timeout;
use uuid::Uuid;

fn writer(store: &Store) -> RunWriter {
    RunWriter { pool: store.inner.pool.clone(), server_id: store.inner.server_id }
}

fn started(start: Arc<RunStart>) -> Record {
    Record::Started { start, server_id: Uuid::nil() }
}

fn ended(run_id: RunId) -> Record {
    Record::Ended { run_id, end: end() }
}

fn start() -> Arc<RunStart> {
    let run_id = RunId::now();
    Arc::new(RunStart {
        run_id,
        request_id: run_id.to_string(),
        created_at: system::now(),
        surface: Surface::Openai,
        model: "m".into(),
        owner: None,
        user_label: None,
        metadata: crate::events::RunMetadata::default(),
        max_tokens: None,
        temperature: None,
        seed: None,
        mods: Vec::new(),
        prompt_preview: String::new(),
        parent: None,
        images: Vec::new(),
    })
}

fn end() -> Arc<RunEnd> {
    Arc::new(RunEnd { status: RunStatus::Done, ..RunEnd::empty(system::now(), Usage::default()) })
}

fn call() -> TraceItem {
    TraceItem::ModCall(ModCall {
        event_sequence_order: 0,
        mod_name: "m".into(),
        event_type: EventType::Added,
        step: 0,
        created_at: None,
        execution_time_ms: None,
        exception_occurred: false,
        exception_message: None,
        exception_traceback: None,
    })
}

/// Returns items whose write panics.
fn rejected_items(run_id: RunId) -> Record {
    let first_numbers = Numbering { mod_calls: u32::MAX, ..Numbering::default() };
    Record::Items { run_id, first_numbers, items: Arc::new(vec![call()]) }
}

/// Returns two finished runs. Writing a part of the first one panics.
fn records() -> ([RunId; 2], Vec<Record>) {
    let (bad, good) = (start(), start());
    let ids = [bad.run_id, good.run_id];
    let records = vec![
        started(bad),
        started(good),
        rejected_items(ids[0]),
        Record::Items { run_id: ids[1], first_numbers: Numbering::default(), items: Arc::new(vec![call()]) },
        ended(ids[0]),
        ended(ids[1]),
    ];
    (ids, records)
}

fn refused(folder: &TestFolder) -> usize {
    let files = std::fs::read_dir(folder.0.join("spool")).unwrap();
    files.filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|kind| kind == "refused")).count()
}

#[tokio::test]
async fn panic_for_one_record_does_not_affect_other_runs_of_the_batch() {
    let (folder, store) = store().await;
    let mut spool = Spool::create(&folder.0.join("spool"), system::new_id()).unwrap();
    let (ids, batch) = records();
    let batch = Batch { records: batch, rows: vec![], to_interrupt: vec![] };
    let result = persist(&writer(&store), &mut spool, batch, WriteState::default()).await;
    assert_eq!(result.outcome, PersistOutcome::Stored);
    // The client must not take the run for stored, but its start is found.
    assert_eq!(result.not_stored.into_iter().collect::<Vec<_>>(), [(ids[0], NotStored::Rejected)]);
    assert_eq!(find(&store, ids[0]).await.events, 0);
    let damaged = store.damaged_links().await.unwrap();
    assert!(!damaged.iter().any(|line| line.contains(&ids[0].to_string())), "{damaged:?}");
    assert!(store.find(&Scope::All, &ids[1].to_string()).await.unwrap().is_some());
    assert_eq!(refused(&folder), 1);
    let (ids, spooled) = records();
    spool.append(&spooled).unwrap();
    while !spool.is_drained() {
        drain_batch(&writer(&store), &mut spool).await.unwrap();
    }
    assert!(store.find(&Scope::All, &ids[0].to_string()).await.unwrap().is_none());
    assert_eq!(store.find(&Scope::All, &ids[1].to_string()).await.unwrap().unwrap().status, RunStatus::Done);
    spool.remove();
    store.close().await;
}

fn recorder(store: &Store) -> RecordingTask {
    RecordingTask::new(Target {
        writer: writer(store),
        live: store.inner.live.clone(),
        durability_acks: DurabilityAcks::default(),
        unstored: UnstoredRuns::default(),
        metrics: Arc::default(),
    })
}

#[tokio::test]
async fn rest_of_a_run_is_recorded_after_a_rejected_part() {
    let (_folder, store) = store().await;
    let mut recorder = recorder(&store);
    let start = start();
    let run_id = start.run_id;
    let mut ack = recorder.target.durability_acks.request(run_id);
    let reject = |recorder: &mut RecordingTask, Batch { records, rows, to_interrupt }: Batch| {
        let (outcome, not_stored) = (PersistOutcome::Stored, [(run_id, NotStored::Rejected)].into());
        recorder.on_written(PersistResult { records, rows, outcome, to_interrupt, not_stored }, true);
    };
    recorder.receive(Signal::Started(start));
    let batch = recorder.take_batch();
    recorder.receive(Signal::Items(run_id, Arc::new(vec![call()])));
    reject(&mut recorder, batch);
    assert_eq!(ack.try_recv().unwrap(), Err(NotStored::Rejected));
    recorder.receive(Signal::Ended(run_id, end()));
    let batch = recorder.take_batch();
    assert_eq!((batch.records.len(), batch.rows.len(), batch.to_interrupt.len()), (2, 1, 0));
    reject(&mut recorder, batch);
    assert_eq!(recorder.take_batch().to_interrupt, [run_id], "its end is not stored");
    store.close().await;
}

#[tokio::test]
async fn run_with_a_rejected_end_is_interrupted() {
    let (folder, store) = store().await;
    let start = start();
    let run_id = start.run_id;
    let mut summary = RunSummaryBuilder::from_start(&start, Uuid::nil());
    summary.end(&end());
    drain(&folder, &store, &[started(start), event(run_id, 0)]).await;
    let mut spool = Spool::create(&folder.0.join("spool"), system::new_id()).unwrap();
    let records = vec![rejected_items(run_id), ended(run_id)];
    let batch = Batch { records, rows: vec![summary.row()], to_interrupt: vec![] };
    let result = persist(&writer(&store), &mut spool, batch, WriteState::default()).await;
    assert_eq!(result.not_stored, [(run_id, NotStored::Rejected)].into());
    let batch = Batch { records: vec![], rows: vec![], to_interrupt: vec![run_id] };
    persist(&writer(&store), &mut spool, batch, WriteState::default()).await;
    let run = find(&store, run_id).await;
    assert_eq!((run.status, run.events), (RunStatus::Interrupted, 1), "the row contains the stored part");
    spool.remove();
    store.close().await;
}

#[tokio::test]
async fn panic_for_one_run_drops_only_that_run() {
    let (_folder, store) = store().await;
    let mut recorder = recorder(&store);
    let durability_acks = recorder.target.durability_acks.clone();
    let (bad, good, lost) = (start(), start(), start());
    let [mut bad_kept, mut lost_kept] = [&bad, &lost].map(|start| durability_acks.request(start.run_id));
    for start in [&bad, &good, &lost] {
        recorder.receive(Signal::Started(Arc::clone(start)));
    }
    recorder.runs.get_mut(&bad.run_id).unwrap().numbering.mod_calls = u32::MAX;
    for start in [&bad, &good, &bad] {
        recorder.receive(Signal::Items(start.run_id, Arc::new(vec![call()])));
    }
    assert_eq!(bad_kept.try_recv().unwrap(), Err(NotStored::RecorderFailed));
    assert_eq!(recorder.pending.iter().filter(|record| record.run_id() == good.run_id).count(), 2);
    assert!(recorder.pending.iter().all(|record| record.run_id() != bad.run_id));
    assert_eq!((recorder.to_interrupt.as_slice(), recorder.dropped_active.len()), (&[bad.run_id][..], 1));
    recorder.receive(Signal::Ended(bad.run_id, end()));
    assert!(recorder.dropped_active.is_empty());
    // A batch whose write panics.
    let batch = recorder.take_batch();
    assert_eq!(batch.to_interrupt, [bad.run_id]);
    recorder.on_write_panic(HashSet::from([lost.run_id]), &batch.to_interrupt);
    assert!(lost_kept.try_recv().unwrap().is_err());
    assert_eq!(recorder.to_interrupt, [bad.run_id, lost.run_id]);
    recorder.receive(Signal::Ended(good.run_id, end()));
    assert!(
        recorder.pending.iter().any(|record| matches!(record, Record::Ended { run_id, .. } if *run_id == good.run_id))
    );
    store.close().await;
}

#[tokio::test]
async fn writes_to_a_hanging_database_time_out() {
    let (folder, store) = store().await;
    let mut spool = Spool::create(&folder.0.join("spool"), system::new_id()).unwrap();
    let mut blocker = store.inner.pool.begin().await.unwrap();
    sqlx::query("lock table runs in access exclusive mode").execute(&mut *blocker).await.unwrap();
    let run_id = RunId::now();
    let batch = Batch { records: Vec::new(), rows: Vec::new(), to_interrupt: vec![run_id] };
    let writer = writer(&store);
    let result = timeout(4 * WRITE_TIMEOUT, persist(&writer, &mut spool, batch, WriteState::default())).await;
    assert_eq!(result.expect("it waits for the database").to_interrupt, [run_id], "it is marked the next time");
    blocker.rollback().await.unwrap();
    spool.remove();
    store.close().await;
}

/// Returns an item record with one event.
fn event(run_id: RunId, sequence_order: i32) -> Record {
    let event = Event::new(EventType::Added, 0, sequence_order, None);
    Record::Items { run_id, first_numbers: Numbering::default(), items: Arc::new(vec![TraceItem::Event(event)]) }
}

/// Stores records from a new spool file.
async fn drain(folder: &TestFolder, store: &Store, records: &[Record]) {
    let mut spool = Spool::create(&folder.0.join("spool"), system::new_id()).unwrap();
    spool.append(records).unwrap();
    while !spool.is_drained() {
        drain_batch(&writer(store), &mut spool).await.unwrap();
    }
    spool.remove();
}

async fn find(store: &Store, run_id: RunId) -> RunSummary {
    store.find(&Scope::All, &run_id.to_string()).await.unwrap().unwrap()
}

#[tokio::test]
async fn replayed_records_keep_hidden_and_renamed_runs() {
    let (folder, store) = store().await;
    let first = start();
    let second = Arc::new(RunStart { request_id: first.request_id.clone(), ..(*start()).clone() });
    let records = |start: &Arc<RunStart>| [started(Arc::clone(start)), event(start.run_id, 0), ended(start.run_id)];
    drain(&folder, &store, &records(&first)).await;
    drain(&folder, &store, &records(&second)).await;
    let deletion = store.schedule_deletion(&Scope::All, &[first.run_id], system::now()).await.unwrap();
    drain(&folder, &store, &records(&first)).await;
    store.undo_deletion(&Scope::All, deletion.deletion_id, system::now()).await.unwrap();
    let run = find(&store, first.run_id).await;
    assert_eq!((run.status, run.events), (RunStatus::Done, 1));

    // The request id is free again.
    assert!(store.delete(&Scope::All, first.run_id).await.unwrap());
    drain(&folder, &store, &records(&second)).await;
    assert_eq!(refused(&folder), 0);
    assert_eq!(find(&store, second.run_id).await.request_id, format!("{}~{}", first.request_id, second.run_id));
    store.close().await;
}

/// Another server marked the run as interrupted while a part of it was in the spool file.
#[tokio::test]
async fn spooled_items_of_an_interrupted_run_update_its_row() {
    let (folder, store) = store().await;
    let start = start();
    let run_id = start.run_id;
    drain(&folder, &store, &[started(start), event(run_id, 0)]).await;
    assert!(writer(&store).interrupt(run_id, system::now()).await.unwrap());
    let before = find(&store, run_id).await;
    drain(&folder, &store, &[event(run_id, 1), event(run_id, 2)]).await;
    let after = find(&store, run_id).await;
    assert_eq!((after.status, after.completed_at), (RunStatus::Interrupted, before.completed_at));
    assert_eq!((before.events, after.events), (1, 3));
    let columns = store.columns(&Scope::All, run_id).await.unwrap().unwrap();
    assert_eq!(columns::decode(&columns).unwrap().events.len(), 3);
    store.close().await;
}

#[tokio::test]
async fn run_that_cannot_be_marked_does_not_block_other_dropped_runs() {
    let (folder, store) = store().await;
    let bad = Arc::new(RunStart { request_id: "bad".into(), ..(*start()).clone() });
    let good = start();
    let [bad_id, good_id] = [bad.run_id, good.run_id];
    drain(&folder, &store, &[started(bad), started(good)]).await;
    let reject = "alter table runs add check (request_id <> 'bad' or status <> 'interrupted')";
    sqlx::query(reject).execute(&store.inner.pool).await.unwrap();
    let mut spool = Spool::create(&folder.0.join("spool"), system::new_id()).unwrap();
    let batch = Batch { records: Vec::new(), rows: Vec::new(), to_interrupt: vec![good_id, bad_id] };
    let result = persist(&writer(&store), &mut spool, batch, WriteState::default()).await;
    assert_eq!((result.outcome, result.to_interrupt), (PersistOutcome::Stored, Vec::new()));
    assert_eq!(find(&store, good_id).await.status, RunStatus::Interrupted);
    assert_eq!(find(&store, bad_id).await.status, RunStatus::Running);
    spool.remove();
    store.close().await;
}

#[tokio::test]
async fn time_for_the_row_of_a_run_depends_on_its_items() {
    let (_folder, store) = store().await;
    let run_id = RunId::now();
    sqlx::query(
        "insert into events (run_id, sequence_order, event_type, step)
        select $1, i, 'Added', 0 from generate_series(1, 50000) i",
    )
    .bind(run_id.0)
    .execute(&store.inner.pool)
    .await
    .unwrap();
    assert_eq!(row_time(&writer(&store), run_id).await.unwrap(), Duration::from_secs(5));
    assert_eq!(row_time(&writer(&store), RunId::now()).await.unwrap(), Duration::ZERO);
    store.close().await;
}

/// A statement that waits for a lock has no response, like a statement on a host that has vanished.
#[tokio::test]
async fn connections_without_a_response_are_replaced() {
    let (_folder, store) = store().await;
    let mut blocker = store.inner.pool.begin().await.unwrap();
    sqlx::query("lock table runs in access exclusive mode").execute(&mut *blocker).await.unwrap();
    let pool = store.inner.recorder_pool.with_response_timeout(Duration::from_millis(100));
    // Opened before, because a busy machine may exceed the pool's time limit for new connections.
    let opened = async { while !matches!(tokio::join!(pool.acquire(), pool.acquire()), (Ok(_), Ok(_))) {} };
    timeout(Duration::from_mins(1), opened).await.unwrap();
    let read = sqlx::query("select 1 from runs").fetch_all(&pool);
    let read_in_transaction = async {
        let mut transaction = pool.begin().await?;
        sqlx::query("select 1 from runs").fetch_all(&mut *transaction).await
    };
    let (read, read_in_transaction) = tokio::join!(read, read_in_transaction);
    for result in [read, read_in_transaction] {
        let error = result.unwrap_err();
        // A busy machine may exceed the time limit for connections.
        if matches!(error, sqlx::Error::PoolTimedOut) {
            continue;
        }
        assert!(matches!(&error, sqlx::Error::Io(error) if error.kind() == std::io::ErrorKind::TimedOut), "{error}");
    }
    // Both connections of the pool were used.
    let replaced = async {
        while sqlx::query("select 1").execute(&pool).await.is_err() {}
        let waiting =
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query = 'select 1 from runs'";
        while sqlx::query_scalar::<_, i64>(waiting).fetch_one(&store.inner.pool).await.unwrap() > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(Duration::from_mins(1), replaced).await.expect("the connections are still in use");
    blocker.rollback().await.unwrap();
    store.close().await;
}

#[tokio::test]
async fn start_of_a_run_is_written_with_its_end() {
    let (_folder, store) = store().await;
    store.start_recorder();
    let recorder = store.recorder();
    let mut together = Vec::new();
    for _ in 0..5 {
        let start = start();
        recorder.signals.send(Signal::Started(Arc::clone(&start))).await.unwrap();
        // The recorder has taken the start before the end is sent.
        while recorder.signals.capacity() < recorder.signals.max_capacity() {
            tokio::task::yield_now().await;
        }
        recorder.signals.send(Signal::Ended(start.run_id, end())).await.unwrap();
        let is_done = async || {
            let run = store.find(&Scope::All, &start.request_id).await.unwrap();
            run.is_some_and(|run| run.status == RunStatus::Done)
        };
        let stored = async {
            while !is_done().await {
                tokio::task::yield_now().await;
            }
        };
        timeout(WRITE_TIMEOUT, stored).await.unwrap();
        // The key is inserted once, the run's row is written again when the run ends.
        let sql = "select k.xmin::text = r.xmin::text from run_keys k join runs r using (run_id) where run_id = $1";
        let query = sqlx::query_scalar::<_, bool>(sql).bind(start.run_id.0);
        together.push(query.fetch_one(&store.inner.pool).await.unwrap());
    }
    // A periodic write may come between the start and the end of one run.
    assert!(
        together.iter().filter(|&&together| together).count() >= 3,
        "starts had their own transactions: {together:?}"
    );
    store.close().await;
}
