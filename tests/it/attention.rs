//! The attention API as its clients use it: Halo Weave's first version over the WebSocket, its newest over server-sent events
//! (`kobold`), and the examples. That rows are right is told in `exact`.

use crate::harness::{Server, server};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::{SinkExt, StreamExt};
use half::f16;
use reqwest::Method;
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;
use yawc::{Frame, OpCode, Options, TcpWebSocket, WebSocket};

const LAYERS: usize = 4;
const HEADS: usize = 4;
const PATIENCE: Duration = Duration::from_mins(1);
const PATH: &str = "/api/v1/generate/stream";

async fn tokens_of(server: &Server, text: &str) -> Vec<i64> {
    let answer = server.answer("/api/v1/tokenize", &json!({"text": text, "add_special_tokens": false})).await;
    serde_json::from_value(answer["token_ids"].clone()).unwrap()
}

async fn connect(server: &Server, path: &str, options: Options) -> TcpWebSocket {
    let url = format!("{}{path}", server.base.replace("http", "ws")).parse().unwrap();
    WebSocket::connect(url).with_options(options.with_max_payload_read(64 << 20)).await.unwrap()
}

async fn send(socket: &mut TcpWebSocket, message: &Value) {
    socket.send(Frame::text(message.to_string())).await.unwrap();
}

/// The next message: its fields, and the bytes behind them.
async fn next(socket: &mut TcpWebSocket) -> (Value, Vec<u8>) {
    loop {
        let frame = tokio::time::timeout(PATIENCE, socket.next()).await.expect("nothing comes").expect("closed");
        match frame.opcode() {
            OpCode::Text => return (serde_json::from_str(frame.as_str()).unwrap(), Vec::new()),
            OpCode::Binary => {
                let bytes = frame.into_payload();
                let length = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
                return (serde_json::from_slice(&bytes[4..4 + length]).unwrap(), bytes[4 + length..].to_vec());
            }
            _ => {}
        }
    }
}

