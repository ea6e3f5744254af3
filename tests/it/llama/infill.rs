//! `/infill` and `suffix`, on a model with infill tokens and one without.

use crate::harness::{ErrorTable, Server, folder, model, server};
use serde_json::{Value, json};
use std::path::PathBuf;

const PREFIX: u32 = 3;
const SUFFIX: u32 = 4;
const MIDDLE: u32 = 5;

/// Writes the tiny model with three of its tokens as infill tokens; returns the path.
fn infill_model() -> PathBuf {
    /// Magic, version, number of tensors, number of entries.
    const HEADER: usize = 24;
    let bytes = std::fs::read(model()).unwrap();
    let mut entries = Vec::new();
    let mut entry = |key: &str, kind: u32, value: &[u8]| {
        entries.extend((key.len() as u64).to_le_bytes());
        entries.extend(key.as_bytes());
        entries.extend(kind.to_le_bytes());
        entries.extend(value);
    };
    for (name, token) in [("pre", PREFIX), ("suf", SUFFIX), ("mid", MIDDLE)] {
        entry(&format!("tokenizer.ggml.fim_{name}_token_id"), 4, &token.to_le_bytes());
    }
    // The size of the entries is a multiple of 32 bytes, so the tensors remain aligned.
    entry("pad.ab", 0, &[0]);
    assert_eq!(entries.len() % 32, 0);
    let count = u64::from_le_bytes(bytes[16..HEADER].try_into().unwrap()) + 4;
    let patched = [&bytes[..16], &count.to_le_bytes(), &entries, &bytes[HEADER..]].concat();
    let path = folder().join("infill.gguf");
    std::fs::write(&path, patched).unwrap();
    path
}

async fn tokens(server: &Server, text: &str) -> Vec<Value> {
    let answer = server.answer("/tokenize", &json!({"content": text, "parse_special": false})).await;
    answer["tokens"].as_array().unwrap().clone()
}

