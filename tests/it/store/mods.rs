use super::{Data, Live, kill_listeners, psql};
use chrono::Days;
use serde_json::json;
use std::time::{Duration, Instant};
use thunder::events::{Recorder, RunStatus, Scope, system};
use thunder::store::{ModVersion, Retention, Store};
use tokio::time::timeout;

fn version(name: &str, hash: &str, from_file: bool) -> ModVersion {
    ModVersion {
        name: name.into(),
        hash: hash.into(),
        upload: json!({"name": name, "source": hash}),
        created_at: system::now(),
        created_by: Some("somebody".into()),
        from_file,
    }
}

async fn hashes(store: &Store, name: &str) -> Vec<(String, bool)> {
    let versions = store.mod_versions(name).await.unwrap();
    versions.into_iter().map(|version| (version.hash, version.from_file)).collect()
}

#[tokio::test]
async fn file_versions_are_kept_as_long_as_their_runs() {
    let data = Data::new();
    let store = data.open().await;
    let today = system::now().date_naive();
    let ago = |days| today - Days::new(days);
    store.save_used_mod(&version("calm", "old", true), ago(9)).await.unwrap();
    store.save_used_mod(&version("calm", "older but used", true), ago(9)).await.unwrap();
    store.save_used_mod(&version("calm", "older but used", true), today).await.unwrap();
    store.save_used_mod(&version("calm", "older but used", true), ago(5)).await.unwrap();
    store.save_mod(&version("other", "sent", false)).await.unwrap();
    assert_eq!(hashes(&store, "calm").await.len(), 2);
    assert!(store.uploaded_mod("calm").await.unwrap().is_none(), "a file is not an uploaded mod");
    assert_eq!(store.uploaded_mod("other").await.unwrap().unwrap().hash, "sent");

    let mut run = Live::new("now");
    let (Recorder { signals, .. }, _) = store.recorder();
    for signal in run.all(3) {
        signals.send(signal).await.unwrap();
    }
    let begin = Instant::now();
    while store.find(&Scope::All, "now").await.unwrap().is_none_or(|run| run.status != RunStatus::Done) {
        assert!(begin.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    psql(&data.url(), &format!("select make_partitions('{}', 1)", ago(10))).await;
    let week = Retention { days: Some(7), bytes: None };
    assert_eq!(store.prune(week, today).await.unwrap(), [(ago(10), 0)]);
    assert_eq!(hashes(&store, "calm").await, [("older but used".to_owned(), true)]);
    assert_eq!(hashes(&store, "other").await, [("sent".to_owned(), false)], "an uploaded mod is not a file");

    // The version of a file is uploaded and becomes an uploaded version.
    store.save_mod(&version("calm", "older but used", false)).await.unwrap();
    assert_eq!(hashes(&store, "calm").await, [("older but used".to_owned(), false)]);
    for number in 0..120 {
        store.save_used_mod(&version("calm", &format!("v{number}"), true), today).await.unwrap();
    }
    let kept = hashes(&store, "calm").await;
    assert!((100..=101).contains(&kept.len()), "{}", kept.len());
    assert!(kept.contains(&("older but used".to_owned(), false)), "the current version is kept");
    store.close().await;
}

#[tokio::test]
async fn listeners_are_notified_even_after_a_database_outage() {
    let data = Data::new();
    let store = data.open().await;
    let mut changes = store.mod_changes();
    changes.next().await;
    let soon = Duration::from_secs(20);
    store.save_mod(&version("calm", "one", false)).await.unwrap();
    timeout(soon, changes.next()).await.expect("an upload");
    store.enable_mod("calm", false, system::now(), None).await.unwrap();
    timeout(soon, changes.next()).await.expect("a switch");
    assert_eq!(kill_listeners(&data.url()).await, "1");
    timeout(soon, changes.next()).await.expect("the lost connection is reported as a change");
    let reported = async {
        loop {
            changes.next().await;
            let states = store.mod_states().await.unwrap();
            if states.is_empty() {
                return;
            }
        }
    };
    let (reported, removed) = tokio::join!(timeout(soon, reported), store.remove_mod("calm"));
    reported.expect("a removal");
    removed.unwrap();
    let waiting = tokio::spawn(async move { changes.next().await });
    timeout(soon, store.close()).await.expect("a waiting subscriber does not delay the close");
    timeout(soon, waiting).await.expect("the subscriber no longer waits").unwrap();
}