/// Messages up to the end of a request.
async fn until_done(socket: &mut TcpWebSocket) -> Vec<(Value, Vec<u8>)> {
    let mut messages = Vec::new();
    loop {
        let message = next(socket).await;
        let over = message.0["type"] == "done" || message.0["type"] == "error";
        messages.push(message);
        if over {
            return messages;
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn base64_floats(attention: &Value) -> Vec<f32> {
    floats(&STANDARD.decode(attention["data"].as_str().unwrap()).unwrap())
}

/// A message that asks for little and always the same.
fn asking(input_ids: &[i64], more: &Value) -> Value {
    let mut message = json!({
        "type": "generate", "request_id": "uuid-1234-5678", "input_ids": input_ids, "max_new_tokens": 4, "temperature": 0.0,
        "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.0, "stop_tokens": [], "return_attention": true, "ignore_eos": true,
    });
    message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    message
}

#[tokio::test]
async fn the_model_is_described_in_its_publishers_terms() {
    let (status, info) = server().await.get("/api/v1/model/info").await;
    assert_eq!(status, 200, "{info}");
    let template = info["chat_template"].as_str().unwrap();
    assert!(template.contains("messages"), "{template}");
    for (field, expected) in [
        ("model_name", json!("tiny")),
        ("architecture", json!("Qwen2ForCausalLM")),
        ("num_layers", json!(LAYERS)),
        ("num_attention_heads", json!(HEADS)),
        ("num_key_value_heads", json!(2)),
        ("hidden_size", json!(64)),
        ("max_position_embeddings", json!(4096)),
        ("rope_theta", json!(10000.0)),
        ("bos_token_id", json!(0)),
        ("eos_token_id", json!(2)),
        ("attention_available", json!(true)),
        ("torch_dtype", json!("F16")),
        (
            "special_tokens",
            json!({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                   "im_start_id": 1, "im_end_id": 2}),
        ),
    ] {
        assert_eq!(info[field], expected, "{field}");
    }
    assert!(info["context_length"].as_u64().unwrap() > 0 && info["vocab_size"] == 640, "{info}");
    let (status, unknown) = server().await.get("/api/v1/model/info?model=nobody").await;
    assert_eq!((status, &unknown["error_code"]), (404, &json!("MODEL_NOT_FOUND")));
}

#[tokio::test]
async fn text_becomes_tokens_and_text_again() {
    let server = server().await;
    let text = "<|im_start|>user\nHéllo, 世界! 🦊<|im_end|>";
    // A page sends JSON as text, which spares it a preflight.
    let body = json!({"text": text, "add_special_tokens": false}).to_string();
    let request = server.request(Method::POST, "/api/v1/tokenize").header("content-type", "text/plain").body(body);
    let answer: Value = request.send().await.unwrap().json().await.unwrap();
    let tokens = answer["tokens"].as_array().unwrap();
    assert_eq!(tokens[0], json!({"token_id": 1, "text": "<|im_start|>"}));
    assert_eq!(tokens.last().unwrap()["text"], "<|im_end|>");
    assert_eq!(tokens.iter().map(|token| token["text"].as_str().unwrap()).collect::<String>(), text);
    assert!(tokens.iter().any(|token| token["text"] == ""), "a character of several tokens stands with the last");
    assert_eq!(answer["token_count"], tokens.len());
    let back = server.answer("/api/v1/detokenize", &json!({"token_ids": answer["token_ids"]})).await;
    assert_eq!(back, json!({"text": text}));
    let again = server.answer("/api/v1/tokenize", &json!({"text": text})).await;
    assert_eq!(again, answer);
}

#[tokio::test]
async fn the_first_halo_weave_streams_shades_and_maps_its_tokens() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is blue, and the sea is").await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let mut asked = asking(
        &prompt,
        &json!({"attention_format": "per_layer", "banned_tokens": [1], "logprobs": true, "top_logprobs": 3}),
    );
    for _ in 0..2 {
        // The same request_id again is no error: the first one is over.
        send(&mut socket, &asked).await;
        let messages = until_done(&mut socket).await;
        assert_eq!(messages.len(), 5, "{messages:?}");
        let mut text = String::new();
        for (index, (message, _)) in messages[..4].iter().enumerate() {
            assert_eq!((&message["type"], &message["request_id"]), (&json!("token"), &json!("uuid-1234-5678")));
            let (token, attention) = (&message["token"], &message["attention"]);
            text.push_str(token["text"].as_str().unwrap());
            let top = token["top_logprobs"].as_array().unwrap();
            assert_eq!((top.len(), &top[0]["token_id"]), (3, &token["token_id"]), "at temperature 0");
            assert!((top[0]["logprob"].as_f64().unwrap() - token["logprob"].as_f64().unwrap()).abs() < 1e-3);
            let length = prompt.len() + index;
            assert_eq!(attention["shape"], json!([LAYERS, HEADS, length]));
            assert_eq!(attention["context_length"], length);
            assert_eq!((&attention["encoding"], &attention["dtype"]), (&json!("base64"), &json!("float32")));
            let values = base64_floats(attention);
            assert_eq!(values.len(), LAYERS * HEADS * length);
            for row in values.chunks_exact(length) {
                assert!(
                    (row.iter().sum::<f32>() - 1.0).abs() < 1e-3 && row.iter().all(|value| (0.0..=1.0).contains(value))
                );
            }
        }
        let done = &messages[4].0;
        assert_eq!((&done["finish_reason"], &done["total_tokens"]), (&json!("length"), &json!(4)));
        assert!(done["generation_time_ms"].is_u64());
        // A sentence is pruned: what is left is sent, with positions of its own.
        asked["input_ids"].as_array_mut().unwrap().drain(2..4);
        asked["input_ids"].as_array_mut().unwrap().extend([json!(40), json!(41)]);
    }
    socket.send(Frame::close(yawc::close::CloseCode::Normal, "")).await.unwrap();
    let frame = tokio::time::timeout(PATIENCE, socket.next()).await.unwrap();
    assert!(frame.is_none_or(|frame| frame.opcode() == OpCode::Close), "the close is answered");
}

#[tokio::test]
async fn every_format_is_the_same_row() {
    let server = server().await;
    let prompt = tokens_of(server, "One two three four").await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let mut ask = async |more: Value| {
        send(&mut socket, &asking(&prompt, &more)).await;
        until_done(&mut socket).await.remove(0)
    };
    let (full, _) = ask(json!({})).await;
    let full = base64_floats(&full["attention"]);
    let length = prompt.len();
    let near = |a: &[f32], b: &[f32], off: f32| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).for_each(|(a, b)| assert!((a - b).abs() <= off, "{a} and {b}"));
    };
    let (header, bytes) = ask(json!({"attention_encoding": "binary"})).await;
    near(&floats(&bytes), &full, 1e-6);
    assert_eq!(header["attention"]["byte_length"], bytes.len());
    assert!(header["attention"].get("data").is_none());
    let (header, bytes) = ask(json!({"attention_encoding": "binary", "attention_dtype": "float16"})).await;
    let halves: Vec<f32> = bytes.chunks_exact(2).map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect();
    near(&halves, &full, 5e-4);
    assert_eq!(header["attention"]["dtype"], "float16");
    let (array, _) = ask(json!({"attention_encoding": "array"})).await;
    near(&serde_json::from_value::<Vec<f32>>(array["attention"]["data"].clone()).unwrap(), &full, 1e-6);
    let rows: Vec<&[f32]> = full.chunks_exact(length).collect();
    let mean = |rows: &[&[f32]]| -> Vec<f32> {
        (0..length).map(|at| rows.iter().map(|row| row[at]).sum::<f32>() / rows.len() as f32).collect()
    };
    let max: Vec<f32> = (0..length).map(|at| rows.iter().map(|row| row[at]).fold(0.0, f32::max)).collect();
    let last = mean(&rows[(LAYERS - 1) * HEADS..]);
    for (mode, expected) in [("mean", mean(&rows)), ("max", max), ("last_layer", last.clone())] {
        let (told, _) = ask(json!({"attention_format": "aggregated", "aggregation_mode": mode})).await;
        assert_eq!(
            (&told["attention"]["shape"], &told["attention"]["aggregation_mode"]),
            (&json!([length]), &json!(mode))
        );
        near(&serde_json::from_value::<Vec<f32>>(told["attention"]["data"].clone()).unwrap(), &expected, 1e-5);
    }
    let weighted = json!({"attention_format": "aggregated", "aggregation_mode": "weighted_layers", "layer_weights": [0, 0, 0, 2],
                          "attention_encoding": "base64"});
    near(&base64_floats(&ask(weighted).await.0["attention"]), &last, 1e-5);
    let (sparse, _) = ask(json!({"attention_format": "sparse", "attention_top_k": 2})).await;
    let strong = sparse["attention"]["data"].as_array().unwrap();
    assert_eq!((strong.len(), &sparse["attention"]["top_k"]), (2, &json!(2)));
    let at = strong[0]["position"].as_u64().unwrap() as usize;
    assert!(mean(&rows).iter().all(|&value| value <= mean(&rows)[at] + 1e-6));
    let layers: Vec<f32> = serde_json::from_value(strong[0]["layers"].clone()).unwrap();
    near(
        &layers,
        &(0..LAYERS).map(|layer| mean(&rows[layer * HEADS..(layer + 1) * HEADS])[at]).collect::<Vec<_>>(),
        1e-5,
    );
    let (viz, _) = ask(json!({"attention_format": "viz"})).await;
    let viz = &viz["attention"];
    assert_eq!((viz["format"].as_str(), viz["mean_by_layer"].as_array().unwrap().len()), (Some("viz"), LAYERS));
    assert!(viz["entropy"].as_f64().unwrap() > 0.0 && viz["max_by_layer"].as_array().unwrap().len() == LAYERS);
}

