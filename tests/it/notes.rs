//! `/api/v1/runs/{id}/notes` on the real server.

use super::harness::{Server, folder, message_of, server};
use reqwest::Method;
use serde_json::{Value, json};

async fn put(server: &Server, run: &str, note: &Value) -> (u16, Value) {
    server.send("", Method::PUT, &format!("/api/v1/runs/{run}/notes"), Some(note)).await
}

/// Generates a run and returns its id.
async fn generate(server: &Server) -> String {
    let answer = server.answer("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 3})).await;
    answer["id"].as_str().unwrap().trim_start_matches("cmpl-").to_owned()
}

/// Returns whether a filter selects the run.
async fn is_selected(server: &Server, filter: &str, run: &str) -> bool {
    let (_, list) = server.get(&format!("/api/v1/runs?q={filter} request:{run}")).await;
    !list["runs"].as_array().unwrap().is_empty()
}

#[tokio::test]
async fn notes_are_written_found_and_removed() {
    let server = server().await;
    let run = generate(server).await;
    let (status, body) = put(server, &run, &json!({"text": " looks <b>odd</b>\n", "position": 1})).await;
    assert_eq!((status, &body["notes"][0]["text"]), (200, &json!("looks <b>odd</b>")), "{body}");
    let (_, body) = put(server, &run, &json!({"text": "the whole run"})).await;
    let positions: Vec<_> = body["notes"].as_array().unwrap().iter().map(|note| &note["position"]).collect();
    assert_eq!(positions, [&Value::Null, &json!(1)], "{body}");
    assert!(is_selected(server, "note:run", &run).await);
    assert!(is_selected(server, "note:token", &run).await);

    let (_, body) = put(server, &run, &json!({"text": "changed", "position": 1})).await;
    assert_eq!((&body["notes"][1]["text"], body["notes"].as_array().unwrap().len()), (&json!("changed"), 2));
    assert_eq!(server.get(&format!("/api/v1/runs/{run}/notes")).await, (200, body));
    for path in [format!("/runs/{run}"), format!("/runs/{run}?view=text")] {
        let page = server.request(Method::GET, &path).send().await.unwrap().text().await.unwrap();
        assert!(page.contains("the whole run") && page.contains("at token 2"), "{page}");
    }

    put(server, &run, &json!({"text": ""})).await;
    let (_, body) = put(server, &run, &json!({"text": " ", "position": 1})).await;
    assert_eq!(body["notes"], json!([]));
    assert!(!is_selected(server, "note:run", &run).await);
    assert!(!is_selected(server, "note:token", &run).await);
}

#[tokio::test]
async fn invalid_notes_are_rejected() {
    let server = server().await;
    let run = generate(server).await;
    for (note, message) in [
        (json!({"text": "x".repeat(10_001)}), "`text` must have at most 10000 characters, got 10001"),
        (json!({"text": "x", "position": 4_000_000_000_u32}), "`position` must be at most 2147483647"),
    ] {
        let (status, problem) = put(server, &run, &note).await;
        assert_eq!((status, message_of(&problem)), (400, message));
    }
    for (note, part) in [(json!({"text": "x", "position": -1}), "-1"), (json!({"position": 1}), "text")] {
        let (status, problem) = put(server, &run, &note).await;
        assert!(status == 400 && message_of(&problem).contains(part), "{status} {problem}");
    }
    assert_eq!(put(server, "no-run", &json!({"text": "x"})).await.0, 404);
}

#[tokio::test]
async fn notes_belong_to_the_tenant_of_the_run() {
    let keys = folder().join("keys.txt");
    std::fs::write(&keys, "ann-key name=ann\nbob-key name=bob\n").unwrap();
    let server = Server::start(&["--api-key-file", keys.to_str().unwrap()]);
    server.wait_ready().await;
    let body = json!({"prompt": "Hello", "max_tokens": 2});
    let (_, answer) = server.send("ann-key", Method::POST, "/v1/completions", Some(&body)).await;
    let path = format!("/api/v1/runs/{}/notes", answer["id"].as_str().unwrap().trim_start_matches("cmpl-"));
    let (status, notes) = server.send("ann-key", Method::PUT, &path, Some(&json!({"text": "mine"}))).await;
    assert_eq!((status, &notes["notes"][0]["user_label"]), (200, &json!("ann")));
    assert_eq!(server.send("bob-key", Method::GET, &path, None).await.0, 404);
    assert_eq!(server.send("bob-key", Method::PUT, &path, Some(&json!({"text": "x"}))).await.0, 404);
}