#[tokio::test]
async fn infill_generates_text_between_two_texts() {
    let server = Server::start(&["--model", infill_model().to_str().unwrap(), "-c", "512", "-np", "1"]);
    server.wait_ready().await;
    let (before, after) = ("def main():\n", "\n\nmain()");
    let body = json!({"input_prefix": before, "input_suffix": after, "prompt": "    p", "n_predict": 4,
                      "temperature": 0, "ignore_eos": true});
    let answer = server.answer("/infill", &body).await;
    let (prefix, line) = (tokens(&server, before).await, tokens(&server, "    p").await);
    let suffix = [vec![json!(SUFFIX)], tokens(&server, after).await].concat();
    let infill_tokens =
        |prefix: &[Vec<Value>]| [vec![json!(PREFIX)], prefix.concat(), suffix.clone(), vec![json!(MIDDLE)]].concat();
    let prompt = infill_tokens(&[prefix.clone(), line]);
    let prompt_without_line = infill_tokens(&[prefix]);
    let plain = json!({"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": true});
    assert_eq!(answer["content"], server.answer("/completion", &plain).await["content"]);
    assert_eq!(answer["tokens_evaluated"], prompt.len());

    let suffix = json!({"prompt": before, "suffix": after, "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    let completed = server.answer("/v1/completions", &suffix).await;
    assert_eq!(completed["usage"]["prompt_tokens"], prompt_without_line.len());

    let extra = json!([{"filename": "a.py", "text": "x = 1\n"}]);
    let longer = json!({"input_prefix": before, "input_suffix": after, "input_extra": extra, "n_predict": 1});
    let longer = server.answer("/infill", &longer).await;
    assert!(longer["prompt"].as_str().unwrap().contains("x = 1"), "{longer}");
    let long = "word ".repeat(3000);
    let truncated = json!({"input_prefix": long, "input_suffix": long, "n_predict": 4, "temperature": 0});
    let truncated = server.answer("/infill", &truncated).await;
    assert!(truncated["tokens_evaluated"].as_u64().unwrap() < 512, "text far from the gap must be omitted");
    // Half of the context is the most that is reserved for the answer.
    let reserved = json!({"input_prefix": long, "input_suffix": long, "max_tokens": 400, "ignore_eos": true});
    let reserved = server.answer("/infill", &reserved).await;
    assert!(reserved["tokens_predicted"].as_u64().unwrap() >= 256, "{reserved}");

    let mut errors = ErrorTable::default();
    for body in [
        json!({"input_suffix": "a"}),
        json!({"input_prefix": "a"}),
        json!({"input_prefix": "a", "input_suffix": 5}),
        json!({"input_prefix": "a", "input_suffix": "b", "input_extra": [5]}),
    ] {
        errors.add(&body, &server.post("/infill", &body).await);
    }
    insta::assert_snapshot!("infill_errors", errors);
}

#[tokio::test]
async fn spm_infill_flag_puts_suffix_before_prefix() {
    let server = Server::start(&["--model", infill_model().to_str().unwrap(), "-c", "512", "-np", "1", "--spm-infill"]);
    server.wait_ready().await;
    let body = json!({"input_prefix": "def main():", "input_suffix": "main()", "prompt": "p", "n_predict": 4, "temperature": 0});
    let answer = server.answer("/infill", &body).await;
    let (before, line, after) =
        (tokens(&server, "def main():").await, tokens(&server, "p").await, tokens(&server, "main()").await);
    let prompt = [vec![json!(SUFFIX)], after, vec![json!(PREFIX)], before, line, vec![json!(MIDDLE)]].concat();
    let plain = json!({"prompt": prompt, "n_predict": 4, "temperature": 0});
    assert_eq!(answer["content"], server.answer("/completion", &plain).await["content"]);
    assert_eq!(answer["tokens_evaluated"], prompt.len());
    let suffix = json!({"prompt": "def main():p", "suffix": "main()", "max_tokens": 4, "temperature": 0});
    let with_suffix = server.answer("/v1/completions", &suffix).await;
    let (before, after) = (tokens(&server, "def main():p").await, tokens(&server, "main()").await);
    let prompt = [vec![json!(SUFFIX)], after, vec![json!(PREFIX)], before, vec![json!(MIDDLE)]].concat();
    let plain = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0});
    assert_eq!(with_suffix["choices"][0]["text"], server.answer("/v1/completions", &plain).await["choices"][0]["text"]);
    let long = json!({"prompt": "word ".repeat(3000), "suffix": "main()", "max_tokens": 4, "echo": true});
    let shortened = server.answer("/v1/completions", &long).await;
    assert!(shortened["usage"]["prompt_tokens"].as_u64().unwrap() < 512, "{shortened}");
    let echoed = shortened["choices"][0]["text"].as_str().unwrap();
    assert!(echoed.contains("word word") && echoed.len() < 5000, "{shortened}");
    // A prompt that fits is not shortened for a long answer.
    let words = 300 * 100 / tokens(&server, &"word ".repeat(100)).await.len();
    let text = "word ".repeat(words);
    let fitting = json!({"prompt": text, "suffix": "main()", "max_tokens": 400, "echo": true});
    let fitting = server.answer("/v1/completions", &fitting).await;
    let expected = tokens(&server, &text).await.len() + tokens(&server, "main()").await.len() + 3;
    assert_eq!(fitting["usage"]["prompt_tokens"], expected, "{fitting}");
    assert!(fitting["choices"][0]["text"].as_str().unwrap().starts_with(&text), "{fitting}");
}

#[tokio::test]
async fn infill_without_infill_tokens_is_rejected() {
    let body = json!({"input_prefix": "def main():\n", "input_suffix": "\n\nmain()", "n_predict": 4});
    let (status, answer) = server().await.post("/infill", &body).await;
    let error = &answer["error"];
    assert_eq!((status, &error["type"], &error["code"]), (501, &json!("not_supported_error"), &json!(501)));
    assert_eq!(
        error["message"],
        "the model was not trained for infilling: its vocabulary has no tokens for prefix, suffix and middle"
    );
}
