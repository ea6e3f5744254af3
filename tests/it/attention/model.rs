//! Tests of the routes about the model and its tokens.

use super::{HEADS, LAYERS};
use crate::harness::server;
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn model_info_uses_transformers_names() {
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
        ("attention_layer_ids", json!(null)),
        ("attention_sinks", json!(false)),
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
    let (_, other) = server().await.get("/api/v1/model/info?model=nobody").await;
    assert_eq!(other["attention_layer_ids"], info["attention_layer_ids"], "the only model answers for any name");
}

#[tokio::test]
async fn text_round_trips_through_tokens() {
    let server = server().await;
    let text = "<|im_start|>user\nHéllo, 世界! 🦊<|im_end|>";
    // A page sends JSON as text to avoid a preflight.
    let body = json!({"text": text, "add_special_tokens": false}).to_string();
    let request = server.request(Method::POST, "/api/v1/tokenize").header("content-type", "text/plain").body(body);
    let answer: Value = request.send().await.unwrap().json().await.unwrap();
    let tokens = answer["tokens"].as_array().unwrap();
    assert_eq!(tokens[0], json!({"token_id": 1, "text": "<|im_start|>"}));
    assert_eq!(tokens.last().unwrap()["text"], "<|im_end|>");
    assert_eq!(tokens.iter().map(|token| token["text"].as_str().unwrap()).collect::<String>(), text);
    assert!(tokens.iter().any(|token| token["text"] == ""), "the text of a character is assigned to its last token");
    assert_eq!(answer["token_count"], tokens.len());
    let back = server.answer("/api/v1/detokenize", &json!({"token_ids": answer["token_ids"]})).await;
    assert_eq!(back, json!({"text": text}));
    let again = server.answer("/api/v1/tokenize", &json!({"text": text})).await;
    assert_eq!(again, answer);
}
