//! Tests of the routes about the model and its tokens.

use super::{HEADS, LAYERS};
use crate::architectures::small_model_with_vocabulary;
use crate::exact::gguf::Writer;
use crate::harness::{Server, folder, message_of, server};
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
async fn model_info_loads_its_model() {
    let models = folder();
    let hybrid = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/memories/hybrid.gguf");
    std::fs::copy(hybrid, models.join("hybrid.gguf")).unwrap();
    let server = Server::start(&["--models-dir", models.to_str().unwrap(), "--models-max", "2"]);
    server.wait_ready().await;
    let (status, info) = server.get("/api/v1/model/info?model=hybrid").await;
    assert_eq!((status, &info["model_name"]), (200, &json!("hybrid")), "{info}");
    // The first layer is recurrent and has no heads of keys and values.
    assert_eq!((&info["num_attention_heads"], &info["num_key_value_heads"]), (&json!(2), &json!(1)), "{info}");
    // The file does not state the type of its weights.
    assert_eq!(info["torch_dtype"], "all F32");
    let server = Server::start(&["--models-dir", models.to_str().unwrap(), "--no-models-autoload"]);
    server.wait_ready().await;
    let (status, error) = server.get("/api/v1/model/info?model=hybrid").await;
    assert_eq!((status, &error["error_code"]), (400, &json!("NO_MODEL")), "{error}");
}

#[tokio::test]
async fn invalid_query_of_model_info_has_the_format_of_the_api() {
    let (status, error) = server().await.get("/api/v1/model/info?modle=tiny").await;
    assert_eq!((status, &error["type"], &error["error_code"]), (400, &json!("error"), &json!("INVALID_REQUEST")));
    assert_eq!(error["field"], "modle");
    assert!(message_of(&error).contains("`modle`"), "{error}");
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

#[tokio::test]
async fn nul_is_text_of_its_token() {
    let server = server().await;
    let text = "a\0b";
    let answer = server.answer("/api/v1/tokenize", &json!({"text": text})).await;
    let texts = answer["tokens"].as_array().unwrap().iter().map(|token| token["text"].as_str().unwrap());
    assert_eq!(texts.collect::<String>(), text);
    let back = server.answer("/api/v1/detokenize", &json!({"token_ids": answer["token_ids"]})).await;
    assert_eq!(back, json!({"text": text}));
    // PostgreSQL cannot store NUL characters, so they are replaced in the recording.
    let body = json!({"input_ids": answer["token_ids"], "max_new_tokens": 1, "request_id": "nul"});
    server.answer("/api/v1/generate", &body).await;
    let run = server.finished("nul").await;
    let texts = run["events"][0]["details"]["prompt"]["texts"].as_array().unwrap();
    assert_eq!(texts.iter().map(|text| text.as_str().unwrap()).collect::<String>(), "a\u{fffd}b");
}

/// Writes a `SentencePiece` tokenizer of letters and bytes. Returns its number of tokens.
fn write_sentence_piece(writer: &mut Writer) -> usize {
    const UNKNOWN: i32 = 2;
    const CONTROL: i32 = 3;
    const NORMAL: i32 = 1;
    const BYTE: i32 = 6;
    let mut tokens = vec![("<unk>".to_owned(), UNKNOWN), ("<s>".to_owned(), CONTROL), ("</s>".to_owned(), CONTROL)];
    tokens.extend((0..=u8::MAX).map(|byte| (format!("<0x{byte:02X}>"), BYTE)));
    tokens.extend(('a'..='z').chain(['▁']).map(|letter| (letter.to_string(), NORMAL)));
    let texts: Vec<String> = tokens.iter().map(|(text, _)| text.clone()).collect();
    writer.string("tokenizer.ggml.model", "llama");
    writer.strings("tokenizer.ggml.tokens", &texts);
    writer.values("tokenizer.ggml.scores", "f32", texts.len(), &vec![0; texts.len() * size_of::<f32>()]);
    writer.numbers("tokenizer.ggml.token_type", tokens.iter().map(|(_, kind)| *kind));
    texts.len()
}

#[tokio::test]
async fn texts_have_no_space_that_the_tokenizer_added() {
    let path = folder().join("sentence-piece.gguf");
    std::fs::write(&path, small_model_with_vocabulary(write_sentence_piece)).unwrap();
    let server = Server::start(&["--model", path.to_str().unwrap(), "-c", "128", "-np", "1"]);
    server.wait_ready().await;
    // The file has no base frequency.
    assert_eq!(server.get("/api/v1/model/info").await.1["rope_theta"], 10_000.0);
    for text in ["fox and owl", " fox"] {
        let tokens = server.answer("/api/v1/tokenize", &json!({"text": text})).await["token_ids"].clone();
        let back = server.answer("/api/v1/detokenize", &json!({"token_ids": tokens})).await;
        assert_eq!(back["text"], text, "{tokens}");
        // llama-server joins the texts of the tokens.
        let joined = server.answer("/detokenize", &json!({"tokens": tokens})).await;
        assert_eq!(joined["content"], format!(" {text}"));
        let rest = &tokens.as_array().unwrap()[1..];
        let back = server.answer("/api/v1/detokenize", &json!({"token_ids": rest})).await;
        assert_eq!(back["text"], text.strip_prefix(' ').unwrap_or(text), "{rest:?}");
    }
    // Texts that mods insert follow other text.
    let mods = json!([
        {"name": "replace-phrase", "config": {"replace": {"fox": "an owl"}}},
        {"name": "force-prefix", "config": {"text": "the fox sat"}},
    ]);
    let body = json!({"prompt": "a", "max_tokens": 14, "mods": mods});
    let answer = server.answer("/v1/completions", &body).await;
    assert_eq!(answer["choices"][0]["text"], "the an owl sat", "{answer}");
}
