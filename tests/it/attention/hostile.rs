//! Malicious clients: no message causes a 500, ends the server, or blocks other clients.

use super::{LAYERS, PATH, WAIT_TIMEOUT, connect, generate_request, next, send, tokens_of, until_done};
use crate::harness::server;
use futures::{SinkExt, StreamExt};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use yawc::{Frame, OpCode, Options};

const FIELDS: [&str; 36] = [
    "type",
    "request_id",
    "input_ids",
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "stop_tokens",
    "banned_tokens",
    "return_attention",
    "attention_format",
    "aggregation_mode",
    "layer_weights",
    "attention_top_k",
    "attention_dtype",
    "attention_encoding",
    "message_format",
    "logprobs",
    "top_logprobs",
    "num_samples",
    "suggest_pruning",
    "prune_below",
    "sentences",
    "seed",
    "stop",
    "mods",
    "record",
    "model",
    "max_length",
    "rep_pen",
    "sampler_seed",
    "stop_sequence",
    "id_slot",
    "t_max_predict_ms",
    "logit_bias",
];

const VALUES: [&str; 22] = [
    "true",
    "0",
    "-1",
    "3",
    "0.5",
    "1e308",
    "-1e308",
    "1e400",
    "9223372036854775807",
    "18446744073709551616",
    "NaN",
    r#""""#,
    r#""x""#,
    r#""\u0000""#,
    r#""\ud800""#,
    "[]",
    "{}",
    "[null]",
    "[1e300]",
    "[[[[[[1]]]]]]",
    "[3e38, 3e38, 3e38, 3e38]",
    r#"[{"turn_id": 9e15, "sentence_id": -9e15, "start": 0, "end": 1e18}]"#,
];

/// Returns a small request whose field has this value, which need not be valid JSON.
fn body(field: &str, value: &str) -> String {
    let mut fields = json!({"type": "generate", "input_ids": [40, 41], "max_new_tokens": 1, "t_max_predict_ms": 500,
                            "return_attention": true, "ignore_eos": true, "record": false});
    if field == "layer_weights" {
        fields.as_object_mut().unwrap().extend([
            ("attention_format".to_owned(), json!("aggregated")),
            ("aggregation_mode".to_owned(), json!("weighted_layers")),
        ]);
    }
    fields.as_object_mut().unwrap().remove(field);
    let text = fields.to_string();
    format!("{},\"{field}\":{value}}}", &text[..text.len() - 1])
}

#[tokio::test]
async fn invalid_field_values_cause_no_internal_error() {
    let server = server().await;
    let mut codes = BTreeSet::new();
    for field in FIELDS {
        for value in VALUES {
            let request = server.request(Method::POST, "/api/v1/generate").body(body(field, value));
            let response = request.send().await.unwrap();
            let status = response.status().as_u16();
            let answer: Value = response.json().await.unwrap();
            assert!(status == 200 || (400..500).contains(&status), "{field}: {value}: {status} {answer}");
            if status != 200 {
                assert!(answer["error"].as_str().is_some_and(|error| !error.is_empty()), "{field}: {value}: {answer}");
                codes.insert(answer["error_code"].as_str().unwrap().to_owned());
            }
        }
    }
    for code in ["INVALID_REQUEST", "INVALID_TOKEN", "INVALID_JSON"] {
        assert!(codes.contains(code), "{code} is missing in {codes:?}");
    }
}

#[tokio::test]
async fn invalid_socket_messages_cause_no_internal_error() {
    let server = server().await;
    let mut socket = connect(server, PATH, Options::default()).await;
    for field in FIELDS {
        for value in VALUES {
            if field == "message_format" {
                continue;
            }
            socket.send(Frame::text(body(field, value))).await.unwrap();
            // Each sample has its own end.
            let mut left = if (field, value) == ("num_samples", "3") { 3 } else { 1 };
            while left > 0 {
                let (message, _) = next(&mut socket).await;
                match message["type"].as_str().unwrap() {
                    "error" => {
                        let code = message["error_code"].as_str().unwrap();
                        assert!(!["INTERNAL", "RUN_FAILED", "OOM"].contains(&code), "{field}: {value}: {message}");
                        left = 0;
                    }
                    "done" => left -= 1,
                    _ => {}
                }
            }
        }
    }
    send(&mut socket, &json!({"type": "ping"})).await;
    assert_eq!(next(&mut socket).await.0, json!({"type": "pong"}));
}

