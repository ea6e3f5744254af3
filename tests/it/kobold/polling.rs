//! Routes about active and ended generations.

use crate::harness::{Server, server};
use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;

#[tokio::test]
async fn generation_can_be_polled_and_aborted() {
    let server = server().await;
    let key = format!("KCPP{}", std::process::id());
    let body = json!({"prompt": "The sky is", "max_length": 3000, "genkey": key, "bypass_eos": true});
    let generating = async { server.answer("/api/v1/generate", &body).await };
    let watching = async {
        loop {
            let check = server.answer("/api/extra/generate/check", &json!({"genkey": key})).await;
            if check["results"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let aborted = server.answer("/api/extra/abort", &json!({"genkey": key})).await;
        assert_eq!(aborted, json!({"success": "true", "done": "true"}));
    };
    let (answer, ()) = tokio::join!(generating, watching);
    assert_eq!(answer["results"][0]["finish_reason"], "abort");
    assert!(!answer["results"][0]["text"].as_str().unwrap().is_empty());
    let prompt = server.answer("/api/extra/tokencount", &json!({"prompt": "The sky is"})).await;
    assert_eq!(answer["results"][0]["prompt_tokens"], prompt["value"], "{answer}");
    assert!(answer["results"][0]["completion_tokens"].as_u64().unwrap() > 0, "{answer}");
    let second_abort = server.answer("/api/extra/abort", &json!({"genkey": key})).await;
    assert_eq!(second_abort["success"], "false");
    // The text remains for a client that lost its connection.
    let check = server.answer("/api/extra/generate/check", &json!({"genkey": key})).await;
    assert_eq!(check["results"][0]["text"], answer["results"][0]["text"]);
}

#[tokio::test]
async fn logprobs_are_in_answer_and_queryable_later() {
    let server = server().await;
    let key = format!("LOGP{}", std::process::id());
    let body = |logprobs: bool| json!({"prompt": "The sky is", "max_length": 6, "genkey": key, "logprobs": logprobs, "bypass_eos": true});
    let last = async || server.answer("/api/extra/last_logprobs", &json!({"genkey": key})).await["logprobs"].clone();
    assert_eq!(last().await, Value::Null);
    let answer = server.answer("/api/v1/generate", &body(true)).await;
    let (text, logprobs) = (answer["results"][0]["text"].as_str().unwrap(), &answer["results"][0]["logprobs"]);
    let list = |name: &str| logprobs[name].as_array().unwrap().clone();
    let tokens: String = list("tokens").iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!((tokens.as_str(), list("tokens").len()), (text, 6));
    assert!(list("token_logprobs").iter().all(|value| value.as_f64().unwrap() <= 0.0));
    assert!(list("top_logprobs").iter().all(|top| !top.as_object().unwrap().is_empty()));
    assert_eq!(list("content")[0]["token_id"], list("token_ids")[0]);
    assert_eq!(list("text_offset")[1], list("tokens")[0].as_str().unwrap().chars().count());
    assert_eq!(last().await, *logprobs);

    let answer = server.answer("/api/v1/generate", &body(false)).await;
    assert_eq!((&answer["results"][0]["logprobs"], last().await), (&Value::Null, Value::Null));
    let (status, without_key) = server.get("/api/extra/last_logprobs").await;
    assert!(status == 200 && without_key.get("logprobs").is_some(), "{without_key}");
}

#[tokio::test]
async fn perf_reports_the_last_generation() {
    let server = Server::start(&["--parallel", "1"]);
    server.wait_ready().await;
    let perf = async || server.get("/api/extra/perf").await.1;
    let before = perf().await;
    for (field, expected) in
        [("last_token_count", 0), ("last_seed", -1), ("total_gens", 0), ("stop_reason", -1), ("queue", 0), ("idle", 1)]
    {
        assert_eq!(before[field], expected, "{before}");
    }
    let body = json!({"prompt": "The sky is", "max_length": 5, "sampler_seed": 7, "bypass_eos": true});
    let text = server.answer("/api/v1/generate", &body).await["results"][0]["text"].as_str().unwrap().to_owned();
    let after = perf().await;
    for (field, expected) in [("last_token_count", 5), ("last_seed", 7), ("total_gens", 1), ("stop_reason", 0)] {
        assert_eq!(after[field], expected, "{after}");
    }
    for field in ["last_process", "last_eval"] {
        assert!(after[field].as_f64().unwrap() > 0.0, "{after}");
    }
    assert!(after["idletime"].as_f64().unwrap() < after["uptime"].as_f64().unwrap(), "{after}");
    let mut stopped = body.clone();
    stopped["stop_sequence"] = json!([text.chars().nth(1).unwrap()]);
    server.answer("/api/v1/generate", &stopped).await;
    let after = perf().await;
    assert_eq!((&after["total_gens"], &after["stop_reason"]), (&json!(2), &json!(2)), "{after}");
    // A client that disconnects ends its generation, too.
    let long = json!({"prompt": "The sky is", "max_length": 3000, "bypass_eos": true});
    let mut response = server.request(Method::POST, "/api/extra/generate/stream").json(&long).send().await.unwrap();
    response.chunk().await.unwrap();
    drop(response);
    let begun = std::time::Instant::now();
    while perf().await["total_gens"] != 3 {
        assert!(begun.elapsed() < super::WAIT_TIMEOUT, "{}", perf().await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(perf().await["stop_reason"], -1);
}
