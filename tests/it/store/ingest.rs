//! Ingested documents: round trips, conflicts, cancellation, and a killed database.

use super::{Data, document, kill, payload, psql, wait_for_psql};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use thunder::events::{RunId, RunStatus, Scope, TraceItem};
use thunder::store::{Database, IngestError, ItemRange, Store};
use thunder::trace::document::{Document, Numbering, RunDetails, item_to_json};

#[tokio::test]
async fn ingested_document_is_exported_unchanged() {
    let data = Data::new();
    let store = data.open().await;
    let text = r#"{"request":{"request_id":"r1","temperature":0.30000000000000004,"mod_text":"def f():\n  pass"},
        "events":[
            {"event_type":"Sampled","step":1,"sequence_order":1,"sampled_token":-3,"token_text":"é",
             "details":{ "z":1.0,"z":2, "a":{"b" : [1E2,-0.0]},"n":12345678901234567890123 }},
            {"event_type":"Prefilled","step":0,"sequence_order":0,"prompt_length":3,"top_tokens":{"any": "shape"}},
            {"event_type":"Added","step":1,"sequence_order":2,"added_tokens":[],"added_token_count":0,"forced":true,"created_at":1764613800.25}],
        "mod_calls":[
            {"event_sequence_order":2,"mod_name":"late","event_type":"Added","step":1,"exception_occurred":true,"exception_message":"boom","exception_traceback":"line 1"},
            {"event_sequence_order":0,"mod_name":"early","event_type":"Prefilled","step":0,"execution_time_ms":2.5}],
        "mod_logs":[{"mod_call_sequence":1,"mod_name":"early","log_message":"hello"},{"mod_call_sequence":0,"mod_name":"late","log_message":"x","log_level":"ERROR"}],
        "actions":[{"mod_call_sequence":0,"action_type":"ToolCalls","action_order":1,"has_tool_calls":true,"tool_calls":[ {"name":"f"} ]},
            {"mod_call_sequence":0,"action_type":"Backtrack","action_order":0,"backtrack_steps":1,"details":{"b":1, "a":2}}]}"#;
    let document = Document::parse(text.as_bytes()).unwrap();
    let ingested = store.ingest(&Scope::All, None, document.clone()).await.unwrap();
    assert!(ingested.created);
    let mut stored = store.document(&Scope::All, ingested.run_id).await.unwrap().unwrap();
    assert!(stored.request.created_at.is_some(), "the default is the time of ingestion");
    let exported = Document::parse(&stored.write()).unwrap();
    let again = store.ingest(&Scope::All, None, exported.clone()).await.unwrap();
    assert_eq!((again.run_id, again.created), (ingested.run_id, false), "the export is the same document");
    let mut earlier = exported.clone();
    earlier.request.request_id = "r2".into();
    let without_details = store.ingest(&Scope::All, None, earlier.clone()).await.unwrap();
    earlier.request.extras.thunder_run = Some(RunDetails { prompt_tokens: Some(3), ..RunDetails::default() });
    let again = store.ingest(&Scope::All, None, earlier.clone()).await.unwrap();
    assert_eq!((again.run_id, again.created), (without_details.run_id, false), "an export by an earlier version");
    earlier.request.temperature = Some(0.5);
    let conflict = store.ingest(&Scope::All, None, earlier).await.unwrap_err();
    assert!(matches!(conflict, IngestError::Conflict { .. }), "{conflict}");
    assert!(store.delete(&Scope::All, again.run_id).await.unwrap());
    let mut changed = exported;
    changed.request.temperature = Some(0.5);
    let conflict = store.ingest(&Scope::All, None, changed).await.unwrap_err();
    assert!(matches!(conflict, IngestError::Conflict { .. }), "{conflict}");
    stored.request.created_at = None;
    assert_eq!(format!("{document:#?}"), format!("{stored:#?}"));

    let run = store.find(&Scope::All, "r1").await.unwrap().unwrap();
    assert_eq!((run.run_id, run.status, run.events), (ingested.run_id, RunStatus::Done, 3));
    assert_eq!(run.mods, ["early", "late"]);
    assert_eq!(store.find(&Scope::All, &run.run_id.to_string()).await.unwrap().unwrap(), run);

    let pages = store.item_pages(&Scope::All, run.run_id, 2..3).await.unwrap();
    let page = store.item_page(&Scope::All, run.run_id, &pages[0]).await.unwrap();
    let numbering = (page.numbering.mod_calls, page.numbering.mod_logs, page.numbering.actions);
    assert_eq!((numbering, page.items.len(), pages.len()), ((1, 1, 0), 5, 1));
    assert_eq!(store.items(&Scope::All, run.run_id, 0..i32::MAX).await.unwrap().len(), 9);
    assert!(store.columns(&Scope::All, run.run_id).await.unwrap().unwrap().starts_with(b"RUNC"));
    assert!(store.damaged_links().await.unwrap().is_empty());

    assert!(store.delete(&Scope::All, run.run_id).await.unwrap());
    assert!(!store.delete(&Scope::All, run.run_id).await.unwrap());
    assert!(store.find(&Scope::All, "r1").await.unwrap().is_none());
    assert!(store.document(&Scope::All, run.run_id).await.unwrap().is_none());
    assert!(store.columns(&Scope::All, run.run_id).await.unwrap().is_none());
    assert_eq!(psql(&data.url(), "select (select count(*) from events) + (select count(*) from run_keys)").await, "0");
    store.close().await;
}