#[tokio::test]
async fn messages_can_be_packed() {
    let server = server().await;
    let prompt = tokens_of(server, "One two three").await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let packed = rmp_serde::to_vec_named(&asking(&prompt, &json!({}))).unwrap();
    socket.send(Frame::binary(packed)).await.unwrap();
    let mut kinds = Vec::new();
    while kinds.last().is_none_or(|kind| kind != "done") {
        let frame = tokio::time::timeout(PATIENCE, socket.next()).await.unwrap().unwrap();
        if frame.opcode() != OpCode::Binary {
            continue;
        }
        let message: rmpv::Packed = rmpv::read(&frame.into_payload());
        if message.kind == "token" {
            assert_eq!(floats(&message.data).len(), LAYERS * HEADS * message.context_length);
        }
        kinds.push(message.kind);
    }
    assert_eq!(kinds, ["token", "token", "token", "token", "done"]);
    let request = server.request(Method::POST, "/api/v1/generate").header("accept", "application/msgpack");
    let response = request.json(&asking(&prompt, &json!({}))).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "application/msgpack");
    let answer: rmpv::Answer = rmp_serde::from_slice(&response.bytes().await.unwrap()).unwrap();
    assert_eq!(answer.attention_data.len(), 4);
    assert_eq!(floats(&answer.attention_data[0].attention.data).len(), LAYERS * HEADS * prompt.len());
}

