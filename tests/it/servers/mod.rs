//! Several servers on one database, each a separate process.

mod forwarding;
mod killed_servers;
mod load_balancer;
mod no_model;

use crate::harness::postgres::kill_listeners;
use crate::harness::{Server, SseReader};
use reqwest::Method;
use serde_json::json;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Maximum time for an event, also while other tests use all cores.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);
const KEY: &str = "the key of all";
/// The header with [`KEY`].
const BEARER: (&str, &str) = ("authorization", "Bearer the key of all");

/// Two servers with a model, on the database of a third one that has no model.
pub struct Cluster {
    pub without_model: Server,
    pub a: Server,
    pub b: Server,
}

impl Cluster {
    async fn start() -> Self {
        let without_model = Server::start(&["--no-model", "--api-key", KEY]);
        without_model.wait_ready().await;
        let server = || without_model.start_beside(&["--api-key", KEY]);
        let (a, b) = (server(), server());
        a.wait_ready().await;
        b.wait_ready().await;
        Self { without_model, a, b }
    }
}

/// Waits until the recorder has stored a run, so that every server can read it.
async fn wait_until_stored(server: &Server, run_id: &str) {
    let begun = Instant::now();
    while server.get(&format!("/api/v1/runs/{run_id}")).await.0 != 200 {
        assert!(begun.elapsed() < WAIT_TIMEOUT, "run {run_id} is not stored");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the cluster shared by all tests that do not change it.
async fn cluster() -> &'static Cluster {
    static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(Cluster::start())
    });
    tokio::task::spawn_blocking(|| LazyLock::force(&CLUSTER)).await.unwrap()
}

/// Generates a short run and returns its id.
async fn run_on(server: &Server) -> String {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": true});
    let response = server.request(Method::POST, "/v1/completions").json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned()
}

#[tokio::test]
async fn run_of_one_server_appears_in_the_live_list_of_the_others() {
    let Cluster { a, b, without_model } = cluster().await;
    let mut lists =
        [SseReader::get(b, "/api/v1/runs/live").await, SseReader::get(without_model, "/api/v1/runs/live").await];
    let run_id = run_on(a).await;
    for list in &mut lists {
        list.until(|name, data| name == "change" && data["run_id"] == run_id && data["status"] == "done").await;
    }
    assert_eq!(b.get(&format!("/api/v1/runs/{run_id}")).await.0, 200);
}

#[tokio::test]
async fn ingested_run_appears_in_the_live_list_of_the_others() {
    let Cluster { a, without_model, .. } = cluster().await;
    let mut list = SseReader::get(a, "/api/v1/runs/live").await;
    let document = json!({"request": {"request_id": "from-elsewhere", "created_at": "2025-12-01T18:30:00Z"},
                          "events": [], "mod_calls": [], "mod_logs": [], "actions": []});
    let (status, answer) = without_model.post("/ingest", &document).await;
    assert_eq!(status, 201, "{answer}");
    let run_id = without_model.get("/api/v1/runs/from-elsewhere").await.1["run"]["run_id"].clone();
    list.until(|name, data| name == "change" && data["run_id"] == run_id).await;
}

#[tokio::test]
async fn notifications_of_an_interrupted_connection_are_recovered() {
    let Cluster { a, b, without_model } = cluster().await;
    let mut list = SseReader::get(b, "/api/v1/runs/live").await;
    for _ in 0..3 {
        assert_ne!(kill_listeners(&without_model.database_url()).await, "0");
        let run_id = run_on(a).await;
        list.until(|name, data| name == "change" && data["run_id"] == run_id && data["status"] == "done").await;
    }
}

/// A load balancer may send a browser to any server.
#[tokio::test]
async fn login_is_valid_on_every_server() {
    let Cluster { a, b, .. } = cluster().await;
    let http = crate::harness::client().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let login = http.post(format!("{}/login", a.base)).header("content-type", "application/x-www-form-urlencoded");
    let answer = login.body(format!("key={}", KEY.replace(' ', "+"))).send().await.unwrap();
    assert_eq!(answer.status(), 303);
    let cookie = answer.headers()["set-cookie"].to_str().unwrap().split(';').next().unwrap().to_owned();
    let page = |cookie: &str| http.get(format!("{}/api/v1/runs", b.base)).header("cookie", cookie.to_owned()).send();
    assert_eq!(page(&cookie).await.unwrap().status(), 200);
    assert_eq!(page("thunder_session=0").await.unwrap().status(), 401);
}
