//! Text to tokens and back; templates without a run.

use crate::harness::{ErrorTable, Server, folder, message_of, server, thunder};
use serde_json::json;

#[tokio::test]
async fn text_round_trips_through_tokens() {
    let server = server().await;
    for text in ["Once upon a time", "Zażółć gęślą jaźń 😀\n\ttab", "", "<|im_start|>"] {
        let tokens = server.answer("/tokenize", &json!({"content": text})).await["tokens"].clone();
        let back = server.answer("/detokenize", &json!({"tokens": tokens})).await;
        assert_eq!(back["content"], text);
        let pieces = server.answer("/tokenize", &json!({"content": text, "with_pieces": true})).await["tokens"].clone();
        let pieces = pieces.as_array().unwrap();
        assert_eq!(pieces.len(), tokens.as_array().unwrap().len());
        let mut bytes: Vec<u8> = Vec::new();
        for piece in pieces {
            match piece["piece"].as_str() {
                Some(text) => bytes.extend(text.bytes()),
                None => {
                    bytes.extend(piece["piece"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8));
                }
            }
        }
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }
    let special = server.answer("/tokenize", &json!({"content": "<|im_start|>"})).await["tokens"].clone();
    let plain = server.answer("/tokenize", &json!({"content": "<|im_start|>", "parse_special": false})).await;
    assert_eq!(special.as_array().unwrap().len(), 1);
    assert!(plain["tokens"].as_array().unwrap().len() > 1);
    let mixed = server.answer("/tokenize", &json!({"content": ["a", 7, "b"]})).await["tokens"].clone();
    assert_eq!(mixed[1], 7);
}

#[tokio::test]
async fn invalid_text_route_errors_name_field() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for (path, body) in [
        ("/detokenize", json!({"tokens": [1, 999_999]})),
        ("/detokenize", json!({"tokens": "a"})),
        ("/tokenize", json!({"content": 5})),
        ("/tokenize", json!({"content": "a", "add_special": 1})),
        ("/apply-template", json!({"messages": 5})),
        ("/apply-template", json!({})),
    ] {
        let answer = server.post(path, &body).await;
        assert_eq!(answer.1["error"]["code"], answer.0);
        errors.add(format!("{path} {body}"), &answer);
    }
    insta::assert_snapshot!("text_errors", errors);
}

#[tokio::test]
async fn template_is_applied_and_its_tokens_are_counted() {
    let server = server().await;
    let chat = json!({"messages": [{"role": "user", "content": "What is five times seven?"}]});
    let prompt = server.answer("/apply-template", &chat).await["prompt"].as_str().unwrap().to_owned();
    assert!(prompt.contains("What is five times seven?") && prompt.ends_with("assistant\n"), "{prompt}");
    let tokens = server.answer("/tokenize", &json!({"content": prompt, "add_special": true})).await["tokens"].clone();
    for path in ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"] {
        let counted = server.answer(path, &chat).await;
        assert_eq!(
            counted,
            json!({"input_tokens": tokens.as_array().unwrap().len(), "object": "response.input_tokens"})
        );
    }
}

#[tokio::test]
async fn tokenizer_routes_accept_vllm_fields() {
    let server = server().await;
    let (_, info) = server.get("/tokenizer_info").await;
    assert!(info["chat_template"].as_str().unwrap().contains("im_start"), "{info}");
    assert!(info["eos_token"].is_string() && info["model_max_length"].as_u64().unwrap() > 0, "{info}");
    let plain = server.answer("/tokenize", &json!({"content": "the old fox"})).await["tokens"].clone();
    let vllm_answer = server.answer("/tokenize", &json!({"prompt": "the old fox", "add_special_tokens": false})).await;
    assert_eq!((&vllm_answer["tokens"], &vllm_answer["count"]), (&plain, &json!(plain.as_array().unwrap().len())));
    assert_eq!(server.answer("/tokenize", &json!({"prompt": ""})).await["count"], 0);
    assert_eq!(server.answer("/detokenize", &json!({"tokens": plain})).await["prompt"], "the old fox");
    let (status, error) = server.post("/tokenize", &json!({"prompt": 5})).await;
    assert_eq!(
        (status, message_of(&error)),
        (400, "`prompt` must be a string, or a list of strings and token ids below 640, got 5")
    );
}

/// Such words would overflow the stack of an ordinary thread.
#[tokio::test]
async fn long_words_of_a_regular_expression_are_tokenized() {
    let server = Server::start(&["--override-kv", "tokenizer.ggml.pre=str:gpt-4o", "-c", "256", "-np", "1"]);
    server.wait_ready().await;
    for text in
        ["a".repeat(100_000), " ".repeat(20_000), format!("{}\nsecond", "=".repeat(300_000)), "é日".repeat(9000)]
    {
        let tokens = server.answer("/tokenize", &json!({"content": text})).await["tokens"].clone();
        let back = server.answer("/detokenize", &json!({"tokens": tokens})).await;
        assert!(back["content"] == text.as_str(), "{} bytes", text.len());
    }
    // A text that is tokenized in parts has the tokens of its lines.
    let line = format!("{}\n", "Once upon a time, ".repeat(500));
    let tokens = async |text: &str| {
        server.answer("/tokenize", &json!({"content": text})).await["tokens"].as_array().unwrap().clone()
    };
    let of_line = tokens(&line).await;
    assert!(tokens(&line.repeat(40)).await == vec![of_line; 40].concat());
}

/// llama.cpp aborts the process if it tokenizes with such a vocabulary.
#[test]
fn vocabulary_without_tokenizer_or_first_token_ends_start() {
    let folder = folder();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures");
    let mut bytes = std::fs::read(format!("{fixtures}/encoders/reranker.gguf")).unwrap();
    let key = b"tokenizer.ggml.bos_token_id";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    bytes[at + key.len() - 1] = b'x';
    let damaged = folder.join("damaged.gguf").display().to_string();
    std::fs::write(&damaged, bytes).unwrap();
    let without = ["--override-kv", "tokenizer.ggml.model=str:none,qwen2.vocab_size=int:640"];
    for (model, flags, expected) in [
        (damaged, &[][..], "lacks [CLS] or [SEP]"),
        (format!("{fixtures}/models/tiny.gguf"), &without[..], "it has no tokenizer"),
    ] {
        let mut command = thunder();
        command.args(["serve", "--listen", "127.0.0.1:0", "--model", &model, "--data-dir"]).arg(&folder).args(flags);
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}
