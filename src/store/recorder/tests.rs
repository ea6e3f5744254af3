//! Tests of the recorder when it panics: the other runs are recorded, and the records that cause the panic are kept.
#![cfg(debug_assertions)] // a count that overflows panics only there

use super::persist::{Batch, PersistOutcome, WRITE_TIMEOUT, drain_batch, persist};
use super::*;
use crate::events::{EventType, ModCall, NotStored, RunEnd, RunStart, Scope, Surface, Usage, system};
use crate::store::{Database, Store};
use std::path::PathBuf;
use tokio::time::timeout;

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn store() -> (Folder, Store) {
    let folder = Folder(std::env::temp_dir().join(format!("thunder-recorder-{}", system::new_id())));
    let store = Store::open(Database::Embedded { data_dir: folder.0.clone() }, |_| {}).await.unwrap();
    (folder, store)
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

/// Returns two finished runs. Writing a part of the first one panics.
fn records() -> ([RunId; 2], Vec<Record>) {
    let (bad, good) = (start(), start());
    let ids = [bad.run_id, good.run_id];
    let last = Numbering { mod_calls: u32::MAX, ..Numbering::default() };
    let records = vec![
        Record::Started(bad, Uuid::nil()),
        Record::Started(good, Uuid::nil()),
        Record::Items(ids[0], last, Arc::new(vec![call()])),
        Record::Items(ids[1], Numbering::default(), Arc::new(vec![call()])),
        Record::Ended(ids[0], end()),
        Record::Ended(ids[1], end()),
    ];
    (ids, records)
}

fn refused(folder: &Folder) -> usize {
    let files = std::fs::read_dir(folder.0.join("spool")).unwrap();
    files.filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|kind| kind == "refused")).count()
}

#[tokio::test]
async fn panic_for_one_record_does_not_affect_other_runs_of_the_batch() {
    let (folder, store) = store().await;
    let mut spool = Spool::create(&folder.0.join("spool"), system::new_id()).unwrap();
    let (ids, batch) = records();
    let result = persist(
        &store.inner.pool,
        store.inner.server_id,
        &mut spool,
        Batch { records: batch, rows: vec![], abandoned: vec![] },
        false,
        false,
    )
    .await;
    assert!(result.outcome == PersistOutcome::Stored && result.lost.is_empty());
    assert!(store.find(&Scope::All, &ids[0].to_string()).await.unwrap().is_none());
    assert!(store.find(&Scope::All, &ids[1].to_string()).await.unwrap().is_some());
    assert_eq!(refused(&folder), 1);
    let (ids, spooled) = records();
    spool.append(&spooled).unwrap();
    while !spool.is_drained() {
        drain_batch(&store.inner.pool, store.inner.server_id, &mut spool).await.unwrap();
    }
    assert!(store.find(&Scope::All, &ids[0].to_string()).await.unwrap().is_none());
    assert_eq!(store.find(&Scope::All, &ids[1].to_string()).await.unwrap().unwrap().status, RunStatus::Done);
    spool.remove();
    store.close().await;
}

#[tokio::test]
async fn panic_for_one_run_drops_only_that_run() {
    let (_folder, store) = store().await;
    let target = Target {
        pool: store.inner.pool.clone(),
        server_id: store.inner.server_id,
        live: store.inner.live.clone(),
        durability_acks: DurabilityAcks::default(),
        unstored: UnstoredRuns::default(),
        metrics: Arc::default(),
    };
    let durability_acks = target.durability_acks.clone();
    let mut recorder = Recorder::new(target);
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
    assert_eq!((recorder.abandoned.as_slice(), recorder.ignored.len()), (&[bad.run_id][..], 1));
    recorder.receive(Signal::Ended(bad.run_id, end()));
    assert!(recorder.ignored.is_empty());
    // A batch whose write panics.
    let batch = recorder.batch();
    assert_eq!(batch.abandoned, [bad.run_id]);
    recorder.on_write_panic(HashSet::from([lost.run_id]), &batch.abandoned);
    assert!(lost_kept.try_recv().unwrap().is_err());
    assert_eq!(recorder.abandoned, [bad.run_id, lost.run_id]);
    recorder.receive(Signal::Ended(good.run_id, end()));
    assert!(recorder.pending.iter().any(|record| matches!(record, Record::Ended(id, _) if *id == good.run_id)));
    store.close().await;
}

#[tokio::test]
async fn writes_to_a_hanging_database_time_out() {
    let (folder, store) = store().await;
    let mut spool = Spool::create(&folder.0.join("spool"), system::new_id()).unwrap();
    let mut blocker = store.inner.pool.begin().await.unwrap();
    sqlx::query("lock table runs in access exclusive mode").execute(&mut *blocker).await.unwrap();
    let abandoned = RunId::now();
    let batch = Batch { records: Vec::new(), rows: Vec::new(), abandoned: vec![abandoned] };
    let result =
        timeout(4 * WRITE_TIMEOUT, persist(&store.inner.pool, store.inner.server_id, &mut spool, batch, false, false))
            .await;
    assert_eq!(result.expect("it waits for the database").abandoned, [abandoned], "it is marked the next time");
    blocker.rollback().await.unwrap();
    spool.remove();
    store.close().await;
}

#[tokio::test]
async fn start_of_a_run_is_written_with_its_end() {
    let (_folder, store) = store().await;
    let (recorder, _) = store.recorder();
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