/// Messages in `MessagePack`, whose values are bytes.
mod rmpv {
    use serde::Deserialize;

    #[derive(Default)]
    pub struct Packed {
        pub kind: String,
        pub context_length: usize,
        pub data: Vec<u8>,
    }

    #[derive(Deserialize)]
    struct Message {
        r#type: String,
        attention: Option<Attention>,
    }

    #[derive(Deserialize)]
    pub struct Answer {
        pub attention_data: Vec<OfToken>,
    }

    #[derive(Deserialize)]
    pub struct OfToken {
        pub attention: Attention,
    }

    #[derive(Deserialize)]
    pub struct Attention {
        pub context_length: usize,
        #[serde(deserialize_with = "bytes")]
        pub data: Vec<u8>,
    }

    fn bytes<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Vec<u8>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
                Ok(bytes.to_vec())
            }
        }
        deserializer.deserialize_bytes(Visitor)
    }

    pub fn read(bytes: &[u8]) -> Packed {
        let message: Message = rmp_serde::from_slice(bytes).unwrap();
        let attention = message.attention;
        let context_length = attention.as_ref().map_or(0, |attention| attention.context_length);
        Packed {
            kind: message.r#type,
            context_length,
            data: attention.map(|attention| attention.data).unwrap_or_default(),
        }
    }
}

#[tokio::test]
async fn one_answer_at_once_has_everything() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is").await;
    let body = asking(&prompt, &json!({"request_id": null, "logprobs": true}));
    let answer = server.answer("/api/v1/generate", &body).await;
    let (tokens, data) = (answer["generated_tokens"].as_array().unwrap(), answer["attention_data"].as_array().unwrap());
    assert_eq!((tokens.len(), data.len(), &answer["finish_reason"]), (4, 4, &json!("length")));
    assert_eq!(data[3]["attention"]["shape"], json!([LAYERS, HEADS, prompt.len() + 3]));
    assert_eq!(data[3]["token_id"], tokens[3]["token_id"]);
    assert!(tokens[0]["logprob"].as_f64().unwrap() <= 0.0);
    let text: String = tokens.iter().map(|token| token["text"].as_str().unwrap()).collect();
    assert_eq!(answer["generated_text"], text);
    // A stop token is no part of the answer; a banned one never comes.
    let second = &tokens[1]["token_id"];
    let stopped = server
        .answer("/api/v1/generate", &asking(&prompt, &json!({"request_id": null, "stop_tokens": [second]})))
        .await;
    let expected = usize::from(tokens[0]["token_id"] != *second);
    assert_eq!(
        (stopped["generated_tokens"].as_array().unwrap().len(), &stopped["finish_reason"]),
        (expected, &json!("stop_token"))
    );
    let banned = server
        .answer("/api/v1/generate", &asking(&prompt, &json!({"request_id": null, "banned_tokens": [second]})))
        .await;
    assert!(banned["generated_tokens"].as_array().unwrap().iter().all(|token| token["token_id"] != *second));
    let plain = server.answer("/api/v1/generate", &json!({"input_ids": prompt, "max_new_tokens": 2})).await;
    assert!(plain.get("attention_data").is_none(), "only what was asked for");
    // This client leaves what it gets as it is.
    let bare = reqwest::Client::builder().no_gzip().no_zstd().build().unwrap();
    let gzipped = bare
        .post(format!("{}/api/v1/generate", server.base))
        .header("accept-encoding", "gzip")
        .json(&body)
        .send()
        .await;
    assert_eq!(gzipped.unwrap().headers()["content-encoding"], "gzip");
}

