use super::{Data, Live, document};
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
