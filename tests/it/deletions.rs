//! Deletion of several runs, and its undo.

use super::harness::{Server, message_of, server};
use reqwest::Method;
use serde_json::{Value, json};
use thunder::events::system;

const ROUTE: &str = "/api/v1/deletions";

/// Stores a run and returns its id.
async fn ingest(server: &Server, request_id: &str) -> String {
    let document = json!({"request": {"request_id": request_id, "model": "deleted"}, "events": [
        {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 1},
        {"event_type": "Added", "step": 1, "sequence_order": 1, "added_tokens": [5], "added_token_count": 1, "forced": false}
    ], "mod_calls": [], "mod_logs": [], "actions": []});
    let (status, answer) = server.post("/ingest", &document).await;
    assert_eq!(status, 201, "{answer}");
    let (_, run) = server.get(&format!("/api/v1/runs/{request_id}")).await;
    run["run"]["run_id"].as_str().unwrap().to_owned()
}

/// Returns the request ids of the runs that a filter selects, newest first.
async fn listed(server: &Server, q: &str) -> Vec<String> {
    let (_, list) = server.get(&format!("/api/v1/runs?q={q}")).await;
    let runs = list["runs"].as_array().unwrap_or_else(|| panic!("{list}"));
    runs.iter().map(|run| run["request_id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn deleted_runs_disappear_until_deletion_is_undone() {
    let server = server().await;
    for name in ["gone-1", "gone-2", "gone-3"] {
        ingest(server, name).await;
    }
    let (status, deletion) = server.post(ROUTE, &json!({"runs": ["gone-3", "gone-1", "gone-3"]})).await;
    assert_eq!(status, 201, "{deletion}");
    let id = deletion["deletion_id"].as_str().unwrap();
    let remaining = deletion["remaining_ms"].as_u64().unwrap();
    assert!((20_000..=31_000).contains(&remaining), "{deletion}");
    let undo_until = chrono::DateTime::parse_from_rfc3339(deletion["undo_until"].as_str().unwrap()).unwrap();
    assert!((undo_until.to_utc() - system::now()).num_seconds() <= 30, "{deletion}");
    let expected =
        json!({"deletion_id": id, "runs": 2, "undo_until": deletion["undo_until"], "remaining_ms": remaining});
    assert_eq!(deletion, expected);
    assert_eq!(listed(server, "request:gone-").await, ["gone-2"]);
    for path in ["/api/v1/runs/gone-1", "/api/v1/runs/gone-1/feedback", "/runs/gone-1", "/runs/gone-1/export.html"] {
        let status = server.request(Method::GET, path).send().await.unwrap().status();
        assert_eq!(status, 404, "{path}");
    }
    for (path, body) in [
        ("/api/v1/runs/gone-1/feedback", json!({"rating": 1})),
        ("/api/v1/runs/tags", json!({"runs": ["gone-1"], "add": ["x"]})),
        (ROUTE, json!({"runs": ["gone-1"]})),
    ] {
        let (status, answer) = server.post(path, &body).await;
        assert_eq!(status, 404, "{path}: {answer}");
    }
    let (_, pending) = server.get(ROUTE).await;
    let is_this = |entry: &&Value| entry["deletion_id"] == id && entry["runs"] == 2;
    assert_eq!(pending["deletions"].as_array().unwrap().iter().filter(is_this).count(), 1, "{pending}");

    let undo = format!("{ROUTE}/{id}");
    let (status, restored) = server.send("", Method::DELETE, &undo, None).await;
    assert_eq!((status, restored["runs"].as_array().unwrap().len()), (200, 2), "{restored}");
    assert_eq!(listed(server, "request:gone-").await, ["gone-3", "gone-2", "gone-1"]);
    let (status, again) = server.send("", Method::DELETE, &undo, None).await;
    assert_eq!(status, 404, "{again}");
    assert_eq!(server.send("", Method::DELETE, &format!("{ROUTE}/nothing"), None).await.0, 404);
}

#[tokio::test]
async fn invalid_deletion_deletes_nothing() {
    let server = server().await;
    ingest(server, "kept-1").await;
    let body = json!({"prompt": "Hello", "max_tokens": 4000, "stream": true, "ignore_eos": true});
    let response = server.request(Method::POST, "/v1/completions").json(&body).send().await.unwrap();
    let running = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
    let still_running =
        format!("run {running} is still running; cancel it first with POST /api/v1/runs/{running}/cancel");
    for (runs, status, message) in [
        (json!([]), 400, "`runs` must have 1 to 100 ids, got 0"),
        (json!(["kept-1", "kept-unknown"]), 404, "no run 'kept-unknown' exists"),
        (json!(["kept-1", running]), 409, still_running.as_str()),
    ] {
        let (found, problem) = server.post(ROUTE, &json!({"runs": runs})).await;
        assert_eq!((found, message_of(&problem)), (status, message), "{runs}");
    }
    assert_eq!(listed(server, "request:kept-").await, ["kept-1"]);
    server.post(&format!("/api/v1/runs/{running}/cancel"), &json!({})).await;
    response.bytes().await.unwrap();
}

#[tokio::test]
async fn ingest_with_id_of_deleted_run_can_be_retried() {
    let server = server().await;
    let document = json!({"request": {"request_id": "retried"}, "events": [
        {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 1}]});
    assert_eq!(server.post("/ingest", &document).await.0, 201);
    let (status, deletion) = server.post(ROUTE, &json!({"runs": ["retried"]})).await;
    assert_eq!(status, 201, "{deletion}");
    let response = server.request(Method::POST, "/ingest").json(&document).send().await.unwrap();
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let problem: Value = response.json().await.unwrap();
    assert_eq!(status, 503, "{problem}");
    let retry_after: u32 = headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((10..=35).contains(&retry_after), "{retry_after}");
    let expected = format!("the document cannot be stored at the moment; try again in {retry_after} seconds");
    assert_eq!(message_of(&problem), expected);
    let undo = format!("{ROUTE}/{}", deletion["deletion_id"].as_str().unwrap());
    assert_eq!(server.send("", Method::DELETE, &undo, None).await.0, 200);
    assert_eq!(server.post("/ingest", &document).await.0, 201, "the document is stored already");
}