#[tokio::test]
async fn several_samples_differ_and_are_told_apart() {
    let server = server().await;
    let prompt = tokens_of(server, "Once upon a time").await;
    let more = json!({"num_samples": 3, "temperature": 1.5, "seed": 7, "max_new_tokens": 12, "request_id": null});
    let answer = server.answer("/api/v1/generate", &asking(&prompt, &more)).await;
    let samples = answer["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 3);
    assert!(samples.iter().all(|sample| sample["attention_data"].as_array().unwrap().len() == 12));
    assert_ne!(samples[0]["generated_tokens"], samples[1]["generated_tokens"]);
    let mut socket = connect(server, PATH, Options::default()).await;
    send(&mut socket, &asking(&prompt, &more)).await;
    let mut done = std::collections::BTreeSet::new();
    let mut texts = vec![String::new(); 3];
    while done.len() < 3 {
        let (message, _) = next(&mut socket).await;
        let sample = message["sample"].as_u64().unwrap() as usize;
        match message["type"].as_str().unwrap() {
            "done" => assert!(done.insert(sample)),
            _ => texts[sample].push_str(message["token"]["text"].as_str().unwrap()),
        }
    }
    assert!(texts.iter().all(|text| !text.is_empty()));
}

#[tokio::test]
async fn requests_share_a_socket_and_one_can_be_cancelled() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is").await;
    let mut socket = connect(server, PATH, Options::default()).await;
    send(&mut socket, &asking(&prompt, &json!({"request_id": "endless", "max_new_tokens": 3000}))).await;
    assert_eq!(next(&mut socket).await.0["request_id"], "endless");
    // While it goes on, small questions are answered at once.
    assert_eq!(server.get("/api/v1/model/info").await.0, 200);
    tokens_of(server, "quick").await;
    send(&mut socket, &asking(&prompt, &json!({"request_id": "short", "return_attention": false}))).await;
    send(&mut socket, &asking(&prompt, &json!({"request_id": "endless"}))).await;
    send(&mut socket, &json!({"type": "ping"})).await;
    let (mut short, mut doubled, mut pong) = (false, false, false);
    while !(short && doubled && pong) {
        let (message, _) = next(&mut socket).await;
        short |= message["type"] == "done" && message["request_id"] == "short";
        pong |= message["type"] == "pong";
        doubled |= message["error_code"] == "DUPLICATE_REQUEST_ID";
    }
    send(&mut socket, &json!({"type": "cancel", "request_id": "endless"})).await;
    let end = loop {
        let (message, _) = next(&mut socket).await;
        if message["type"] == "done" {
            break message;
        }
    };
    assert_eq!((&end["request_id"], &end["finish_reason"]), (&json!("endless"), &json!("cancelled")));
    send(&mut socket, &json!({"type": "cancel", "request_id": "endless"})).await;
    assert_eq!(next(&mut socket).await.0["error_code"], "NOT_FOUND");
}

#[tokio::test]
async fn a_closed_connection_ends_its_run() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is").await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let id = format!("left-{}", std::process::id());
    send(&mut socket, &asking(&prompt, &json!({"request_id": id, "max_new_tokens": 3500}))).await;
    next(&mut socket).await;
    drop(socket);
    let run = server.finished(&id).await;
    assert_eq!((&run["run"]["status"], &run["run"]["surface"]), (&json!("cancelled"), &json!("attention")), "{run}");
}

