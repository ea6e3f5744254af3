//! Versions of mods: their storage, removal and notifications.

use super::{Data, LiveRun, kill_listeners, psql, wait_for_status};
use chrono::Days;
use serde_json::json;
use std::time::Duration;
use thunder::events::{RunStatus, system};
use thunder::recording::RecorderHandle;
use thunder::store::{ModVersion, Retention, Store};
use tokio::time::timeout;

fn version(name: &str, hash: &str, from_file: bool) -> ModVersion {
    ModVersion {
        name: name.into(),
        hash: hash.into(),
        upload: json!({"name": name, "source": hash}),
        created_at: system::now(),
        created_by: Some("ann".into()),
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
    assert!(store.uploaded_mod("calm").await.unwrap().is_none(), "the version comes from a file, not from an upload");
    assert_eq!(store.uploaded_mod("other").await.unwrap().unwrap().hash, "sent");

    let mut run = LiveRun::new("now");
    store.start_recorder();
    let RecorderHandle { signals, .. } = store.recorder();
    for signal in run.all(3) {
        signals.send(signal).await.unwrap();
    }
    wait_for_status(&store, "now", RunStatus::Done).await;
    psql(&data.url(), &format!("select make_partitions('{}', 1)", ago(10))).await;
    let week = Retention { days: Some(7), bytes: None };
    assert_eq!(store.prune(week, today).await.unwrap(), [(ago(10), 0)]);
    assert_eq!(hashes(&store, "calm").await, [("older but used".to_owned(), true)]);
    assert_eq!(hashes(&store, "other").await, [("sent".to_owned(), false)], "an uploaded version must stay");
    let sent = store.mod_version("other", "sent").await.unwrap().unwrap();
    assert_eq!((sent.upload, sent.from_file), (version("other", "sent", false).upload, false));
    assert_eq!(store.mod_version("calm", "sent").await.unwrap(), None);
    let state = store.mod_state("other").await.unwrap().unwrap();
    assert_eq!((state.hash.as_deref(), state.enabled), (Some("sent"), true));
    assert_eq!(store.mod_state("calm").await.unwrap(), None);

    // An upload of the same version makes it an uploaded version, and another upload replaces its description.
    store.save_mod(&version("calm", "older but used", false)).await.unwrap();
    let mut described = version("calm", "older but used", false);
    described.upload["description"] = json!("Calm.");
    store.save_mod(&described).await.unwrap();
    assert_eq!(store.uploaded_mod("calm").await.unwrap().unwrap().upload, described.upload);
    // Earlier releases gave the same hash to uploads with different entrypoints.
    let mut other_entrypoint = described.clone();
    other_entrypoint.upload["entrypoint"] = json!("calm");
    store.save_mod(&other_entrypoint).await.unwrap();
    assert_eq!(store.uploaded_mod("calm").await.unwrap().unwrap().upload, described.upload);
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
    let wait_timeout = Duration::from_mins(1);
    store.save_mod(&version("calm", "one", false)).await.unwrap();
    timeout(wait_timeout, changes.next()).await.expect("no notification of an upload");
    store.set_mod_enabled("calm", false, system::now(), None).await.unwrap();
    timeout(wait_timeout, changes.next()).await.expect("no notification of a disabled mod");
    assert_eq!(kill_listeners(&data.url()).await, "1");
    timeout(wait_timeout, changes.next()).await.expect("no notification after a lost connection");
    let until_removed = async {
        loop {
            changes.next().await;
            let states = store.mod_states().await.unwrap();
            if states.is_empty() {
                return;
            }
        }
    };
    let (until_removed, removed) = tokio::join!(timeout(wait_timeout, until_removed), store.remove_mod("calm"));
    until_removed.expect("no notification of a removal");
    removed.unwrap();
    let waiting = tokio::spawn(async move { changes.next().await });
    timeout(wait_timeout, store.close()).await.expect("a waiting subscriber delays the close");
    timeout(wait_timeout, waiting).await.expect("the subscriber still waits").unwrap();
}
