//! Runs that are read while they are recorded: after their first token, after their answer, while the database is slow,
//! and from another server.

use super::harness::{Server, folder, psql, run_start, server, with_fields};
use futures::StreamExt;
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use thunder::events::{Event, EventType, RunEnd, RunId, RunStatus, Scope, TraceItem, Usage, system};
use thunder::recording::Signal;
use thunder::store::{Database, Store};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::sleep;

/// Returns a server whose database a test may lock. One test uses it at a time, until it drops the guard.
async fn server_with_lockable_database() -> (&'static Server, MutexGuard<'static, ()>) {
    static SERVER: LazyLock<Server> = LazyLock::new(|| Server::start(&["--attention", "on"]));
    static IN_USE: Mutex<()> = Mutex::const_new(());
    let guard = IN_USE.lock().await;
    (tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await, guard)
}

fn completion_request(fields: &Value) -> Value {
    with_fields(json!({"prompt": "Hello", "max_tokens": 12, "seed": 3, "ignore_eos": true}), fields)
}

async fn status_and_text(server: &Server, path: &str) -> (u16, String) {
    let response = server.request(Method::GET, path).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

#[tokio::test]
async fn active_run_is_readable_on_every_route_after_its_first_token() {
    let server = server().await;
    let known = server.answer("/v1/completions", &completion_request(&json!({}))).await["thunder"]["run_id"].clone();
    let known = known.as_str().unwrap();
    for _ in 0..3 {
        let request = completion_request(&json!({"stream": true, "max_tokens": 4000}));
        let response = server.request(Method::POST, "/v1/completions").json(&request).send().await.unwrap();
        let id = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
        let mut output = response.bytes_stream();
        output.next().await.unwrap().unwrap();
        let paths = [
            format!("/api/v1/runs/{id}"),
            format!("/api/v1/runs/{id}/events"),
            format!("/api/v1/runs/{id}/columns"),
            format!("/api/v1/runs/{id}/alternatives"),
            format!("/api/v1/runs/{id}/feedback"),
            format!("/runs/{id}"),
            format!("/runs/{id}?view=text"),
            format!("/compare?a={known}&b={id}"),
        ];
        let reads = futures::future::join_all(paths.iter().map(|path| status_and_text(server, path))).await;
        for (path, (status, text)) in paths.iter().zip(&reads) {
            assert_eq!(*status, 200, "{path}: {text}");
        }
        assert!(reads[1].1.contains("\"Added\""), "the events of the first token are missing: {}", reads[1].1);
        let (status, feedback) = server.post(&format!("/api/v1/runs/{id}/feedback"), &json!({"rating": 1})).await;
        assert_eq!(status, 201, "{feedback}");
    }
}

#[tokio::test]
async fn finished_run_is_complete_when_its_answer_arrives() {
    let (server, _guard) = server_with_lockable_database().await;
    let check_run = async |number: i32| {
        let request_id = format!("complete-{number}");
        let fields = json!({"request_id": request_id, "attention": true, "max_tokens": 10 + number});
        let answer = server.answer("/v1/completions", &completion_request(&fields)).await;
        let id = answer["thunder"]["run_id"].as_str().unwrap().to_owned();
        let id = if number % 2 == 0 { id } else { request_id };
        let (status, run) = server.get(&format!("/api/v1/runs/{id}")).await;
        assert_eq!(status, 200, "{run}");
        assert_eq!((&run["run"]["status"], &run["run"]["completion_tokens"]), (&json!("done"), &json!(10 + number)));
        let last = run["events"].as_array().unwrap().iter().rev().find(|event| event["event_type"] == "ForwardPass");
        let order = &last.unwrap()["sequence_order"];
        let (status, attention) = server.get(&format!("/api/v1/runs/{id}/attention?at={order}")).await;
        assert_eq!((status, &attention["attention"]["sequence_order"]), (200, order), "{attention}");
    };
    futures::future::join_all((0..8).map(check_run)).await;
}

#[tokio::test]
async fn read_of_finished_run_waits_for_a_slow_database() {
    let (server, _guard) = server_with_lockable_database().await;
    let mut blocker = PgConnection::connect(&server.database_url()).await.unwrap();
    let mut lock = blocker.begin().await.unwrap();
    sqlx::query("lock table events in exclusive mode").execute(&mut *lock).await.unwrap();
    let answer = server.answer("/v1/completions", &completion_request(&json!({}))).await;
    let path = format!("/api/v1/runs/{}", answer["thunder"]["run_id"].as_str().unwrap());
    let read = tokio::spawn(async move { server.get(&path).await });
    for _ in 0..20 {
        assert!(!read.is_finished(), "{:?}", read.await);
        sleep(Duration::from_millis(50)).await;
    }
    lock.rollback().await.unwrap();
    let (status, run) = read.await.unwrap();
    assert_eq!((status, &run["run"]["status"], &run["run"]["completion_tokens"]), (200, &json!("done"), &json!(12)));
}

#[tokio::test]
async fn run_is_cancelled_while_the_database_does_not_respond() {
    let (server, _guard) = server_with_lockable_database().await;
    let mut blocker = PgConnection::connect(&server.database_url()).await.unwrap();
    let mut lock = blocker.begin().await.unwrap();
    sqlx::query("lock table runs in access exclusive mode").execute(&mut *lock).await.unwrap();
    let body = completion_request(&json!({"stream": true, "max_tokens": 4000, "ignore_eos": true}));
    let stream = server.request(Method::POST, "/v1/completions").json(&body).send().await.unwrap();
    let id = stream.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
    let (status, answer) = server.post(&format!("/api/v1/runs/{id}/cancel"), &json!({})).await;
    assert_eq!((status, &answer["run_id"]), (202, &json!(id)), "{answer}");
    stream.bytes().await.unwrap();
    lock.rollback().await.unwrap();
    assert_eq!(server.finished(&id).await["run"]["status"], "cancelled");
}

#[tokio::test]
async fn request_id_is_unique_while_the_database_is_slow() {
    let (server, _guard) = server_with_lockable_database().await;
    let id = format!("slow-{}", RunId::now());
    let complete = async |fields: Value| server.post("/v1/completions", &completion_request(&fields)).await;
    let mut blocker = PgConnection::connect(&server.database_url()).await.unwrap();

    let mut lock = blocker.begin().await.unwrap();
    sqlx::query("lock table events in exclusive mode").execute(&mut *lock).await.unwrap();
    let (status, answer) = complete(json!({"request_id": id})).await;
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = complete(json!({"request_id": id})).await;
    assert_eq!((status, &answer["error"]["param"]), (409, &json!("request_id")), "the first is not stored: {answer}");
    lock.rollback().await.unwrap();
    server.finished(&id).await;

    let mut lock = blocker.begin().await.unwrap();
    sqlx::query("lock table run_keys in access exclusive mode").execute(&mut *lock).await.unwrap();
    let (status, answer) = complete(json!({"request_id": id, "record": "required"})).await;
    assert_eq!(status, 503, "{answer}");
    let (status, answer) = complete(json!({"request_id": id})).await;
    assert_eq!(status, 200, "{answer}");
    lock.rollback().await.unwrap();
    let run_id = answer["thunder"]["run_id"].as_str().unwrap();
    assert_eq!(server.finished(run_id).await["run"]["request_id"], format!("{id}~{run_id}"));
}

/// Another server on the same database, which writes a run.
struct OtherServer {
    store: Store,
    run_id: RunId,
    next: i32,
}

impl OtherServer {
    async fn begin(url: &str, server: &Server) -> Self {
        let data_dir = server.data_dir.join("elsewhere");
        let store =
            Store::open(Database::Url { url: url.to_owned(), direct_url: None, data_dir }, |_| {}).await.unwrap();
        let run_id = RunId::now();
        let start = run_start(run_id, &run_id.to_string());
        let this = Self { store, run_id, next: 0 };
        this.send(Signal::Started(Arc::new(start))).await;
        this
    }

    async fn send(&self, signal: Signal) {
        self.store.start_recorder();
        self.store.recorder().signals.send(signal).await.unwrap();
    }

    /// Adds events and waits until they are committed.
    async fn add_events(&mut self, count: i32, watch: &mut PgConnection) {
        let event = |order| TraceItem::Event(Event::new(EventType::ForwardPass, order, order, None));
        let items = (self.next..self.next + count).map(event).collect();
        self.next += count;
        self.send(Signal::Items(self.run_id, Arc::new(items))).await;
        let stored = "select count(*) from events where run_id = $1";
        wait_for_count(watch, stored, self.run_id, i64::from(self.next)).await;
    }

    async fn end(self) {
        let end = RunEnd { status: RunStatus::Done, ..RunEnd::empty(system::now(), Usage::default()) };
        self.send(Signal::Ended(self.run_id, Arc::new(end))).await;
        self.store.close().await;
    }
}

/// Waits until a query returns the expected count.
async fn wait_for_count(watch: &mut PgConnection, query: &'static str, run_id: RunId, expected: i64) {
    for _ in 0..3000 {
        let count: i64 = sqlx::query_scalar(query).bind(run_id.0).fetch_one(&mut *watch).await.unwrap();
        if count == expected {
            return;
        }
        sleep(Duration::from_millis(20)).await;
    }
    panic!("the count does not become {expected}: {query}");
}

#[tokio::test]
async fn follower_receives_events_that_are_committed_while_it_reads() {
    let (server, _guard) = server_with_lockable_database().await;
    let url = server.database_url();
    let mut watch = PgConnection::connect(&url).await.unwrap();
    let mut blocker = PgConnection::connect(&url).await.unwrap();
    let mut run = OtherServer::begin(&url, server).await;
    run.add_events(900, &mut watch).await;
    let mut lock = blocker.begin().await.unwrap();
    sqlx::query("lock table mod_calls in access exclusive mode").execute(&mut *lock).await.unwrap();
    let path = format!("/api/v1/runs/{}/events", run.run_id);
    let follow = tokio::spawn(async move {
        let request = server.request(Method::GET, &path).header("accept", "text/event-stream");
        request.send().await.unwrap().text().await.unwrap()
    });
    let blocked = "select count(*) from pg_locks where relation = 'mod_calls'::regclass and not granted
        and database = (select oid from pg_database where datname = current_database()) and $1::uuid is not null";
    wait_for_count(&mut watch, blocked, run.run_id, 1).await;
    run.add_events(200, &mut watch).await;
    lock.rollback().await.unwrap();
    let events_path = format!("/api/v1/runs/{}/events", run.run_id);
    run.end().await;
    let text = follow.await.unwrap();
    let ids: Vec<i32> = text.lines().filter_map(|line| line.strip_prefix("id: ")?.parse().ok()).collect();
    let missing: Vec<i32> = (0..1100).filter(|order| !ids.contains(order)).collect();
    assert!(missing.is_empty(), "{} missing, the first is {}", missing.len(), missing[0]);
    assert_eq!(ids.len(), 1100, "items are repeated");
    assert_eq!(status_and_text(server, &events_path).await.1.lines().count(), 1100, "the events span two pages");
}

#[tokio::test]
async fn page_of_unknown_run_retries() {
    let server = server().await;
    let id = RunId::now();
    let mut path = format!("/runs/{id}?at=3&view=text");
    let mut seen = BTreeSet::new();
    loop {
        let request = server.request(Method::GET, &path).header("accept", "text/html");
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 404);
        let html = response.text().await.unwrap();
        assert!(seen.insert(path), "the page retries without end: {seen:?}");
        let Some((_, refresh)) = html.split_once("http-equiv=\"refresh\" content=\"1; url=") else { break };
        path = refresh.split('"').next().unwrap().replace("&#38;", "&");
        assert!(path.starts_with(&format!("/runs/{id}?at=3&view=text&retry=")), "{path}");
    }
    assert_eq!(seen.len(), 6, "{seen:?}");
    let answer = server.answer("/v1/completions", &completion_request(&json!({}))).await;
    let id = answer["thunder"]["run_id"].as_str().unwrap();
    let found = status_and_text(server, &format!("/runs/{id}?retry=2")).await;
    assert_eq!(found.0, 200, "{}", found.1);
}

