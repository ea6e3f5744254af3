//! Limits of the attention in one response and of the prompt, and the reported generation time.

use super::{PATH, connect, generate_request, send, tokens_of, until_done};
use crate::harness::{Server, server, with_fields};
use serde_json::{Value, json};
use yawc::Options;

/// Bytes of a row as base64, per position.
const ROW_BYTES: usize = super::LAYERS * super::HEADS * 4 * 4 / 3;

#[tokio::test]
async fn attention_above_its_limit_ends_the_run_as_out_of_memory() {
    let server = Server::start(&["--max-attention", "16K"]);
    server.wait_ready().await;
    let prompt = tokens_of(&server, "The sky is").await;
    let context_of_oom_error = |error: &Value, subject: &str| -> usize {
        assert_eq!((&error["type"], &error["error_code"]), (&json!("error"), &json!("OOM")), "{error}");
        let context = error["context_length"].as_u64().unwrap() as usize;
        let message = format!(
            "out of memory: at a context of {context} tokens, the attention of {subject} exceeds 16384 bytes \
             (--max-attention); request fewer tokens, another attention_format or float16; on the WebSocket the limit \
             applies to each token"
        );
        assert_eq!(error["error"], message);
        context
    };
    // Over HTTP, the limit applies to the attention of all tokens.
    let body = generate_request(&prompt, &json!({"request_id": "complete", "max_new_tokens": 300}));
    let (status, error) = server.post("/api/v1/generate", &body).await;
    assert_eq!(status, 507, "{error}");
    let context = context_of_oom_error(&error, "this answer");
    let sent: usize = (prompt.len()..=context).map(|row_len| row_len * ROW_BYTES).sum();
    assert!(context > prompt.len() && sent > 15 << 10 && sent < 20 << 10, "{context}");
    assert_eq!(server.finished("complete").await["run"]["status"], "cancelled");
    // On the WebSocket, the limit applies to each token.
    let mut socket = connect(&server, PATH, Options::default()).await;
    send(&mut socket, &generate_request(&prompt, &json!({"request_id": "tokens", "max_new_tokens": 300}))).await;
    let messages = until_done(&mut socket).await;
    let context = context_of_oom_error(&messages.last().unwrap().0, "this token");
    assert!(context * ROW_BYTES > 15 << 10 && messages.len() == context - prompt.len() + 1, "{context}");
    assert_eq!(server.finished("tokens").await["run"]["status"], "cancelled");
    // Smaller formats are not limited.
    for fields in [json!({"return_attention": false}), json!({"attention_format": "aggregated"})] {
        let request = generate_request(&prompt, &json!({"max_new_tokens": 300, "attention_encoding": "base64"}));
        let request = with_fields(request, &fields);
        send(&mut socket, &request).await;
        let messages = until_done(&mut socket).await;
        assert_eq!((messages.len(), &messages[300].0["finish_reason"]), (301, &json!("length")));
    }
}

#[tokio::test]
async fn attention_frame_above_its_limit_closes_the_socket_of_koboldcpp() {
    let server = Server::start(&["--max-attention", "4K"]);
    server.wait_ready().await;
    let prompt = tokens_of(&server, "The sky is").await;
    let request = json!({"input_ids": prompt, "max_length": 200, "ignore_eos": true, "attention_format": "per_layer"});
    for (dtype, number_bytes) in [("float32", 4), ("float16", 2)] {
        let request = with_fields(request.clone(), &json!({"attention_dtype": dtype}));
        let (received, code) = crate::kobold::frames(&server, &request).await;
        let (Some(Ok(error)), rows) = (received.last(), received.iter().filter_map(|frame| frame.as_ref().err()))
        else {
            panic!("{received:?}")
        };
        assert_eq!((&error["error_code"], code), (&json!("OOM"), Some(1008)), "{error}");
        let sizes: Vec<usize> = rows.map(Vec::len).collect();
        let row_bytes = super::LAYERS * super::HEADS * number_bytes;
        let expected: Vec<usize> =
            (prompt.len()..=4096).map(|len| len * row_bytes).take_while(|size| *size <= 4096).collect();
        assert_eq!(sizes, expected, "{dtype}");
    }
}

#[tokio::test]
async fn prompt_as_long_as_the_context_is_accepted() {
    const CONTEXT: usize = 256;
    let server = Server::start(&["--ctx-size", "256", "--parallel", "1"]);
    server.wait_ready().await;
    let full = vec![50; CONTEXT];
    let generate = async |input_ids: &[i64], fields: Value| {
        let mut body = with_fields(generate_request(input_ids, &json!({"attention_format": "aggregated"})), &fields);
        body.as_object_mut().unwrap().remove("request_id");
        server.post("/api/v1/generate", &body).await
    };
    let (status, answer) = generate(&full, json!({})).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!((answer["generated_tokens"].as_array().unwrap().len(), &answer["finish_reason"]), (1, &json!("length")));
    assert_eq!(answer["attention_data"][0]["attention"]["context_length"], CONTEXT);
    let (status, answer) = generate(&full, json!({"context_policy": "shift", "max_new_tokens": 20})).await;
    assert_eq!((status, answer["generated_tokens"].as_array().map(Vec::len)), (200, Some(20)), "{answer}");
    assert_eq!(answer["attention_data"][0]["attention"]["context_length"], CONTEXT);
    let forced = json!({"mods": [{"name": "force-prefix", "config": {"text": "one two"}}]});
    let (status, answer) = generate(&full, forced).await;
    assert_eq!((status, answer["generated_tokens"].as_array().map(Vec::len)), (200, Some(0)), "{answer}");
    let (status, error) = generate(&[50; CONTEXT + 1], json!({})).await;
    assert_eq!((status, &error["error_code"]), (400, &json!("CONTEXT_LENGTH_EXCEEDED")), "{error}");
    let (status, error) = server.post("/v1/completions", &json!({"prompt": full, "max_tokens": 1})).await;
    assert_eq!(status, 400, "OpenAI's API rejects such a prompt: {error}");
}

#[tokio::test]
async fn generation_time_includes_the_prompt() {
    let server = server().await;
    let body =
        generate_request(&[50; 1000], &json!({"request_id": "timed", "max_new_tokens": 1, "return_attention": false}));
    let answer = server.answer("/api/v1/generate", &body).await;
    let first_token_us = server.finished("timed").await["run"]["first_token_us"].as_u64().unwrap();
    let reported_ms = answer["generation_time_ms"].as_u64().unwrap();
    assert!(
        reported_ms >= first_token_us / 1000,
        "{reported_ms} ms, but the first token was generated after {first_token_us} us"
    );
    assert!(first_token_us >= 1000, "the prompt is too short for this test: {first_token_us} us");
}