#[tokio::test]
async fn repeated_document_is_one_run_and_different_one_conflicts() {
    let data = Data::new();
    let store = data.open().await;
    let ingests = (0..8).map(|_| {
        let store = store.clone();
        tokio::spawn(async move { store.ingest(&Scope::All, None, document("same", 20)).await })
    });
    let mut created = 0;
    let mut ids = Vec::new();
    for ingest in ingests.collect::<Vec<_>>() {
        let ingested = ingest.await.unwrap().unwrap();
        created += u32::from(ingested.created);
        ids.push(ingested.run_id);
    }
    ids.dedup();
    assert_eq!((created, ids.len()), (1, 1));
    let conflict = store.ingest(&Scope::All, None, document("same", 21)).await.unwrap_err();
    assert!(matches!(&conflict, IngestError::Conflict { request_id } if request_id == "same"), "{conflict}");
    assert_eq!(psql(&data.url(), "select count(*) from runs").await, "1");
    assert_eq!(psql(&data.url(), "select count(*) from events where tableoid = 'events_default'::regclass").await, "0");
    store.close().await;
}

#[tokio::test]
async fn lost_columns_are_built_again_from_the_rows() {
    let data = Data::new();
    let store = data.open().await;
    let text = r#"{"request":{"request_id":"lost"},
        "events":[{"event_type":"Added","step":1,"sequence_order":0,"added_tokens":[5],"added_token_count":1}],
        "mod_calls":[{"event_sequence_order":0,"mod_name":"m","event_type":"Added","step":1}],
        "actions":[{"mod_call_sequence":0,"action_type":"Backtrack","action_order":0,"backtrack_steps":1,
            "details":{"backtrack_steps":1}}]}"#;
    let document = Document::parse(text.as_bytes()).unwrap();
    let run_id = store.ingest(&Scope::All, None, document).await.unwrap().run_id;
    let columns = store.columns(&Scope::All, run_id).await.unwrap();
    assert!(columns.is_some());
    psql(&data.url(), "delete from run_columns").await;
    assert_eq!(store.columns(&Scope::All, run_id).await.unwrap(), columns);
    store.close().await;
}

#[tokio::test]
async fn nesting_of_a_document_is_limited() {
    let document = |levels: usize| {
        let details = format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        let text = format!(
            r#"{{"request":{{"request_id":"deep"}},"events":[{{"event_type":"Prefilled","step":0,"sequence_order":0,"details":{details}}}]}}"#
        );
        Document::parse(text.as_bytes())
    };
    for levels in [129, 200_000] {
        let error = document(levels).unwrap_err().to_string();
        assert_eq!(error, "$.events[0].details: expected up to 128 nested levels, got more", "{levels}");
    }
    let data = Data::new();
    let store = data.open().await;
    assert!(store.ingest(&Scope::All, None, document(128).unwrap()).await.unwrap().created);
    store.close().await;
}