#[tokio::test]
async fn run_has_the_surface_of_its_route() {
    let server = server().await;
    let messages = json!([{"role": "user", "content": "Hello!"}]);
    let chat = json!({"messages": messages, "max_tokens": 2});
    let prompt = json!({"prompt": "Hello", "max_tokens": 2});
    let ollama = json!({"model": "tiny", "messages": messages, "stream": false, "options": {"num_predict": 2}});
    let raw = json!({"model": "tiny", "prompt": "Hello", "raw": true, "stream": false, "options": {"num_predict": 2}});
    for (path, body, surface) in [
        ("/v1/chat/completions", &chat, "openai"),
        ("/v1/completions", &prompt, "openai"),
        ("/v1/responses", &json!({"input": "Hello!", "max_output_tokens": 2}), "responses"),
        ("/v1/messages", &chat, "anthropic"),
        ("/api/chat", &ollama, "ollama"),
        ("/api/generate", &raw, "ollama"),
        ("/api/v1/generate", &json!({"prompt": "Hello", "max_length": 2}), "kobold"),
        ("/completion", &json!({"prompt": "Hello", "n_predict": 2}), "llama_server"),
        ("/v1/generate", &prompt, "generate"),
    ] {
        let response = server.request(Method::POST, path).json(body).send().await.unwrap();
        let run_id = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
        assert_eq!(server.finished(&run_id).await["run"]["surface"], surface, "{path}");
        let (_, found) = server.get(&format!("/api/v1/runs?q=surface:{surface}&limit=100")).await;
        assert!(found.to_string().contains(&run_id), "{path}: {found}");
    }
}

