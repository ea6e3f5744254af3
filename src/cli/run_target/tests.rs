use super::*;
use crate::trace::document::RequestMeta;
use axum::Router;
use axum::extract::Query;
use axum::http::HeaderMap;
use axum::routing::{get, post};
use clap::Parser;
use std::sync::{Arc, Mutex};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    target: RunTargetArgs,
}

fn document(id: &str) -> Document {
    let request = RequestMeta { request_id: id.to_owned(), ..RequestMeta::default() };
    Document { request, events: Vec::new(), mod_calls: Vec::new(), mod_logs: Vec::new(), actions: Vec::new() }
}

fn local_engine(runs: &[&str]) -> LocalEngine {
    let folder = std::env::temp_dir().join(format!("thunder-run-target-{}", std::process::id()));
    let line = Line::parse_from(["thunder", "--data-dir", folder.to_str().unwrap()]);
    let config = Config::new(line.target.engine, line.target.data, &default_flags()).unwrap();
    LocalEngine::with_documents(config, runs.iter().map(|id| document(id)).collect())
}

/// The id of a run whose first request the server does not answer.
const UNANSWERED: &str = "unanswered";

/// Starts a server that only records; returns its client and the list of the recorded runs.
async fn recording_server() -> (Server, Arc<Mutex<Vec<String>>>) {
    let recorded = Arc::<Mutex<Vec<String>>>::default();
    let list = Arc::clone(&recorded);
    let ingest = move |body: String| async move {
        let document: Value = serde_json::from_str(&body).unwrap();
        let id = document["request"]["request_id"].as_str().unwrap().to_owned();
        let is_first_request = list.lock().unwrap().is_empty();
        list.lock().unwrap().push(id.clone());
        if is_first_request && id == UNANSWERED {
            std::future::pending::<()>().await;
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, Router::new().route("/ingest", post(ingest))).await });
    (Server::new(format!("http://{address}"), None).unwrap(), recorded)
}

#[tokio::test]
async fn stopped_and_failed_runs_are_recorded_without_replacing_the_next_one() {
    let (server, recorded) = recording_server().await;
    let engine = local_engine(&["stopped", "first", "failed", "second", "last"]);
    let mut target = RunTarget::LocalForServer { engine, recording_server: server.clone() };
    let replay = |id| Some(ReplayAddress { url: server.replay(id), serve_command: None });
    assert_eq!(target.record(None).await.unwrap(), None);
    assert_eq!(target.record(Some("first")).await.unwrap(), replay("first"));
    assert_eq!(*recorded.lock().unwrap(), ["stopped", "first"]);
    let second = target.finish("second").await.unwrap();
    assert_eq!((second.document.request.request_id.as_str(), second.replay.ok()), ("second", replay("second")));
    target.close().await;
    assert_eq!(*recorded.lock().unwrap(), ["stopped", "first", "failed", "second", "last"]);
}

#[tokio::test]
async fn run_whose_sending_was_cancelled_is_sent_at_the_end() {
    let (server, recorded) = recording_server().await;
    let mut target = RunTarget::LocalForServer { engine: local_engine(&[UNANSWERED]), recording_server: server };
    let received = async {
        while recorded.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        _ = target.record(Some(UNANSWERED)) => panic!("the server does not answer"),
        () = received => {}
    }
    assert!(target.close().await);
    assert_eq!(*recorded.lock().unwrap(), [UNANSWERED, UNANSWERED]);
    let unreachable = Server::new("http://127.0.0.1:1".to_owned(), None).unwrap();
    let target = RunTarget::LocalForServer { engine: local_engine(&["lost"]), recording_server: unreachable };
    assert!(!target.close().await);
}

#[tokio::test]
async fn end_of_a_run_is_read_without_its_events() {
    let events = |headers: HeaderMap, Query(query): Query<Value>| async move {
        assert_eq!(
            (&headers["accept"], query["from"].as_str()),
            (&"text/event-stream".parse().unwrap(), Some("2147483647"))
        );
        "event: end\ndata: {\"status\":\"done\"}\n\n"
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = Server::new(format!("http://{}", listener.local_addr().unwrap()), None).unwrap();
    let router = Router::new().route("/api/v1/runs/x/events", get(events));
    tokio::spawn(async move { axum::serve(listener, router).await });
    assert_eq!(wait_until_ended(&server, "x").await.unwrap()["status"], "done");
    assert!(wait_until_ended(&server, "unknown").await.is_err());
}

#[tokio::test]
async fn replay_address_is_that_of_the_server_with_the_run() {
    let server = Server::new("http://server".to_owned(), None).unwrap();
    let replay = |target: RunTarget| target.replay("id").to_string();
    assert_eq!(replay(RunTarget::Server(server.clone())), "http://server/runs/id");
    let engine = local_engine(&[]);
    let for_server = RunTarget::LocalForServer { engine, recording_server: server };
    assert_eq!(replay(for_server), "http://server/runs/id");
    let expected = format!("http://{DEFAULT_ADDRESS}/runs/id (while `thunder serve --data-dir d3` runs)");
    let serve_flags = " --data-dir d3".to_owned();
    assert_eq!(replay(RunTarget::LocalDatabase { engine: local_engine(&[]), serve_flags }), expected);
}

#[tokio::test]
async fn local_flag_of_the_command_line_excludes_only_a_server_of_the_command_line() {
    let mut line = Line::parse_from(["thunder"]);
    line.target.server.server = Some("http://127.0.0.1:1".to_owned());
    let find = async |local_flag: Option<&str>, server: bool| {
        line.target.server.find_unless(local_flag, &GivenFlags { server, ..GivenFlags::default() }).await
    };
    assert!(find(None, false).await.unwrap_err().to_string().contains("no server answers"));
    assert!(find(None, true).await.unwrap_err().to_string().contains("no server answers"));
    assert!(find(Some("--data-dir"), false).await.unwrap().is_none());
    let error = find(Some("--data-dir"), true).await.unwrap_err().to_string();
    assert_eq!(error, "--data-dir is for this process and cannot be combined with --server; remove one of them");
}
