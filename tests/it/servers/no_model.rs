//! A server without a model.

use super::{BEARER, Cluster, WAIT_TIMEOUT, cluster};
use crate::harness::{Server, folder, thunder};
use crate::stream::Client;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::time::sleep;

#[tokio::test]
async fn server_without_model_names_other_servers() {
    let Cluster { a, without_model, .. } = cluster().await;
    let is_expected = |message: &Value| {
        let message = message.as_str().unwrap();
        message.starts_with("this server was started with --no-model and has no models; ")
            && message.contains(&format!("{} has tiny", a.base))
    };
    // The error does not name the server before its models are announced, or if the lookup in the database takes too long.
    let begun = Instant::now();
    let prompt = json!({"prompt": "Once", "messages": [{"role": "user", "content": "Once"}], "input": "Once",
                        "max_tokens": 3, "query": "a", "documents": ["b"], "content": "Once"});
    for (path, pointer) in [
        ("/v1/completions", "/error/message"),
        ("/v1/chat/completions", "/error/message"),
        ("/v1/responses", "/error/message"),
        ("/v1/embeddings", "/error/message"),
        ("/v1/messages", "/error/message"),
        ("/completion", "/error/message"),
        ("/tokenize", "/error/message"),
        ("/v1/generate", "/message"),
        ("/api/v1/generate", "/detail/msg"),
    ] {
        let body = if path == "/v1/responses" { json!({"input": "Once"}) } else { prompt.clone() };
        loop {
            let (status, answer) = without_model.post(path, &body).await;
            assert_eq!(status, 503, "{path}: {answer}");
            let message = answer.pointer(pointer).unwrap();
            if is_expected(message) {
                break;
            }
            assert!(begun.elapsed() < WAIT_TIMEOUT, "{path}: {answer}");
            sleep(Duration::from_millis(50)).await;
        }
    }
    loop {
        let mut client = Client::connect_with(without_model, &[BEARER]).await.unwrap();
        let error = client.run(&json!({"type": "config", "prompt": "Once"})).await.pop().unwrap();
        if is_expected(&error["message"]) {
            break;
        }
        assert!(begun.elapsed() < WAIT_TIMEOUT, "{error}");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn server_without_model_serves_pages_and_lists() {
    let Cluster { without_model, .. } = cluster().await;
    assert_eq!(without_model.get("/healthz").await.0, 200);
    let (status, models) = without_model.get("/v1/models").await;
    assert_eq!((status, models["data"].as_array().unwrap().len()), (200, 0));
    for page in ["/runs", "/mods", "/playground"] {
        let answer = without_model.request(Method::GET, page).header("accept", "text/html").send().await.unwrap();
        assert_eq!(answer.status(), 200, "{page}");
    }
}

#[tokio::test]
async fn model_and_no_model_flags_conflict() {
    let dir = folder();
    let mut command = thunder();
    command.args(["serve", "--no-model", "--model", "a.gguf", "--data-dir"]).arg(&dir);
    let output = command.output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("--no-model") && text.contains("cannot be used with"), "{text}");
    let invalid = Server::start(&["--no-model", "--server-url", "10.0.0.5:6767"]);
    assert_ne!(invalid.wait_for_exit().await, Some(0));
    assert!(invalid.log().contains("--server-url must be a URL"), "{}", invalid.log());
}