/// The tokens of the run contain the stop string, the answer does not. Earlier versions stored no answer.
#[tokio::test]
async fn answer_before_a_stop_string_survives_ingestion_and_is_estimated_for_old_runs() {
    let server = server().await;
    let whole = server.answer("/v1/completions", &completion_request(&json!({}))).await;
    let whole = whole["choices"][0]["text"].as_str().unwrap().to_owned();
    let stop: String = whole.chars().skip(whole.chars().count() / 2).take(2).collect();
    let answer = server.answer("/v1/completions", &completion_request(&json!({"stop": stop}))).await;
    let expected = whole.split(&stop).next().unwrap();
    assert_eq!(answer["choices"][0]["text"], expected);
    let id = answer["thunder"]["run_id"].as_str().unwrap();
    let mut document = server.finished(id).await;
    assert_eq!(document["request"]["final_text"], expected);

    document["request"]["request_id"] = json!("ingested-stop-string");
    assert_eq!(server.post("/ingest", &document).await.0, 201);
    let (_, ingested) = server.get("/api/v1/runs/ingested-stop-string").await;
    assert_eq!((&ingested["run"]["notes"], &ingested["request"]["final_text"]), (&Value::Null, &json!(expected)));

    let url = server.database_url();
    psql(&url, &format!("update runs set request_extras = null where run_id = '{id}' returning 1")).await;
    let store = Store::open(Database::Url { url, direct_url: None, data_dir: folder() }, |_| {}).await.unwrap();
    let run = store.find(&Scope::All, id).await.unwrap().unwrap();
    assert_eq!(store.answer(&Scope::All, run.run_id).await.unwrap().as_deref(), Some(expected));
    store.close().await;
}
