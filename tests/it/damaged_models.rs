//! Model files with which llama.cpp aborts its process: the server reports them, and keeps running.

use super::harness::{Server, folder, message_of, model, output_of, text, thunder};
use serde_json::json;
use thunder::model::Model;
use thunder::model::llama::{ImageOptions, ModelOptions};

/// Returns the position after the first occurrence of these bytes.
fn position_after(bytes: &[u8], part: &[u8]) -> usize {
    bytes.windows(part.len()).position(|window| window == part).unwrap() + part.len()
}

/// Returns the file with another value of a metadata key of this type.
fn with_value(mut bytes: Vec<u8>, key: &str, kind: u32, value: [u8; 4]) -> Vec<u8> {
    let at = position_after(&bytes, &[key.as_bytes(), &kind.to_le_bytes()].concat());
    bytes[at..at + 4].copy_from_slice(&value);
    bytes
}

/// Returns a GGUF file with another type of a tensor with this number of dimensions.
fn with_type(mut bytes: Vec<u8>, tensor: &str, dimensions: usize, kind: u32) -> Vec<u8> {
    let at = position_after(&bytes, tensor.as_bytes()) + 4 + 8 * dimensions;
    bytes[at..at + 4].copy_from_slice(&kind.to_le_bytes());
    bytes
}

/// Returns the bundled model with another tokenizer, whose name has as many letters.
fn with_tokenizer(name: [u8; 4]) -> Vec<u8> {
    let mut bytes = std::fs::read(model()).unwrap();
    let at = position_after(&bytes, b"tokenizer.ggml.model") + 12;
    assert_eq!(&bytes[at..at + 4], b"gpt2");
    bytes[at..at + 4].copy_from_slice(&name);
    bytes
}

#[tokio::test]
async fn files_that_crash_llama_cpp_are_reported() {
    let whole = || std::fs::read(model()).unwrap();
    let epsilon = with_value(whole(), "attention.layer_norm_rms_epsilon", 6, (-1e-6_f32).to_le_bytes());
    // Heads of one value, which cannot be rotated.
    let heads = with_value(whole(), "attention.head_count", 4, 64_u32.to_le_bytes());
    let heads = with_value(heads, "attention.head_count_kv", 4, 32_u32.to_le_bytes());
    let files = [
        ("epsilon", epsilon, "must be at least 0"),
        ("heads", heads, "while decoding a text)"),
        ("norm", with_type(whole(), "output_norm.weight", 1, 26), "tensor 'output_norm.weight' must consist of"),
        ("bias", with_type(whole(), "blk.1.attn_q.bias", 1, 26), "tensor 'blk.1.attn_q.bias' must consist of"),
        ("query", with_type(whole(), "blk.1.attn_q.weight", 2, 25), "tensor 'blk.1.attn_q.weight' must consist of"),
        ("tokenizer", with_tokenizer(*b"rwkv"), "which is not in its vocabulary"),
    ];
    let folder = folder();
    for (name, bytes, _) in &files {
        std::fs::write(folder.join(format!("{name}.gguf")), bytes).unwrap();
    }
    let server = Server::start(&["--models-dir", folder.to_str().unwrap()]);
    server.wait_ready().await;
    for (name, _, reason) in &files {
        let (code, error) = server.post("/v1/completions", &json!({"model": name, "prompt": "Hello 12"})).await;
        assert!(code == 503 && message_of(&error).contains(reason), "{name}: {code} {error}");
    }
    let answer = server.answer("/v1/completions", &json!({"prompt": "Hello 12", "max_tokens": 2})).await;
    assert_eq!(answer["usage"]["completion_tokens"], 2, "{answer}");
}

#[tokio::test]
async fn adapters_and_projectors_that_crash_llama_cpp_are_reported() {
    let folder = folder();
    let fixture = |name: &str| std::fs::read(model().with_file_name(name)).unwrap();
    let lora = with_type(fixture("tiny-lora.gguf"), ".lora_a", 2, 26);
    let projector = with_value(fixture("tiny-mmproj.gguf"), "clip.vision.attention.head_count", 4, [0; 4]);
    let wide = with_value(fixture("tiny-mmproj.gguf"), "clip.vision.attention.head_count", 4, 7_u32.to_le_bytes());
    for (name, bytes) in [("lora.gguf", lora), ("projector.gguf", projector), ("wide.gguf", wide)] {
        std::fs::write(folder.join(name), bytes).unwrap();
    }
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let adapters = vec![(path("lora.gguf").into(), 1.0)];
    let images = ImageOptions {
        projector: path("projector.gguf").into(),
        gpu: false,
        threads: 1,
        min_tokens: None,
        max_tokens: None,
    };
    for (options, name, reason) in [
        (ModelOptions { adapters, ..ModelOptions::default() }, "lora.gguf", ".lora_a' must consist of floats"),
        (
            ModelOptions { images: Some(images), ..ModelOptions::default() },
            "projector.gguf",
            "`clip.vision.attention.head_count` must be at least 1, got 0",
        ),
    ] {
        let error = Model::load(&model(), &options, |_| true).err().unwrap().to_string();
        assert!(error.contains(name) && error.contains(reason), "{error}");
    }
    let mut command = thunder();
    command.args(["probe", model().to_str().unwrap(), "--mmproj", &path("wide.gguf")]);
    let output = output_of(command).await;
    assert_eq!(output.status.code(), None, "the probe ends without a crash");
    assert!(text(&output.stderr).contains("thunder probe: loading the projector"), "{}", text(&output.stderr));
}