#[tokio::test]
async fn sentences_that_nobody_looks_at_are_suggested() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is blue. The sea is deep. What is deep?").await;
    let sentences = json!([{"turn_id": 7, "sentence_id": 3, "start": 1, "end": 4}]);
    let more = json!({"suggest_pruning": true, "prune_below": 1.0, "sentences": sentences, "return_attention": false});
    let mut socket = connect(server, PATH, Options::default()).await;
    send(&mut socket, &asking(&prompt, &more)).await;
    let messages = until_done(&mut socket).await;
    let suggestion = &messages[messages.len() - 2].0;
    assert_eq!(suggestion["type"], "pruning_suggestion");
    let one = &suggestion["prunable_sentences"][0];
    assert_eq!(
        (&one["turn_id"], &one["sentence_id"], &one["start"], &one["end"]),
        (&json!(7), &json!(3), &json!(1), &json!(4))
    );
    assert!((0.0..1.0).contains(&one["max_attention"].as_f64().unwrap()));
    assert!(messages[0].0.get("attention").is_none());
    let found = json!({"suggest_pruning": true, "prune_below": 1.0, "request_id": null});
    let answer = server.answer("/api/v1/generate", &asking(&prompt, &found)).await;
    let ends: Vec<u64> =
        answer["pruning_suggestion"].as_array().unwrap().iter().map(|one| one["end"].as_u64().unwrap()).collect();
    assert_eq!((ends.len(), ends.last()), (3, Some(&(prompt.len() as u64))), "sentences end at full stops");
}

#[tokio::test]
async fn what_is_wrong_is_said_in_a_word_and_a_sentence() {
    let server = server().await;
    let prompt = tokens_of(server, "x").await;
    let long: Vec<i64> = vec![50; 20_000];
    let wrong = [
        (json!({"input_ids": [1, 999_999]}), "INVALID_TOKEN", "Token ID 999999 not in vocabulary (vocab_size=640)"),
        (json!({"input_ids": [-1]}), "INVALID_TOKEN", "Token ID -1 not"),
        (json!({"input_ids": [1.5]}), "INVALID_TOKEN", "list of token ids"),
        (json!({"input_ids": ["a"]}), "INVALID_TOKEN", "list of token ids"),
        (json!({"input_ids": []}), "INVALID_REQUEST", "empty"),
        (json!({"input_ids": "1,2"}), "INVALID_REQUEST", "input_ids must be a list"),
        (json!({"input_ids": null}), "INVALID_REQUEST", "input_ids is missing"),
        (json!({"input_ids": long}), "CONTEXT_LENGTH_EXCEEDED", "20000 tokens"),
        (json!({"stop_tokens": [640]}), "INVALID_TOKEN", "Token ID 640"),
        (json!({"banned_tokens": [9_000_000_000_i64]}), "INVALID_TOKEN", "9000000000"),
        (json!({"max_new_tokens": 0}), "INVALID_REQUEST", "max_new_tokens"),
        (json!({"max_new_tokens": "many"}), "INVALID_REQUEST", "max_new_tokens"),
        (json!({"repetition_penalty": -1}), "INVALID_REQUEST", "repetition_penalty"),
        (json!({"temperature": "hot"}), "INVALID_REQUEST", "temperature"),
        (json!({"attention_format": "holographic"}), "INVALID_REQUEST", "per_layer"),
        (json!({"attention_dtype": "float8"}), "INVALID_REQUEST", "float16"),
        (json!({"attention_encoding": "smoke"}), "INVALID_REQUEST", "base64"),
        (json!({"attention_encoding": "binary"}), "INVALID_REQUEST", "JSON holds no bytes"),
        (json!({"attention_format": "aggregated", "aggregation_mode": "median"}), "INVALID_REQUEST", "last_layer"),
        (json!({"attention_format": "sparse", "attention_top_k": 0}), "INVALID_REQUEST", "attention_top_k"),
        (
            json!({"attention_format": "aggregated", "aggregation_mode": "weighted_layers", "layer_weights": [1]}),
            "INVALID_REQUEST",
            "4 layers",
        ),
        (json!({"num_samples": 1_000_000_000}), "INVALID_REQUEST", "num_samples"),
        (json!({"num_samples": -1}), "INVALID_REQUEST", "num_samples"),
        (json!({"top_logprobs": 10_000}), "INVALID_REQUEST", "top_logprobs"),
        (json!({"suggest_pruning": true, "sentences": [{"start": 5}]}), "INVALID_REQUEST", "sentences[0]"),
        (json!({"model": "nobody"}), "MODEL_NOT_FOUND", "nobody"),
        (json!({"mods": ["nobody"]}), "UNKNOWN_MOD", "nobody"),
    ];
    let mut socket = connect(server, PATH, Options::default()).await;
    for (more, code, words) in wrong {
        let body = asking(&prompt, &more);
        let (status, error) = server.post("/api/v1/generate", &body).await;
        assert!((400..500).contains(&status), "{more}: {status}");
        assert_eq!((&error["type"], &error["error_code"]), (&json!("error"), &json!(code)), "{error}");
        assert!(error["error"].as_str().unwrap().contains(words), "{error} should say {words}");
        if more.get("attention_encoding") == Some(&json!("binary")) {
            continue;
        }
        send(&mut socket, &body).await;
        let (error, _) = next(&mut socket).await;
        assert_eq!((&error["error_code"], &error["request_id"]), (&json!(code), &json!("uuid-1234-5678")), "{error}");
    }
    for (text, code) in [("{", "INVALID_JSON"), ("[]", "INVALID_REQUEST"), ("{\"type\": \"dance\"}", "INVALID_REQUEST")]
    {
        socket.send(Frame::text(text)).await.unwrap();
        assert_eq!(next(&mut socket).await.0["error_code"], code, "{text}");
    }
    // The connection has survived all of it.
    send(&mut socket, &asking(&prompt, &json!({}))).await;
    assert_eq!(until_done(&mut socket).await.len(), 5);
    for (path, body) in [
        ("/api/v1/tokenize", json!({"text": 5})),
        ("/api/v1/tokenize", json!({})),
        ("/api/v1/detokenize", json!({"token_ids": [640]})),
        ("/api/v1/detokenize", json!({"token_ids": {"a": 1}})),
    ] {
        let (status, error) = server.post(path, &body).await;
        assert_eq!((status, &error["type"]), (400, &json!("error")), "{path} {body}: {error}");
    }
    let (status, error) = server.get("/api/v1/generate").await;
    assert_eq!((status, &error["error_code"]), (405, &json!("METHOD_NOT_ALLOWED")));
    let (status, error) = server.get(PATH).await;
    assert_eq!((status, &error["type"]), (400, &json!("error")), "not a handshake");
}

