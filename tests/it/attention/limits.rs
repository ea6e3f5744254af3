//! Tests of the limits of attention in one response.

use super::{PATH, connect, generate_request, send, tokens_of, until_done};
use crate::harness::Server;
use serde_json::{Value, json};
use yawc::Options;

/// Bytes of a row as base64, per position.
const ROW_BYTES: usize = super::LAYERS * super::HEADS * 4 * 4 / 3;

#[tokio::test]
async fn attention_beyond_the_limit_is_out_of_memory_and_ends_its_run() {
    let server = Server::start(&["--max-attention", "16K"]);
    server.wait_ready().await;
    let prompt = tokens_of(&server, "The sky is").await;
    let out_of_memory = |error: &Value| -> usize {
        assert_eq!((&error["type"], &error["error_code"]), (&json!("error"), &json!("OOM")), "{error}");
        assert!(error["error"].as_str().unwrap().contains("--max-attention"), "{error}");
        error["context_length"].as_u64().unwrap() as usize
    };
    // Over HTTP the whole answer counts.
    let body = generate_request(&prompt, &json!({"request_id": "whole", "max_new_tokens": 300}));
    let (status, error) = server.post("/api/v1/generate", &body).await;
    assert_eq!(status, 507, "{error}");
    let context = out_of_memory(&error);
    let sent: usize = (prompt.len()..=context).map(|row_len| row_len * ROW_BYTES).sum();
    assert!(context > prompt.len() && sent > 15 << 10 && sent < 20 << 10, "{context}");
    assert_eq!(server.finished("whole").await["run"]["status"], "cancelled");
    // On the WebSocket each token counts separately.
    let mut socket = connect(&server, PATH, Options::default()).await;
    send(&mut socket, &generate_request(&prompt, &json!({"request_id": "tokens", "max_new_tokens": 300}))).await;
    let messages = until_done(&mut socket).await;
    let context = out_of_memory(&messages.last().unwrap().0);
    assert!(context * ROW_BYTES > 15 << 10 && messages.len() == context - prompt.len() + 1, "{context}");
    assert_eq!(server.finished("tokens").await["run"]["status"], "cancelled");
    // Smaller formats are not limited.
    for more in [json!({"return_attention": false}), json!({"attention_format": "aggregated"})] {
        let mut request = generate_request(&prompt, &json!({"max_new_tokens": 300, "attention_encoding": "base64"}));
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        send(&mut socket, &request).await;
        let messages = until_done(&mut socket).await;
        assert_eq!((messages.len(), &messages[300].0["finish_reason"]), (301, &json!("length")));
    }
}

#[tokio::test]
async fn prompt_as_long_as_the_context_is_accepted() {
    const CONTEXT: usize = 256;
    let server = Server::start(&["--ctx-size", "256", "--parallel", "1"]);
    server.wait_ready().await;
    let full = vec![50; CONTEXT];
    let ask = async |input_ids: &[i64], more: Value| {
        let mut body = generate_request(input_ids, &json!({"attention_format": "aggregated"}));
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body.as_object_mut().unwrap().remove("request_id");
        server.post("/api/v1/generate", &body).await
    };
    let (status, answer) = ask(&full, json!({})).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!((answer["generated_tokens"].as_array().unwrap().len(), &answer["finish_reason"]), (1, &json!("length")));
    assert_eq!(answer["attention_data"][0]["attention"]["context_length"], CONTEXT);
    let (status, answer) = ask(&full, json!({"context_policy": "shift", "max_new_tokens": 20})).await;
    assert_eq!((status, answer["generated_tokens"].as_array().map(Vec::len)), (200, Some(20)), "{answer}");
    assert_eq!(answer["attention_data"][0]["attention"]["context_length"], CONTEXT);
    let forced = json!({"mods": [{"name": "force-prefix", "config": {"text": "one two"}}]});
    let (status, answer) = ask(&full, forced).await;
    assert_eq!((status, answer["generated_tokens"].as_array().map(Vec::len)), (200, Some(0)), "{answer}");
    let (status, error) = ask(&[50; CONTEXT + 1], json!({})).await;
    assert_eq!((status, &error["error_code"]), (400, &json!("CONTEXT_LENGTH_EXCEEDED")), "{error}");
    let (status, error) = server.post("/v1/completions", &json!({"prompt": full, "max_tokens": 1})).await;
    assert_eq!(status, 400, "llama-server rejects it: {error}");
}

#[tokio::test]
async fn generation_time_counts_from_the_request() {
    let server = crate::harness::server().await;
    let body =
        generate_request(&[50; 1000], &json!({"request_id": "timed", "max_new_tokens": 1, "return_attention": false}));
    let answer = server.answer("/api/v1/generate", &body).await;
    let first_token_us = server.finished("timed").await["run"]["first_token_us"].as_u64().unwrap();
    let reported_ms = answer["generation_time_ms"].as_u64().unwrap();
    assert!(
        reported_ms >= first_token_us / 1000,
        "{reported_ms} ms, and the first token came after {first_token_us} us"
    );
    assert!(first_token_us > 5000, "a prompt that takes no time shows nothing: {first_token_us}");
}
