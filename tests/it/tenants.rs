//! API keys are tenants: runs and everything of them belong to the key that made them.

use super::harness::{Server, folder};
use reqwest::Method;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Keys of two tenants, one of them twice, and of an administrator.
const KEYS: &str =
    "ann-key-1 name=ann\nann-key-2 name=ann\nbob-key name=bob\nadmin-key name=ops admin\nann-traces name=ann ingest\n";

fn key_file() -> PathBuf {
    let path = folder().join("keys");
    std::fs::write(&path, KEYS).unwrap();
    path
}

async fn start(arguments: &[&str]) -> Server {
    let file = key_file();
    let mut all = vec!["--api-key-file", file.to_str().unwrap()];
    all.extend(arguments);
    let server = Server::start(&all);
    server.wait_ready().await;
    server
}

/// Sends a request with a key: status and body.
async fn send(server: &Server, key: &str, method: Method, path: &str, body: Option<&Value>) -> (u16, String) {
    // Bodies repeat this id, and are compared.
    let mut request = server.request(method, path).bearer_auth(key).header("x-request-id", "same");
    if let Some(body) = body {
        request = request.json(body);
    }
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

async fn get(server: &Server, key: &str, path: &str) -> (u16, Value) {
    let (status, text) = send(server, key, Method::GET, path, None).await;
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

async fn completion(server: &Server, key: &str, request_id: &str) -> (u16, Value) {
    let body = json!({"prompt": "a private prompt", "max_tokens": 3, "request_id": request_id});
    let (status, text) = send(server, key, Method::POST, "/v1/completions", Some(&body)).await;
    (status, serde_json::from_str(&text).unwrap())
}

#[tokio::test]
async fn runs_are_seen_by_their_tenant_and_admins_only() {
    let server = start(&[]).await;
    let (status, answer) = completion(&server, "ann-key-1", "ann-1").await;
    assert_eq!(status, 200, "{answer}");
    let run_id = answer["thunder"]["run_id"].as_str().unwrap();
    for id in [run_id, "ann-1"] {
        for what in ["", "/events", "/columns", "/feedback", "/alternatives", "/attention?at=1"] {
            let (_, unknown) = get(&server, "bob-key", &format!("/api/v1/runs/nobody{what}")).await;
            let (status, foreign) = get(&server, "bob-key", &format!("/api/v1/runs/{id}{what}")).await;
            assert_eq!(status, 404, "{what}");
            assert_eq!(foreign.to_string().replace(id, "nobody"), unknown.to_string());
        }
        for key in ["ann-key-1", "ann-key-2", "admin-key"] {
            assert_eq!(get(&server, key, &format!("/api/v1/runs/{id}")).await.0, 200, "{key}");
        }
        assert_eq!(send(&server, "bob-key", Method::DELETE, &format!("/api/v1/runs/{id}"), None).await.0, 404);
    }
    let listed = async |key: &str, q: &str| {
        let (_, list) = get(&server, key, &format!("/api/v1/runs?q={q}")).await;
        list["runs"].as_array().unwrap().len()
    };
    for q in ["", "private", "%22private%20prompt%22", "model:tiny", "request:ann", "tokens%3E0", "-status:failed"] {
        let counts = [listed("ann-key-2", q).await, listed("bob-key", q).await, listed("admin-key", q).await];
        assert_eq!(counts, [1, 0, 1], "{q}");
    }
    // The request_id is taken, and nothing more is told.
    let (status, refused) = completion(&server, "bob-key", "ann-1").await;
    assert_eq!(status, 409, "{refused}");
    assert!(!refused.to_string().contains(run_id), "{refused}");
    let (status, _) = send(&server, "admin-key", Method::DELETE, "/api/v1/runs/ann-1", None).await;
    assert_eq!((status, listed("ann-key-1", "").await), (204, 0));
}
