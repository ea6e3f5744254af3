use super::*;
use crate::config::flags::{DataFlags, EngineFlags, ServerFlags, default_flags};
use crate::events::system;
use crate::mods::ModRegistry;
use crate::server::{App, ServerState};
use serde_json::value::RawValue;
use std::path::Path;
use std::time::Duration;
use tokio::sync::mpsc;

/// Name of the model in the tests, which is not the default model.
const APPLE: Option<&str> = Some("apple");

/// A folder that is removed on drop.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // A thread may still write to it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns the state of a server that has loaded no model yet, and its folder.
async fn app() -> (Folder, App) {
    let folder = Folder(std::env::temp_dir().join(format!("thunder-models-{:032x}", system::random::<u128>())));
    std::fs::create_dir(&folder.0).unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf");
    std::fs::copy(&tiny, folder.0.join("apple.gguf")).unwrap();
    let data = DataFlags { data_dir: Some(folder.0.join("data")), ..default_flags() };
    let engine = EngineFlags {
        model: Some(tiny),
        ctx_size: Some(256),
        parallel: Some(1),
        threads: Some(1),
        batch_size: 64,
        ubatch_size: 64,
        ..default_flags()
    };
    let server = ServerFlags { models_dir: Some(folder.0.clone()), shutdown_grace: 600, ..default_flags() };
    let config = Arc::new(Config::new(engine, data, &server).unwrap());
    let app = App::new(config, Arc::new(ModRegistry::default()), chrono::DateTime::default);
    app.models().open(None, mpsc::channel(1).0.into()).await.unwrap();
    app.set_state(ServerState::Ready);
    (folder, app)
}

/// Waits until the state of the model is one of the expected ones.
async fn wait_for(registry: &ModelRegistry, is_expected: impl Fn(&ModelState) -> bool) {
    let mut changed = registry.changes();
    let wait = async {
        while !is_expected(&registry.entry_by_name("apple").unwrap().state) {
            changed.changed().await.unwrap();
        }
    };
    let waited = tokio::time::timeout(Duration::from_mins(1), wait).await;
    assert!(waited.is_ok(), "the state is {:?}", registry.entry_by_name("apple").unwrap().state);
}

#[tokio::test]
async fn model_in_use_is_unloaded_on_request_only_and_stopped_with_the_server() {
    let (_folder, app) = app().await;
    let registry = app.models();
    let loaded = registry.get_or_load(APPLE).await.unwrap();
    let used = registry.entry_by_name("apple").unwrap().last_used;
    assert!(!registry.unload_idle("apple", used, None), "a request uses the model");
    registry.begin_unload("apple").unwrap();
    let entry = registry.entry_by_name("apple").unwrap();
    assert!(matches!(entry.state, ModelState::Unloading(_)) && entry.in_memory().is_some());
    registry.stop().await;
    assert!(!loaded.is_running());
    drop(loaded);
    wait_for(registry, |state| matches!(state, ModelState::Unloaded)).await;
    assert!(entry.in_memory().is_none());
}

#[tokio::test]
async fn model_is_loaded_again_after_a_cancelled_load() {
    let (_folder, app) = app().await;
    let registry = app.models();
    registry.begin_load("apple").await.unwrap();
    registry.begin_unload("apple").unwrap();
    assert!(matches!(registry.entry_by_name("apple").unwrap().state, ModelState::CancellingLoad));
    assert!(registry.get_or_load(APPLE).await.unwrap().is_running());
    registry.stop().await;
}

#[tokio::test]
async fn load_that_was_cancelled_at_its_end_leaves_no_engine() {
    let (_folder, app) = app().await;
    let registry = app.models();
    let entry = registry.entry_by_name("apple").unwrap();
    for ends_server in [false, true] {
        let loaded = registry.get_or_load(APPLE).await.unwrap();
        let cancelled = Arc::<AtomicBool>::default();
        registry.change("apple", |entry| {
            entry.state = ModelState::Loading { progress: 1.0, cancelled: Arc::clone(&cancelled) };
        });
        if ends_server {
            registry.stop().await;
        } else {
            registry.begin_unload("apple").unwrap();
        }
        registry.end_load(&entry, &cancelled, None, Ok(loaded.clone())).await.unwrap_err();
        assert!(!loaded.is_running());
        assert!(matches!(registry.entry_by_name("apple").unwrap().state, ModelState::Unloaded));
    }
}

#[tokio::test]
async fn model_whose_threads_have_ended_is_loaded_again_once() {
    let (_folder, app) = app().await;
    let registry = app.models();
    for _ in 0..2 {
        let loaded = registry.get_or_load(APPLE).await.unwrap();
        assert!(loaded.is_running());
        loaded.stop().await;
    }
    let error = format!("{:?}", registry.get_or_load(APPLE).await.unwrap_err());
    assert!(error.contains("its decode thread stopped soon after each of the last two loads"), "{error}");
    registry.stop().await;
}

#[tokio::test]
async fn concurrent_read_only_requests_wait_for_a_sleeping_model() {
    let (_folder, app) = app().await;
    let registry = app.models();
    let loaded = registry.get_or_load(APPLE).await.unwrap();
    let statuses = [Arc::clone(loaded.engine().status()), Arc::clone(loaded.encoder().status())];
    drop(loaded);
    let sleeping = SleepingModel {
        props: RawValue::from_string("{}".to_owned()).unwrap(),
        chat_template: None,
        vision: false,
        statuses,
    };
    let used = registry.entry_by_name("apple").unwrap().last_used;
    registry.begin_sleep("apple", used, sleeping);
    wait_for(registry, |state| matches!(state, ModelState::Unloaded)).await;
    assert!(registry.entry_by_name("apple").unwrap().is_sleeping());
    let first = tokio::spawn({
        let app = app.clone();
        async move { app.get_or_wake(APPLE).await.map(|_| ()) }
    });
    wait_for(registry, |state| matches!(state, ModelState::Loading { .. } | ModelState::Ready(_))).await;
    app.get_or_wake(APPLE).await.unwrap();
    first.await.unwrap().unwrap();
    registry.stop().await;
}
