use super::{Data, Live, document, psql};
use std::time::Duration;
use thunder::store::{Error, RunQuery, Store};

async fn found(store: &Store, q: &str) -> Vec<String> {
    let query = RunQuery { q: q.to_owned(), ..RunQuery::default() };
    let page = store.runs(&query).await.unwrap_or_else(|error| panic!("{q}: {error}"));
    page.runs.into_iter().map(|run| run.request_id).collect()
}

#[tokio::test]
async fn runs_are_listed_filtered_and_paged() {
    let data = Data::new();
    let store = data.open().await;
    for number in 0..7 {
        store.ingest(document(&format!("doc-{number}"), 3 + number)).await.unwrap();
    }
    let (thunder::events::Recorder { signals: recorder, .. }, _) = store.recorder();
    let mut run = Live::new("ours");
    for signal in run.all(2) {
        recorder.send(signal).await.unwrap();
    }
    while found(&store, "request:ours status:done").await.is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    let first = store.runs(&RunQuery { limit: 5, ..RunQuery::default() }).await.unwrap();
    assert_eq!(first.runs.len(), 5);
    assert_eq!(first.runs[0].request_id, "ours");
    let second = store.runs(&RunQuery { limit: 5, before: first.next, ..RunQuery::default() }).await.unwrap();
    assert_eq!((second.runs.len(), second.next), (3, None));
    assert_eq!(second.runs[2].request_id, "doc-0");

    assert_eq!(found(&store, "model:GEMINI").await.len(), 7);
    assert_eq!(found(&store, "-model:gemini").await, ["ours"]);
    assert_eq!(found(&store, "surface:openai").await, ["ours"]);
    assert_eq!(found(&store, "mod:watch request:doc-3").await, ["doc-3"]);
    assert_eq!(found(&store, "w9").await, ["doc-6"]);
    assert_eq!(found(&store, "\"w8 w9\"").await, ["doc-6"]);
    assert_eq!(found(&store, "\"w9 w8\"").await, Vec::<String>::new());
    assert_eq!(found(&store, "SK").await, ["ours"], "the last letters of a word may be missing");
    assert_eq!(found(&store, "blue -w1").await, ["ours"]);
    assert_eq!(found(&store, "before:2026-01-01").await.len(), 7);
    assert_eq!(found(&store, "after:1h").await, ["ours"]);
    assert_eq!(found(&store, "error:100%").await, Vec::<String>::new());
    assert_eq!(found(&store, "backtracks:0 error:0 actions<1 forced<=0 ??").await, Vec::<String>::new());
    assert_eq!(found(&store, "a\0b -\"c\0\" model:\0").await, Vec::<String>::new(), "NUL, which no text holds");
    let error = store.runs(&RunQuery { q: "modle:x".into(), ..RunQuery::default() }).await.unwrap_err();
    assert!(matches!(error, Error::BadFilter(bad) if bad.did_you_mean.as_deref() == Some("model")));
    store.close().await;
}

#[tokio::test]
async fn words_are_found_among_the_newest_runs_and_among_all() {
    let data = Data::new();
    let store = data.open().await;
    // More than are looked at one by one; `common` is in all, `needle` in the oldest two, `tail` in the newest and the oldest.
    let runs = "insert into runs (run_id, request_id, created_at, status, surface, mods, prompt_preview, output_preview,
            prompt_tokens, completion_tokens, cached_tokens, events, backtracked, forced, actions, errors, error_text,
            has_attention, surprise_strip, mod_text, search)
        select ('01900000-0000-7000-8000-' || lpad(to_hex(i), 12, '0'))::uuid, 'r' || i, now(),
            case when i = 1 then 'failed' else 'done' end, 'openai', '{}', '', '', 1, i, 0, 1, 0, 0, 0, 0, '', false, '', 'source',
            to_tsvector('simple', 'common' || case when i < 3 then ' the needle' else '' end
                || case when i in (1, 1200) then ' tail' else '' end)
        from generate_series(1, 1200) i";
    psql(&data.url(), runs).await;
    assert_eq!(found(&store, "needle").await, ["r2", "r1"]);
    assert_eq!(found(&store, "\"the needle\" -status:failed").await, ["r2"]);
    assert_eq!(found(&store, "tail common").await, ["r1200", "r1"]);
    assert_eq!(found(&store, "needle -tail").await, ["r2"]);
    assert_eq!(found(&store, "tail tokens<5").await, ["r1"]);
    let query = |before, limit| RunQuery { q: "comm".into(), before, limit };
    let (mut pages, mut before) = (Vec::new(), None);
    loop {
        let page = store.runs(&query(before, 500)).await.unwrap();
        assert!(page.runs.iter().all(|run| run.mod_text.is_none()), "lists are short");
        pages.extend(page.runs.into_iter().map(|run| run.completion_tokens));
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    assert_eq!(pages, (1..=1200).rev().collect::<Vec<_>>(), "each run once, newest first");
    let one = store.find("01900000-0000-7000-8000-000000000001").await.unwrap().unwrap();
    assert_eq!(one.mod_text.as_deref(), Some("source"));
    store.close().await;
}
