//! `POST /v1/generate`.

use super::assemble_text;
use crate::harness::{ErrorTable, server};
use reqwest::Method;
use serde_json::{Value, json};
use thunder::events::system;

/// Returns the events of a stream: name and data.
async fn events(body: &Value) -> Vec<(String, Value)> {
    server().await.events("/v1/generate", body).await
}

#[tokio::test]
async fn example_of_contract_returns_text_and_usage() {
    let body = json!({"prompt": "Write a short story about a robot learning to paint.", "max_tokens": 20,
                      "temperature": 0.7, "stream": false});
    let request_id = system::new_id().to_string();
    let request = server().await.request(Method::POST, "/v1/generate").header("x-request-id", &request_id);
    let answer: Value = request.json(&body).send().await.unwrap().json().await.unwrap();
    assert!(answer["id"].as_str().unwrap().starts_with("gen_"));
    assert_eq!(answer["model"], "tiny");
    assert!(answer["generated_text"].is_string() && answer["finish_reason"].is_string());
    let usage = &answer["usage"];
    let sum = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], sum);
    let run = server().await.finished(answer["id"].as_str().unwrap()).await;
    assert_eq!(run["run"]["surface"], "generate");
    let (_, found) = server().await.get(&format!("/api/v1/runs?q=metadata.x-request-id:{request_id}")).await;
    assert_eq!(found["runs"][0]["request_id"], answer["id"], "{found}");
}

#[tokio::test]
async fn stream_consists_of_protocol_messages() {
    let body = json!({"prompt": "Once", "max_tokens": 15, "ignore_eos": true, "stream": true, "include_timing": true});
    let events = events(&body).await;
    let kinds: Vec<&str> = events.iter().map(|(kind, _)| kind.as_str()).collect();
    assert_eq!((kinds[0], kinds[1], kinds[16]), ("init", "token", "completion"));
    let messages: Vec<Value> = events.iter().map(|(_, message)| message.clone()).collect();
    assert!(events.iter().all(|(kind, message)| message["type"] == *kind));
    assert_eq!(messages[16]["generated_text"], assemble_text(&messages));
    assert!(messages[16]["timing"]["total_ms"].is_number());
}

#[tokio::test]
async fn nested_and_flat_parameters_are_equivalent() {
    let server = server().await;
    let nested =
        json!({"prompt": "Once", "parameters": {"max_tokens": 7, "seed": 4}, "options": {"echo_prompt": true}});
    let answer = server.answer("/v1/generate", &nested).await;
    assert!(answer["generated_text"].as_str().unwrap().starts_with("Once"));
    let flat = json!({"prompt": "Once", "max_tokens": 7, "seed": 4, "echo_prompt": true});
    assert_eq!(server.answer("/v1/generate", &flat).await["generated_text"], answer["generated_text"]);
}

#[tokio::test]
async fn errors_have_status_and_format_of_protocol() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for (body, kind) in [
        (json!({}), "invalid_request"),
        (json!({"prompt": "x", "temperature": "hot"}), "invalid_request"),
        (json!({"prompt": "x", "model": "tiny/nobody"}), "invalid_request"),
        (json!({"prompt": "word ".repeat(9000)}), "context_length_exceeded"),
        (json!({"prompt": "x", "mods": ["refuse_late"], "ignore_eos": true}), "content_filter"),
        (json!({"prompt": "x", "timeout_ms": 1, "max_tokens": 3000, "ignore_eos": true}), "timeout"),
    ] {
        let answer = server.post("/v1/generate", &body).await;
        assert_eq!((&answer.1["type"], &answer.1["error"]), (&json!("error"), &json!(kind)), "{body}");
        errors.add(body, &answer);
    }
    insta::assert_snapshot!("generate_errors", errors);
    let (status, error) = server.get("/v1/generate").await;
    assert_eq!((status, &error["error"]), (405, &json!("invalid_request")));
}