#[tokio::test]
async fn a_server_without_attention_says_so() {
    let server = Server::start(&["--attention", "off"]);
    let body = json!({"input_ids": [40], "max_new_tokens": 1});
    let early = loop {
        match server.request(Method::POST, "/api/v1/generate").json(&body).send().await {
            Ok(response) => break response,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    let status = early.status();
    let error: Value = early.json().await.unwrap();
    assert!(status == 200 || (status == 503 && error["error_code"] == "NO_MODEL"), "while it starts: {status} {error}");
    server.wait_ready().await;
    let (status, error) = server.post("/api/v1/generate", &json!({"input_ids": [1], "return_attention": true})).await;
    assert_eq!((status, &error["error_code"]), (400, &json!("ATTENTION_UNAVAILABLE")), "{error}");
    assert_eq!(server.get("/api/v1/model/info").await.1["attention_available"], false);
    let body = json!({"input_ids": [40, 41], "max_new_tokens": 2, "ignore_eos": true});
    assert_eq!(server.answer("/api/v1/generate", &body).await["generated_tokens"].as_array().unwrap().len(), 2);
}

/// The examples, as a newcomer runs them.
#[tokio::test]
async fn the_examples_run() {
    let server = server().await;
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/examples");
    let python = Command::new("python3").arg(format!("{root}/attention.py")).arg(&server.base).output().unwrap();
    let said = String::from_utf8_lossy(&python.stdout);
    assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
    assert!(said.contains("looked most at") && said.contains("finish_reason: "), "{said}");
    let Ok(node) = Command::new("node")
        .args(["--experimental-websocket", &format!("{root}/attention.mjs"), &server.base])
        .output()
    else {
        eprintln!("node is not installed: the JavaScript example is not run");
        return;
    };
    let said = String::from_utf8_lossy(&node.stdout);
    assert!(node.status.success(), "{}", String::from_utf8_lossy(&node.stderr));
    assert!(said.contains("looked most at") && said.contains("finish_reason: "), "{said}");
}
