//! Runs that end before their answer is complete: at the time limit, by a cancellation, and when the server stops.

use super::{PATH, connect, generate_request, next, send, until_done};
use crate::harness::{Server, SseEvent, SseReader, folder};
use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;
use yawc::Options;

/// A mod that delays every token.
const SLOW: &str = "import time\nfrom thunder_mods import Added, mod\n\n\n@mod(events=[Added])\ndef slow(event, actions):\n    \
                    time.sleep(0.1)\n";

async fn start(arguments: &[&str]) -> Server {
    let mods = folder();
    std::fs::write(mods.join("slow.py"), SLOW).unwrap();
    let server = Server::start(&[&["--mods-dir", mods.to_str().unwrap()], arguments].concat());
    server.wait_ready().await;
    server
}

/// Returns a request whose answer takes at least 30 seconds.
fn slow_request(id: &str) -> Value {
    generate_request(&[40, 41], &json!({"request_id": id, "max_new_tokens": 300, "mods": ["slow"]}))
}

#[tokio::test]
async fn run_ends_at_the_time_limit() {
    let server = start(&["--run-timeout", "1"]).await;
    let answer = server.answer("/api/v1/generate", &slow_request("http")).await;
    assert_eq!(answer["finish_reason"], "timeout", "{answer}");
    let tokens = answer["generated_tokens"].as_array().unwrap().len();
    assert!(tokens < 100, "{tokens}");
    assert_eq!(answer["attention_data"].as_array().unwrap().len(), tokens);
    let run = &server.finished("http").await["run"];
    assert_eq!((&run["status"], &run["end_cause"]), (&json!("cancelled"), &json!("timeout")), "{run}");
    assert!(run["message"].as_str().unwrap().contains("1 s"), "{run}");

    let mut socket = connect(&server, PATH, Options::default()).await;
    send(&mut socket, &slow_request("socket")).await;
    let messages = until_done(&mut socket).await;
    let done = &messages.last().unwrap().0;
    assert_eq!((&done["type"], &done["finish_reason"]), (&json!("done"), &json!("timeout")), "{done}");
    assert_eq!(done["total_tokens"], messages.len() - 1);

    // A fast answer is not affected.
    let answer =
        server.answer("/api/v1/generate", &json!({"input_ids": [40], "max_new_tokens": 4, "ignore_eos": true})).await;
    assert_eq!(answer["finish_reason"], "length");
}

#[tokio::test]
async fn queued_run_ends_at_the_time_limit() {
    let server = start(&["--run-timeout", "1", "--parallel", "1"]).await;
    let body = json!({"prompt": "Once", "max_tokens": 300, "ignore_eos": true, "stream": true, "mods": ["slow"]});
    let mut other =
        SseReader::new(server.request(Method::POST, "/v1/completions").json(&body).send().await.unwrap()).await;
    other.next().await.unwrap();
    // The only slot is in use for 30 seconds.
    let answer = server.answer("/api/v1/generate", &slow_request("queued")).await;
    assert_eq!((&answer["finish_reason"], &answer["generated_tokens"]), (&json!("timeout"), &json!([])), "{answer}");
    let response = server.request(Method::POST, "/api/extra/generate/stream").json(&slow_request("events"));
    let response = response.send().await.unwrap();
    assert_eq!(response.status(), 200);
    let events = SseReader::new(response).await.rest().await;
    assert_eq!(events.last().unwrap().json()["finish_reason"], "timeout");
    assert!(other.next().await.is_some(), "the other run has no time limit");
}

/// Cancels a run as soon as it has started.
async fn cancel(server: &Server, id: &str) {
    loop {
        let (status, answer) = server.post(&format!("/api/v1/runs/{id}/cancel"), &json!({})).await;
        match status {
            202 => return,
            404 => tokio::time::sleep(Duration::from_millis(50)).await,
            _ => panic!("{status} {answer}"),
        }
    }
}

#[tokio::test]
async fn cancelled_run_returns_its_tokens() {
    let server = start(&["--parallel", "1"]).await;
    let mut socket = connect(&server, PATH, Options::default()).await;
    send(&mut socket, &slow_request("socket")).await;
    assert_eq!(next(&mut socket).await.0["type"], "token");
    cancel(&server, "socket").await;
    let messages = until_done(&mut socket).await;
    let done = &messages.last().unwrap().0;
    assert_eq!((&done["type"], &done["finish_reason"]), (&json!("done"), &json!("cancelled")), "{done}");
    assert_eq!(done["total_tokens"], messages.len(), "the first message was received before");

    let body = slow_request("http");
    let (answer, ()) = tokio::join!(server.answer("/api/v1/generate", &body), cancel(&server, "http"));
    assert_eq!(answer["finish_reason"], "cancelled", "{answer}");
    let tokens = answer["generated_tokens"].as_array().unwrap().len();
    assert_eq!(answer["attention_data"].as_array().unwrap().len(), tokens);
    assert_eq!(server.finished("http").await["run"]["end_cause"], "cancel");
    queued_runs_can_be_aborted(&server).await;
}

/// Aborts generations that wait for the only slot of the server.
async fn queued_runs_can_be_aborted(server: &Server) {
    let body = json!({"prompt": "Once", "max_tokens": 300, "ignore_eos": true, "stream": true, "mods": ["slow"]});
    let response = server.request(Method::POST, "/v1/completions").json(&body).send().await.unwrap();
    let mut other = SseReader::new(response).await;
    other.next().await.unwrap();

    let body = json!({"prompt": "The sky is", "genkey": "text"});
    let (answer, ()) = tokio::join!(server.answer("/api/v1/generate", &body), abort(server, "text"));
    let result = &answer["results"][0];
    assert_eq!((&result["finish_reason"], &result["text"]), (&json!("abort"), &json!("")), "{answer}");

    let body = json!({"input_ids": [40, 41], "num_samples": 2, "genkey": "samples"});
    let events = async {
        let request = server.request(Method::POST, "/api/extra/generate/stream").json(&body);
        SseReader::new(request.send().await.unwrap()).await.rest().await
    };
    let (events, ()) = tokio::join!(events, abort(server, "samples"));
    let ends: Vec<Value> = events.iter().map(SseEvent::json).collect();
    assert_eq!(ends.iter().map(|end| &end["sample"]).collect::<Vec<_>>(), [&json!(0), &json!(1)], "{ends:?}");
    let is_cancelled =
        |end: &Value| end["type"] == "done" && end["finish_reason"] == "cancelled" && end["total_tokens"] == 0;
    assert!(ends.iter().all(is_cancelled), "{ends:?}");
}

/// Aborts a generation as soon as it can be aborted.
async fn abort(server: &Server, genkey: &str) {
    for _ in 0..1000 {
        if server.answer("/api/extra/abort", &json!({"genkey": genkey})).await["success"] == "true" {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("no generation has the key {genkey}: {}", server.log());
}

#[tokio::test]
async fn stopping_server_is_unavailable() {
    let server = start(&["--shutdown-grace", "1"]).await;
    let mut socket = connect(&server, PATH, Options::default()).await;
    send(&mut socket, &slow_request("active")).await;
    assert_eq!(next(&mut socket).await.0["type"], "token");
    let (code, messages) = tokio::join!(server.stop("TERM"), until_done(&mut socket));
    let error = &messages.last().unwrap().0;
    assert_eq!((&error["type"], &error["error_code"]), (&json!("error"), &json!("UNAVAILABLE")), "{error}");
    assert_eq!((code, &error["request_id"]), (Some(0), &json!("active")), "{}", server.log());
}
