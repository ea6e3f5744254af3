//! A server whose decode thread has ended, and one without database and disk.

use super::harness::postgres::TestDatabase;
use super::harness::{folder, free_port, message_of, model, thunder};
use chrono::{DateTime, Utc};
use clap::Parser;
use serde_json::{Value, json};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thunder::config::Config;
use thunder::config::flags::{DataFlags, EngineFlags, ServerFlags};
use thunder::events::{RunStatus, Scope, system};
use thunder::mods::ModRegistry;
use thunder::recording::Signal;
use thunder::server::{App, Listeners, ServerState};
use thunder::store::{Database, Store};
use tokio::sync::mpsc;

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    data: DataFlags,
    #[command(flatten)]
    server: ServerFlags,
}

/// Returns the current time; panics on the decode thread.
fn panicking_clock() -> DateTime<Utc> {
    assert!(std::thread::current().name() != Some("thunder-decode"), "this clock is broken");
    system::now()
}

async fn response_of(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.timeout(Duration::from_mins(3)).send().await.unwrap();
    let status = response.status().as_u16();
    (status, response.json().await.unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_decode_thread_is_reported_on_all_routes() {
    let data_dir = folder();
    let model = model();
    let arguments = ["thunder", "--listen", "127.0.0.1:0", "--data-dir", data_dir.to_str().unwrap(), "--model"];
    let flags = CommandLine::parse_from(arguments.into_iter().chain([model.to_str().unwrap(), "-c", "2048"]));
    let config = Arc::new(Config::new(flags.engine, flags.data, &flags.server).unwrap());
    let database = TestDatabase::new();
    let location = Database::Url { url: database.url(), direct_url: None, data_dir };
    let store = Store::open(location, |_| {}).await.unwrap();
    store.start_recorder();
    let (recorder, mut signals) = mpsc::channel(1000);
    let listeners = Listeners::bind(&config.server.listen).await.unwrap();
    let base = format!("http://{}", listeners.addresses()[0]);
    let app = App::new(config, Arc::new(ModRegistry::with_builtin()), panicking_clock);
    app.set_database(store.clone());
    app.models().open(None, recorder.into()).await.unwrap();
    app.models().load_default(|_, _| ()).await.unwrap();
    app.set_state(ServerState::Ready);
    let serving = tokio::spawn(listeners.serve(app.clone(), thunder::api::router(&app, &thunder::ui::pages())));
    let http = crate::harness::http();
    assert_eq!(response_of(http.get(format!("{base}/healthz"))).await.0, 200);

    // The thread panics during the first run; the second one is submitted later.
    for _ in 0..2 {
        let body = json!({"prompt": "Once", "max_tokens": 4});
        let (status, error) = response_of(http.post(format!("{base}/v1/completions")).json(&body)).await;
        assert_eq!(status, 503, "{error}");
    }
    // The thread reports the lost run while it panics, and ends shortly afterwards.
    while app.engine().unwrap().is_running() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for path in ["/health", "/healthz", "/v1/health"] {
        let (status, health) = response_of(http.get(format!("{base}{path}"))).await;
        assert_eq!((status, health["status"].as_str()), (503, Some("failed")), "{health}");
        assert_eq!(health["reason"], "the decode thread has stopped; restart the server");
    }
    assert!(!app.engine().unwrap().is_running());
    app.models().stop().await;
    let mut ended = None;
    while let Some(signal) = signals.recv().await {
        if let Signal::Ended(_, end) = signal {
            // A later run may have been accepted before the thread ended.
            ended.get_or_insert(end);
        }
    }
    let ended = ended.expect("the end of the run is recorded");
    assert_eq!(ended.status, RunStatus::Failed);
    assert_eq!(ended.finish.message.as_deref(), Some("the decode thread panicked; restart the server"));
    app.set_state(ServerState::Stopping);
    serving.await.unwrap();
    store.close().await;
}

/// The server cannot write files (`ulimit -f 0`), and its database stops.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_with_required_recording_fails_without_recorder() {
    let (database_dir, data_dir) = (folder(), folder());
    let database = Store::open(Database::Embedded { data_dir: database_dir.clone() }, |_| {}).await.unwrap();
    let file = std::fs::read_to_string(database_dir.join("postgres/data/postmaster.pid")).unwrap();
    let url = format!("postgres://thunder@{}/thunder", file.lines().nth(4).unwrap().replace('/', "%2F"));
    let port = free_port();
    let mut server = tokio::process::Command::new("sh");
    server.args(["-c", r#"trap "" XFSZ; ulimit -f 0; exec "$@""#, "sh"]).arg(thunder().get_program());
    server.args(["serve", "--listen", &format!("127.0.0.1:{port}"), "--threads", "1", "--model"]).arg(model());
    server.arg("--data-dir").arg(&data_dir).args(["--database-url", &url]).kill_on_drop(true);
    let mut server = server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let http = crate::harness::http();
    let base = format!("http://127.0.0.1:{port}");
    let begun = Instant::now();
    while !http.get(format!("{base}/healthz")).send().await.is_ok_and(|answer| answer.status() == 200) {
        assert!(begun.elapsed() < Duration::from_mins(3), "the server is not ready");
        assert!(server.try_wait().unwrap().is_none(), "the server process has ended");
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    let complete = |record: &str| {
        let body = json!({"prompt": "Once", "max_tokens": 8, "ignore_eos": true, "record": record});
        response_of(http.post(format!("{base}/v1/completions")).json(&body))
    };
    let (status, answer) = complete("required").await;
    assert_eq!(status, 200, "{answer}");
    let run_id = answer["thunder"]["run_id"].as_str().unwrap();
    let stored =
        database.find(&Scope::All, run_id).await.unwrap().expect("the run is stored before the response is sent");
    assert_eq!(stored.status, RunStatus::Done);

    database.close().await;
    let database_end = Instant::now();
    let (status, answer) = complete("required").await;
    assert_eq!(status, 503, "{answer}");
    assert_eq!(message_of(&answer), "the run must be recorded, but neither the database nor the disk accepts it");
    for path in ["/runs", "/stats"] {
        let page = http.get(format!("{base}{path}")).send().await.unwrap();
        assert_eq!(page.status(), 503);
        let html = page.text().await.unwrap();
        assert!(html.contains("<p>The database cannot be reached.</p>"), "{html}");
    }
    let (status, answer) = complete("best-effort").await;
    assert_eq!(status, 200, "{answer}");
    let delayed_run = answer["thunder"]["run_id"].as_str().unwrap().to_owned();

    // Runs that could not be recorded do not affect later ones.
    let database = Store::open(Database::Embedded { data_dir: database_dir }, |_| {}).await.unwrap();
    let (mut status, mut answer) = complete("required").await;
    while status != 200 {
        assert!(database_end.elapsed() < Duration::from_mins(3), "{answer}");
        (status, answer) = complete("required").await;
    }
    // Runs that were kept in memory are stored completely.
    while database.find(&Scope::All, &delayed_run).await.unwrap().is_none_or(|run| run.status != RunStatus::Done) {
        assert!(
            database_end.elapsed() < Duration::from_mins(3),
            "{:?}",
            database.find(&Scope::All, &delayed_run).await
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    server.kill().await.unwrap();
    database.close().await;
}
