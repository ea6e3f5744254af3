//! The recorder: signals of runs, outages of the database, and spool files.

use super::{Data, LiveRun, assert_no_rows, document, expected_items, kill, next_change, psql, wait_for_status};
use chrono::Days;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use thunder::events::{RunStatus, Scope, TraceItem, system};
use thunder::recording::{RecorderHandle, Signal};
use thunder::store::{AttentionParts, Database, Error, HeadRowsPart, LiveUpdate, Retention, Store};
use tokio::sync::broadcast::error::RecvError;

#[tokio::test]
async fn run_is_recorded_incrementally_and_read_completely() {
    let data = Data::new();
    let store = data.open().await;
    store.start_recorder();
    let (RecorderHandle { signals: recorder, .. }, live) = (store.recorder(), store.live());
    let mut changes = live.runs(&Scope::All);
    let mut run = LiveRun::new("live");
    let mut sent = vec![run.started(), run.prefilled(), run.token(" sky")];
    for signal in &sent {
        recorder.send(signal.clone()).await.unwrap();
    }
    wait_for_status(&store, &run.run_id().to_string(), RunStatus::Running).await;
    assert_eq!(next_change(&mut changes).await.status, RunStatus::Running);
    while store.items(&Scope::All, run.run_id(), 0..100).await.unwrap().len() < 7 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(store.delete(&Scope::All, run.run_id()).await.is_err(), "an active run must not be deleted");
    assert!(store.columns(&Scope::All, run.run_id()).await.unwrap().is_some(), "an active run must have columns, too");

    // A subscriber receives every item once, while items are stored.
    let (mut seen, mut updates) = live.subscribe(&Scope::All, run.run_id()).unwrap();
    let Some(TraceItem::Event(first)) = seen.first().cloned() else { panic!("{seen:?}") };
    let mut all = store.items(&Scope::All, run.run_id(), 0..first.sequence_order).await.unwrap();
    for text in [" is", " blue", "."] {
        let signal = run.token(text);
        recorder.send(signal.clone()).await.unwrap();
        sent.push(signal);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let end = run.ended();
    recorder.send(end.clone()).await.unwrap();
    sent.push(end);
    loop {
        match updates.recv().await {
            Ok(LiveUpdate::Items(items)) => seen.extend(items.iter().cloned()),
            Ok(LiveUpdate::Ended(status)) => break assert_eq!(status, RunStatus::Done),
            Err(RecvError::Lagged(_)) => panic!("the subscriber misses items"),
            Err(RecvError::Closed) => panic!("the subscription is closed"),
        }
    }
    seen.retain(|item| !matches!(item, TraceItem::Attention(_)));
    all.extend(seen);
    let stored = store.items(&Scope::All, run.run_id(), 0..i32::MAX).await.unwrap();
    assert_eq!(format!("{stored:#?}"), expected_items(&sent));
    assert_eq!(format!("{all:#?}").replace("NUL \\0", "NUL \u{2400}"), expected_items(&sent));

    let summary = store.find(&Scope::All, "live").await.unwrap().unwrap();
    assert_eq!(summary.status, RunStatus::Done);
    assert_eq!((summary.events, summary.completion_tokens, summary.seed), (13, 4, Some(u32::MAX)));
    assert_eq!(summary.output_preview, " sky is blue.");
    assert!(summary.has_attention && summary.surprise_strip == [8, 8, 8, 8]);
    let all_parts = AttentionParts { t1: true, head_rows: HeadRowsPart::Rows };
    let step = store.attention_range(&Scope::All, run.run_id(), 1..2, all_parts).await.unwrap().pop().unwrap();
    assert_eq!((step.row_len, step.heads, &step.layer_ids[..], step.t1.len()), (3, 2, &[0, 1, 5][..], 5000));
    assert_eq!(step.head_rows, [7; 9]);
    let steps = store.attention_range(&Scope::All, run.run_id(), 2..100, AttentionParts::default()).await.unwrap();
    assert_eq!(steps.len(), 3);
    assert!(steps.iter().all(|step| step.t1.is_empty() && step.head_rows.is_empty() && step.t0 == [1, 2, 3]));
    assert_eq!(
        psql(&data.url(), "select distinct attstorage from pg_attribute where attname in ('t0', 't1', 'head_rows')")
            .await,
        "e"
    );
    assert_eq!(
        psql(&data.url(), "select max(entropy) || ' ' || min(logprob) || ' ' || max(rank) from events").await,
        "1.5 -0.25 1"
    );
    assert!(store.damaged_links().await.unwrap().is_empty());
    store.close().await;
}

#[tokio::test]
async fn duplicate_request_id_keeps_run() {
    let data = Data::new();
    let store = data.open().await;
    store.start_recorder();
    let RecorderHandle { signals: recorder, .. } = store.recorder();
    let (mut first, mut second) = (LiveRun::new("twice"), LiveRun::new("twice"));
    for signal in first.all(1).into_iter().chain(second.all(1)) {
        recorder.send(signal).await.unwrap();
    }
    wait_for_status(&store, &first.run_id().to_string(), RunStatus::Done).await;
    wait_for_status(&store, &second.run_id().to_string(), RunStatus::Done).await;
    assert_eq!(store.find(&Scope::All, "twice").await.unwrap().unwrap().run_id, first.run_id());
    let other = store.find(&Scope::All, &second.run_id().to_string()).await.unwrap().unwrap();
    assert_eq!(other.request_id, format!("twice~{}", second.run_id()));
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_are_spooled_during_database_outage_and_drained_in_order() {
    let data = Data::with_outages();
    let store = data.open().await;
    store.start_recorder();
    let (RecorderHandle { signals: recorder, .. }, live) = (store.recorder(), store.live());
    let (mut before, mut during) = (LiveRun::new("before"), LiveRun::new("during"));
    let mut sent = vec![before.started(), before.prefilled(), before.token(" a")];
    for signal in &sent {
        recorder.send(signal.clone()).await.unwrap();
    }
    wait_for_status(&store, &before.run_id().to_string(), RunStatus::Running).await;
    data.begin_outage().await;

    let mut ends = live.runs(&Scope::All);
    for _ in 0..3 {
        sent.push(before.token(" b"));
        recorder.send(sent.last().unwrap().clone()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let sent_during = during.all(3);
    for signal in &sent_during {
        recorder.send(signal.clone()).await.unwrap();
    }
    while next_change(&mut ends).await.status != RunStatus::Done {}
    assert!(data.spool_files().iter().any(|path| path.metadata().unwrap().len() > 0), "no spool file was written");
    assert!(matches!(
        store.ingest(&Scope::All, None, document("away", 3)).await,
        Err(thunder::store::IngestError::Unavailable { retry_after_s }) if retry_after_s > 0
    ));

    data.end_outage();
    wait_for_status(&store, &during.run_id().to_string(), RunStatus::Done).await;
    sent.push(before.token(" c"));
    sent.push(before.ended());
    for signal in &sent[sent.len() - 2..] {
        recorder.send(signal.clone()).await.unwrap();
    }
    wait_for_status(&store, &before.run_id().to_string(), RunStatus::Done).await;
    for (run, sent) in [(&before, &sent), (&during, &sent_during)] {
        let stored = store.items(&Scope::All, run.run_id(), 0..i32::MAX).await.unwrap();
        assert_eq!(format!("{stored:#?}"), expected_items(sent));
        let steps =
            store.attention_range(&Scope::All, run.run_id(), 0..i32::MAX, AttentionParts::default()).await.unwrap();
        assert_eq!(steps.len(), sent.len() - 3);
    }
    let run = store.find(&Scope::All, "during").await.unwrap().unwrap();
    assert_eq!((run.completion_tokens, run.has_attention), (3, true));
    store.close().await;
    assert!(data.spool_files().is_empty(), "a drained spool file must be removed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_of_a_spooled_run_fails_until_it_is_stored() {
    let data = Data::with_outages();
    let store = data.open().await;
    store.start_recorder();
    let RecorderHandle { signals: recorder, unstored, .. } = store.recorder();
    let mut run = LiveRun::new("spooled");
    unstored.unwrap().insert(run.run_id(), "spooled".into(), None, Arc::new(AtomicBool::new(true)));
    data.begin_outage().await;
    for signal in run.all(2) {
        recorder.send(signal).await.unwrap();
    }
    let error = store.find_recorded(&Scope::All, "spooled").await.unwrap_err();
    assert!(matches!(error, Error::NotStored(run_id) if run_id == run.run_id()), "{error}");
    data.end_outage();
    let found = store.find_recorded(&Scope::All, "spooled").await.unwrap().unwrap();
    assert_eq!((found.status, found.completion_tokens, found.has_attention), (RunStatus::Done, 2, true));
    assert!(store.unstored(&Scope::All, run.run_id()).is_none());
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spool_file_of_dead_server_is_drained_at_start() {
    let data = Data::with_outages();
    let store = data.open().await;
    store.start_recorder();
    let (RecorderHandle { signals: recorder, .. }, live) = (store.recorder(), store.live());
    let mut ends = live.runs(&Scope::All);
    data.begin_outage().await;
    let (mut complete, mut incomplete) = (LiveRun::new("complete"), LiveRun::new("incomplete"));
    let incomplete_sent: Vec<Signal> = incomplete.all(2).into_iter().take(4).collect();
    let complete_sent = complete.all(2);
    for signal in incomplete_sent.iter().chain(&complete_sent) {
        recorder.send(signal.clone()).await.unwrap();
    }
    while next_change(&mut ends).await.status != RunStatus::Done {}
    // The spool file stays, as after a kill, because the database is unavailable.
    store.close().await;
    assert_eq!(data.spool_files().len(), 1);

    data.end_outage();
    let store = data.open().await;
    let run = store.find(&Scope::All, "complete").await.unwrap().unwrap();
    assert_eq!((run.status, run.completion_tokens, run.has_attention), (RunStatus::Done, 2, true));
    let stored = store.items(&Scope::All, complete.run_id(), 0..i32::MAX).await.unwrap();
    assert_eq!(format!("{stored:#?}"), expected_items(&complete_sent));
    let run = store.find(&Scope::All, "incomplete").await.unwrap().unwrap();
    assert_eq!((run.status, run.completion_tokens, run.events), (RunStatus::Interrupted, 2, 7));
    assert!(run.has_attention);
    store.close().await;
}

/// A server spools the end of a run during an outage. Another server marks the run as interrupted and removes it before the
/// spool file is drained.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spooled_records_of_removed_run_are_skipped() {
    let data = Data::with_outages();
    let store = data.open().await;
    store.start_recorder();
    let (RecorderHandle { signals: recorder, .. }, live) = (store.recorder(), store.live());
    let (mut removed, mut kept) = (LiveRun::new("removed"), LiveRun::new("kept"));
    for signal in [removed.started(), removed.prefilled(), removed.token(" a")] {
        recorder.send(signal).await.unwrap();
    }
    wait_for_status(&store, &removed.run_id().to_string(), RunStatus::Running).await;
    let mut ends = live.runs(&Scope::All);
    data.begin_outage().await;
    // The records of the other run are drained in several batches, of which only the first one starts it.
    let kept_sent = kept.all(150);
    let (begin, end) = kept_sent.split_at(100);
    for signal in begin.iter().chain(&[removed.token(" b"), removed.ended()]).chain(end) {
        recorder.send(signal.clone()).await.unwrap();
    }
    for _ in 0..2 {
        while next_change(&mut ends).await.status != RunStatus::Done {}
    }
    store.close().await;
    assert_eq!(data.spool_files().len(), 1);

    data.end_outage();
    let other = Database::Url { url: data.url(), direct_url: None, data_dir: data.0.join("other") };
    let other = Store::open(other, |_| {}).await.unwrap();
    wait_for_status(&other, "removed", RunStatus::Interrupted).await;
    assert!(other.delete(&Scope::All, removed.run_id()).await.unwrap());
    other.close().await;
    let store = data.open().await;
    assert_no_rows(&data.url(), removed.run_id()).await;
    let run = store.find(&Scope::All, "kept").await.unwrap().unwrap();
    assert_eq!((run.status, run.completion_tokens, run.has_attention), (RunStatus::Done, 150, true));
    let stored = store.items(&Scope::All, kept.run_id(), 0..i32::MAX).await.unwrap();
    assert_eq!(format!("{stored:#?}"), expected_items(&kept_sent));
    store.close().await;
    assert!(data.spool_files().is_empty(), "a drained spool file must be removed");
}

/// A server drains its spool file and is killed before it empties the file. Two of the runs are removed before its next start:
/// one by a client, the other one by the retention.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_runs_are_not_recreated_by_their_spooled_start() {
    let data = Data::with_outages();
    let store = data.open().await;
    store.start_recorder();
    let (RecorderHandle { signals: recorder, .. }, live) = (store.recorder(), store.live());
    let mut ends = live.runs(&Scope::All);
    data.begin_outage().await;
    let today = system::now().date_naive();
    let (mut deleted, mut kept) = (LiveRun::new("deleted"), LiveRun::new("kept"));
    let mut expired = LiveRun::on_day("expired", today - Days::new(8));
    let kept_sent = kept.all(2);
    for signal in deleted.all(2).iter().chain(&expired.all(2)).chain(&kept_sent) {
        recorder.send(signal.clone()).await.unwrap();
    }
    for _ in 0..3 {
        while next_change(&mut ends).await.status != RunStatus::Done {}
    }
    store.close().await;
    let files = data.spool_files();
    let [file] = &files[..] else { panic!("{files:?}") };
    let copy = data.0.join("copy");
    std::fs::copy(file, &copy).unwrap();

    data.end_outage();
    let store = data.open().await;
    assert!(store.delete(&Scope::All, deleted.run_id()).await.unwrap());
    let week = Retention { days: Some(7), bytes: None };
    assert_eq!(store.prune(week, today).await.unwrap(), [(today - Days::new(8), 1)]);
    store.close().await;

    assert!(data.spool_files().is_empty(), "a drained spool file must be removed");
    std::fs::rename(&copy, file).unwrap();
    let store = data.open().await;
    assert_no_rows(&data.url(), deleted.run_id()).await;
    assert_no_rows(&data.url(), expired.run_id()).await;
    let stored = store.items(&Scope::All, kept.run_id(), 0..i32::MAX).await.unwrap();
    assert_eq!(format!("{stored:#?}"), expected_items(&kept_sent));
    assert!(store.damaged_links().await.unwrap().is_empty());

    // A client may send the run again, under a new run id.
    assert!(store.ingest(&Scope::All, None, document("deleted", 2)).await.unwrap().created);
    let entries = "select (select count(*) from removed_runs) || ' ' || (select count(*) from removed_days)";
    for (days, expected) in [(29, "1 1"), (32, "0 0")] {
        store.prune(Retention::default(), today + Days::new(days)).await.unwrap();
        assert_eq!(psql(&data.url(), entries).await, expected, "{days} days later");
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_database_recovers_during_run() {
    let data = Data::embedded();
    let store = data.open().await;
    store.start_recorder();
    let RecorderHandle { signals: recorder, .. } = store.recorder();
    let mut run = LiveRun::new("survivor");
    let mut sent = vec![run.started(), run.prefilled()];
    for signal in &sent {
        recorder.send(signal.clone()).await.unwrap();
    }
    let mut killed = 0;
    for number in 0..40 {
        if number % 15 == 10 {
            killed = data.postmaster_after(killed).await;
            kill(killed, "-9");
        }
        sent.push(run.token(" x"));
        recorder.send(sent.last().unwrap().clone()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    sent.push(run.ended());
    recorder.send(sent.last().unwrap().clone()).await.unwrap();
    wait_for_status(&store, &run.run_id().to_string(), RunStatus::Done).await;
    let stored = store.items(&Scope::All, run.run_id(), 0..i32::MAX).await.unwrap();
    assert_eq!(format!("{stored:#?}"), expected_items(&sent));
    store.close().await;
}

#[tokio::test]
async fn damaged_run_of_dead_server_is_marked_and_start_succeeds() {
    let data = Data::new();
    let store = data.open().await;
    store.start_recorder();
    let RecorderHandle { signals: recorder, .. } = store.recorder();
    let mut run = LiveRun::new("damaged");
    for signal in [run.started(), run.prefilled(), run.token(" sky")] {
        recorder.send(signal).await.unwrap();
    }
    wait_for_status(&store, &run.run_id().to_string(), RunStatus::Running).await;
    while store.items(&Scope::All, run.run_id(), 0..100).await.unwrap().len() < 7 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    psql(&data.url(), "update events set measured = '\\x07'").await;
    store.close().await;
    let store = data.open().await;
    let found = store.find(&Scope::All, "damaged").await.unwrap().unwrap();
    assert_eq!(found.status, RunStatus::Interrupted);
    assert!(found.completed_at.is_some());
    assert!(store.items(&Scope::All, run.run_id(), 0..100).await.is_err(), "damaged rows must be an error");
    store.close().await;
}