/// A client that received 201 can read its run after the database was killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_documents_survive_killed_database() {
    let data = Data::embedded();
    let store = data.open().await;
    let (count, is_over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let clients: Vec<_> = (0..3)
        .map(|client| {
            let (store, count, is_over) = (store.clone(), Arc::clone(&count), Arc::clone(&is_over));
            tokio::spawn(async move {
                let mut acknowledged = Vec::new();
                for number in 0.. {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    let request_id = format!("p{client}-{number}");
                    match store.ingest(&Scope::All, None, document(&request_id, 30)).await {
                        Ok(_) => {
                            acknowledged.push(request_id);
                            count.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(IngestError::Unavailable { .. }) => tokio::time::sleep(Duration::from_millis(50)).await,
                        Err(error) => panic!("{error}"),
                    }
                }
                acknowledged
            })
        })
        .collect();
    let more_documents = async || {
        let (begun, before) = (Instant::now(), count.load(Ordering::Relaxed));
        while count.load(Ordering::Relaxed) < before + 10 {
            assert!(begun.elapsed() < Duration::from_mins(1), "no document is accepted");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let mut killed = 0;
    for _ in 0..2 {
        more_documents().await;
        killed = data.postmaster_after(killed).await;
        kill(killed, "-9");
    }
    more_documents().await;
    is_over.store(true, Ordering::Relaxed);
    let mut all = Vec::new();
    for client in clients {
        all.extend(client.await.unwrap());
    }
    let begun = Instant::now();
    while store.ready().await.is_err() {
        assert!(begun.elapsed() < Duration::from_mins(1), "the database is not ready");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for request_id in &all {
        assert!(
            store.find(&Scope::All, request_id).await.unwrap().is_some(),
            "{request_id} was acknowledged but is lost"
        );
    }
    assert!(store.damaged_links().await.unwrap().is_empty());
    store.close().await;
}

#[tokio::test]
async fn document_larger_than_one_statement_round_trips() {
    let data = Data::new();
    let store = data.open().await;
    let payload = payload("large", 9000);
    let document = Document::parse(&payload).unwrap();
    let (events, calls) = (document.events.len(), document.mod_calls.len());
    let run_id = store.ingest(&Scope::All, None, document).await.unwrap().run_id;
    let stored = store.document(&Scope::All, run_id).await.unwrap().unwrap();
    assert_eq!((stored.events.len(), stored.mod_calls.len()), (events, calls));
    store.close().await;
}

/// Returns the items of a run of ten pages as lines of JSON.
async fn lines_of_pages(store: &Store, run_id: RunId) -> Vec<String> {
    let mut lines = Vec::new();
    let pages = store.item_pages(&Scope::All, run_id, 0..i32::MAX).await.unwrap();
    assert_eq!(pages.len(), 10);
    for page in &pages {
        let mut page = store.item_page(&Scope::All, run_id, page).await.unwrap();
        lines.extend(page.items.iter().filter_map(|item| item_to_json(item, &mut page.numbering)));
    }
    lines
}

#[tokio::test]
async fn pages_have_all_items_and_read_each_row_a_few_times() {
    let data = Data::new();
    let store = data.open().await;
    let mut document = document("pages", 3000);
    let calls = document.mod_calls.len();
    let ordered = store.ingest(&Scope::All, None, document.clone()).await.unwrap().run_id;
    // The same calls in the reverse order.
    document.request.request_id = "reversed".into();
    document.mod_calls.reverse();
    let last_call = i32::try_from(calls).unwrap() - 1;
    document.mod_logs.iter_mut().for_each(|log| log.mod_call_sequence = last_call - log.mod_call_sequence);
    document.actions.iter_mut().for_each(|action| action.mod_call_sequence = last_call - action.mod_call_sequence);
    let reversed = store.ingest(&Scope::All, None, document).await.unwrap().run_id;
    let lines = lines_of_pages(&store, ordered).await;
    assert_eq!(lines.len(), 3 * calls + calls.div_ceil(4));
    assert!(lines == lines_of_pages(&store, reversed).await, "the order of calls in the document does not matter");
    // Each page begins at the last event of the previous one, without a count of earlier items.
    let (mut following, mut event, mut numbering) = (Vec::new(), 0, Numbering::default());
    loop {
        let range = ItemRange::following(event..i32::MAX, numbering);
        let mut page = store.item_page(&Scope::All, ordered, &range).await.unwrap();
        let last = page.items.iter().rposition(|item| matches!(item, TraceItem::Event(_))).unwrap();
        let end = if last == 0 { page.items.len() } else { last };
        following.extend(page.items[..end].iter().filter_map(|item| item_to_json(item, &mut page.numbering)));
        match &page.items[last] {
            TraceItem::Event(next) if last > 0 => (event, numbering) = (next.sequence_order, page.numbering),
            _ => break,
        }
    }
    assert!(lines == following);
    let mut numbering = Numbering::default();
    let items = store.items(&Scope::All, ordered, 0..i32::MAX).await.unwrap();
    assert!(lines == items.iter().filter_map(|item| item_to_json(item, &mut numbering)).collect::<Vec<_>>());

    // PostgreSQL counts the reads of a connection when it closes.
    let url = data.url();
    let others = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
        and backend_type = 'client backend'";
    store.close().await;
    wait_for_psql(&url, others, "0").await;
    psql(&url, "select pg_stat_reset()").await;
    let store = data.open().await;
    lines_of_pages(&store, ordered).await;
    store.close().await;
    wait_for_psql(&url, others, "0").await;
    let rows = "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) from pg_stat_user_tables
        where relname like 'mod_calls%'";
    let rows: usize = psql(&url, rows).await.parse().unwrap();
    assert!(rows > calls && rows < 8 * calls, "{rows} rows were read for {calls} calls");
}

/// The connection of a cancelled ingest can be used again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_ingest_leaves_no_rows() {
    let data = Data::new();
    let store = data.open().await;
    let mut finished = 0;
    for number in 0..20 {
        let (kept, dropped) = (format!("kept-{number}"), document(&format!("dropped-{number}"), 400));
        let ingest = tokio::spawn({
            let store = store.clone();
            async move { store.ingest(&Scope::All, None, dropped).await }
        });
        tokio::time::sleep(Duration::from_micros(2700 * number)).await;
        ingest.abort();
        finished += u32::from(ingest.await.is_ok_and(|ingested| ingested.is_ok()));
        let ingested = store.ingest(&Scope::All, None, document(&kept, 3)).await.unwrap();
        let run = store.find(&Scope::All, &kept).await.unwrap().unwrap();
        assert_eq!((run.run_id, run.events), (ingested.run_id, 10), "{kept}");
        let stored = store.document(&Scope::All, run.run_id).await.unwrap().unwrap();
        assert_eq!((stored.events.len(), stored.mod_calls.len()), (10, 10), "{kept}");
    }
    assert!(finished < 20, "every ingest finished before it was cancelled");
    let url = data.url();
    assert_eq!(psql(&url, "select count(*) from runs where request_id like 'kept-%'").await, "20");
    let complete = "select count(*) from runs r where request_id like 'dropped-%'
        and (select count(*) from events e where e.run_id = r.run_id) = 1201
        and (select count(*) from actions a where a.run_id = r.run_id) = 1201";
    assert_eq!(
        psql(&url, complete).await,
        psql(&url, "select count(*) from run_keys where request_id like 'dropped-%'").await
    );
    assert!(store.damaged_links().await.unwrap().is_empty());
    store.close().await;
}

/// Rows are copied over a Unix socket and inserted over TCP; the results are equal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn document_round_trips_over_tcp() {
    let data = Data::new();
    let database = data.open().await;
    let url = format!("postgres://postgres@localhost:{}", data.url().rsplit_once(':').unwrap().1);
    let store =
        Store::open(Database::Url { url, direct_url: None, data_dir: data.0.join("tcp") }, |_| {}).await.unwrap();
    let document = document("tcp", 30);
    let ingested = store.ingest(&Scope::All, None, document.clone()).await.unwrap();
    let stored = store.document(&Scope::All, ingested.run_id).await.unwrap().unwrap();
    assert_eq!(format!("{document:#?}"), format!("{stored:#?}"));
    let copied = database.ingest(&Scope::All, None, document).await.unwrap();
    assert_eq!((copied.run_id, copied.created), (ingested.run_id, false));
    store.close().await;
    database.close().await;
}
