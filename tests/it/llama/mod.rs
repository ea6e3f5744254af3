//! The routes of llama-server.

mod classify;
mod completion;
mod completions;
mod control;
mod drop_in;
mod embeddings;
mod flags;
mod infill;
mod invalid_requests;
mod lora;
mod monitor;
mod props;
mod reference;
mod rerank;
mod sessions;
mod slots;
mod tensors;
mod text;

use super::harness::Server;
use serde_json::Value;
use std::path::Path;
use std::sync::LazyLock;

/// Returns a server with embeddings and scores. Its default model is the classifier, and it loads every model of the
/// repository by name.
async fn encoders() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| {
        let models = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures");
        let classifier = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/classifier.gguf");
        Server::start(&[
            "--model",
            classifier,
            "--models-dir",
            models,
            "--models-max",
            "16",
            "--reranking",
            "--embedding",
        ])
    });
    // The start blocks, and the thread of a test must not block.
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

/// Starts a server with the classifier, for many inputs at once: inputs that share a decode have other roundings.
async fn classifier() -> Server {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/classifier.gguf");
    let server = Server::start(&["--model", path, "--reranking", "--embedding"]);
    server.wait_ready().await;
    server
}

/// Returns the values that `fixtures/encoders/make.py` computed without llama.cpp.
fn expected() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/encoders/expected.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Returns the largest difference between the elements of two vectors.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Returns the message of an error, which must have the format of llama-server and this status.
fn rejection((status, answer): &(u16, Value), expected: u16) -> String {
    assert_eq!(*status, expected, "{answer}");
    assert_eq!(answer["error"]["code"], expected, "{answer}");
    assert!(answer["error"]["type"].is_string(), "{answer}");
    answer["error"]["message"].as_str().unwrap().to_owned()
}