#[tokio::test]
async fn deeply_nested_message_pack_is_rejected() {
    let server = server().await;
    let invalid: [(Vec<u8>, &str); 6] = [
        (vec![0x91; 1_000_000], "NESTED_TOO_DEEP"),
        ([[0x81, 0xa1, b'a'].repeat(100_000), vec![1]].concat(), "NESTED_TOO_DEEP"),
        (b"\xc1".to_vec(), "INVALID_JSON"),
        (b"\xdd\xff\xff\xff\xff".to_vec(), "INVALID_JSON"),
        (b"\xc6\xff\xff\xff\xff".to_vec(), "INVALID_JSON"),
        ([rmp_serde::to_vec_named(&json!({"input_ids": [40]})).unwrap(), b"fields".to_vec()].concat(), "INVALID_JSON"),
    ];
    let mut socket = connect(server, PATH, Options::default()).await;
    for (bytes, code) in invalid {
        let request = server.request(Method::POST, "/api/v1/generate").header("content-type", "application/msgpack");
        let response = request.body(bytes.clone()).send().await.unwrap();
        assert_eq!(response.status(), 400);
        assert_eq!(response.json::<Value>().await.unwrap()["error_code"], code);
        socket.send(Frame::binary(bytes)).await.unwrap();
        let frame = tokio::time::timeout(WAIT_TIMEOUT, socket.next()).await.unwrap().unwrap();
        assert_eq!(frame.opcode(), OpCode::Binary, "the answer to a MessagePack request is MessagePack");
        let error: Value = rmp_serde::from_slice(&frame.into_payload()).unwrap();
        assert_eq!((&error["type"], &error["error_code"]), (&json!("error"), &json!(code)));
    }
}

#[tokio::test]
async fn thousand_requests_on_one_socket_are_all_answered() {
    let server = server().await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let request = |number: u32| {
        let fields =
            json!({"request_id": number.to_string(), "max_new_tokens": 1, "return_attention": false, "record": false});
        generate_request(&[40, 41], &fields)
    };
    let (mut done, mut busy) = (BTreeSet::new(), 0);
    // More concurrent requests than a connection may have.
    for number in 0..1000 {
        send(&mut socket, &request(number)).await;
    }
    while done.len() + busy < 1000 {
        let (message, _) = next(&mut socket).await;
        match message["type"].as_str().unwrap() {
            "done" => assert!(done.insert(message["request_id"].as_str().unwrap().to_owned()), "{message}"),
            "error" => {
                assert_eq!(message["error_code"], "BUSY", "{message}");
                busy += 1;
            }
            _ => {}
        }
    }
    assert!(done.len() >= 64, "{} done", done.len());
    send(&mut socket, &request(1000)).await;
    assert_eq!(until_done(&mut socket).await.last().unwrap().0["type"], "done");
}

#[tokio::test]
async fn client_that_never_reads_blocks_no_other_client() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is").await;
    let id = format!("unread-{}", std::process::id());
    let mut unread_socket = connect(server, PATH, Options::default()).await;
    let fields = json!({"request_id": id, "max_new_tokens": 4000, "attention_encoding": "array"});
    send(&mut unread_socket, &generate_request(&prompt, &fields)).await;
    for _ in 0..3 {
        let answer = server.answer("/api/v1/generate", &generate_request(&prompt, &json!({"request_id": null}))).await;
        assert_eq!(answer["attention_data"][0]["attention"]["shape"][0], LAYERS);
    }
    let run = loop {
        let (status, run) = server.get(&format!("/api/v1/runs/{id}")).await;
        if status == 200 {
            break run;
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
    };
    assert_eq!(run["run"]["status"], "running", "the run must wait until its client reads: {run}");
    drop(unread_socket);
    assert_eq!(server.finished(&id).await["run"]["status"], "cancelled");
}
