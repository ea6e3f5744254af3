//! `/classify` compared with reference values of each family.

use super::drop_in::token_counts;
use super::{classifier, difference, encoders, expected, rejection};
use crate::harness::{ErrorTable, Server, message_of, server};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const ROUTE: &str = "/v1/classify";
/// Tolerance for 16-bit weights and llama.cpp's tanh approximation of GELU.
const TOLERANCE: f64 = 0.01;

/// Returns the scores by label.
fn by_label(predictions: &Value) -> BTreeMap<String, f64> {
    let predictions = predictions.as_array().unwrap();
    let pair = |p: &Value| (p["label"].as_str().unwrap().to_owned(), p["score"].as_f64().unwrap());
    predictions.iter().map(pair).collect()
}

fn logits(predictions: &Value, labels: &[&str]) -> Vec<f64> {
    let by_label = by_label(predictions);
    assert_eq!(by_label.len(), labels.len());
    labels.iter().map(|&label| by_label[label]).collect()
}

#[tokio::test]
async fn text_gets_logit_of_every_label() {
    let server = encoders().await;
    let text = "I love this product, it works great!";
    let answer = server.answer(ROUTE, &json!({"inputs": text})).await;
    assert_eq!(answer["model"], "classifier");
    assert_eq!(answer["object"], "list");
    // The tokens are [CLS], nine words and punctuation marks, and [SEP].
    assert_eq!(answer["usage"], json!({"prompt_tokens": 11, "total_tokens": 11}));
    let order: Vec<&str> =
        answer["predictions"].as_array().unwrap().iter().map(|p| p["label"].as_str().unwrap()).collect();
    assert_eq!(order[0], "POSITIVE");
    let scores: Vec<f64> =
        answer["predictions"].as_array().unwrap().iter().map(|p| p["score"].as_f64().unwrap()).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
    // Inputs of other tests may be in the same batch, which changes the rounding.
    let again = server.answer("/classify", &json!({"inputs": text})).await;
    let labels = ["POSITIVE", "NEUTRAL", "NEGATIVE"];
    for (a, b) in logits(&answer["predictions"], &labels).iter().zip(logits(&again["predictions"], &labels)) {
        assert!((a - b).abs() < 1e-3, "{answer} {again}");
    }
}

#[tokio::test]
async fn logits_match_reference_of_family() {
    let server = encoders().await;
    let expected = expected();
    // Model, file and labels of each family with a separate head.
    let families: [(&str, &str, &[&str]); 4] = [
        ("classifier", "../models/classifier.gguf", &["NEGATIVE", "NEUTRAL", "POSITIVE"]),
        ("distilbert", "distilbert.gguf", &["NEGATIVE", "POSITIVE"]),
        ("modernbert", "modernbert.gguf", &["red", "green", "blue"]),
        ("qwen3-reranker", "qwen3-reranker.gguf", &["yes", "no"]),
    ];
    for (model, file, labels) in families {
        for (text, reference) in expected["classify"][file].as_object().unwrap() {
            let answer = server.answer(ROUTE, &json!({"model": model, "inputs": text})).await;
            let (found, reference) = (logits(&answer["predictions"], labels), super::numbers(reference));
            assert!(difference(&found, &reference) < TOLERANCE, "{model}, {text}: {found:?}, not {reference:?}");
        }
    }
}

#[tokio::test]
async fn batch_equals_single_texts() {
    let server = encoders().await;
    let texts = ["I love this product!", "This is terrible, worst purchase ever.", "It is okay, nothing special."];
    let labels = ["NEGATIVE", "NEUTRAL", "POSITIVE"];
    let batch = server.answer(ROUTE, &json!({"inputs": texts})).await;
    let reversed: Vec<&str> = texts.iter().rev().copied().collect();
    let reversed = server.answer(ROUTE, &json!({"inputs": reversed})).await;
    let mut tokens = 0;
    for (index, text) in texts.iter().enumerate() {
        let single = server.answer(ROUTE, &json!({"inputs": text})).await;
        tokens += single["usage"]["prompt_tokens"].as_u64().unwrap();
        let alone = logits(&single["predictions"], &labels);
        for in_batch in [&batch["predictions"][index], &reversed["predictions"][2 - index]] {
            assert!(difference(&logits(in_batch, &labels), &alone) < 1e-3, "{text}");
        }
    }
    assert_eq!(batch["usage"]["total_tokens"], tokens);
    let one = server.answer(ROUTE, &json!({"inputs": [texts[0]]})).await;
    assert!(one["predictions"][0].is_array(), "the answer to a list must be a list");
}

#[tokio::test]
async fn concurrent_requests_do_not_mix() {
    let server = encoders().await;
    let labels = ["NEGATIVE", "NEUTRAL", "POSITIVE"];
    let texts: Vec<String> =
        (0..24).map(|index| format!("I love these {index} cups, {}", "so very much ".repeat(index))).collect();
    let mut alone = Vec::new();
    for text in &texts {
        alone.push(logits(&server.answer(ROUTE, &json!({"inputs": text})).await["predictions"], &labels));
    }
    let together = texts.iter().map(|text| async move { server.answer(ROUTE, &json!({"inputs": [text, text]})).await });
    for (answer, alone) in futures::future::join_all(together).await.iter().zip(&alone) {
        for predictions in answer["predictions"].as_array().unwrap() {
            assert!(difference(&logits(predictions, &labels), alone) < 1e-3);
        }
    }
}

#[tokio::test]
async fn disconnect_does_not_delay_other_clients() {
    let server = encoders().await;
    let many: Vec<String> = (0..3000).map(|index| format!("{index} {}", "it is great, ".repeat(100))).collect();
    let body = json!({"inputs": many});
    let one = server.answer(ROUTE, &json!({"inputs": many[0]})).await;
    let all_tokens = one["usage"]["prompt_tokens"].as_f64().unwrap() * many.len() as f64;
    let (before, _, _) = token_counts(server).await;
    let abandoned =
        server.request(reqwest::Method::POST, ROUTE).json(&body).timeout(std::time::Duration::from_millis(1500));
    assert!(abandoned.send().await.is_err(), "3000 long texts take longer than the client waits");
    server.answer(ROUTE, &json!({"inputs": "short"})).await;
    let encoded = token_counts(server).await.0 - before;
    assert!(encoded > 0.0 && encoded < all_tokens / 2.0, "{encoded} of {all_tokens} tokens precede the next answer");
}

#[tokio::test]
async fn small_request_is_admitted_during_a_large_one() {
    let server = &classifier().await;
    let many: Vec<String> = (0..5000).map(|index| format!("{index} {}", "it is great, ".repeat(20))).collect();
    let (before, _, _) = token_counts(server).await;
    let small = async {
        while token_counts(server).await.0 < before + 20_000.0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        server.post(ROUTE, &json!({"inputs": "short"})).await
    };
    let body = json!({"inputs": many});
    tokio::select! {
        (status, answer) = small => assert_eq!(status, 200, "{answer}"),
        (status, answer) = server.post(ROUTE, &body) => assert_eq!(status, 200, "{answer}"),
    }
}

#[tokio::test]
async fn invalid_body_error_names_field() {
    let server = encoders().await;
    let cases: [(Value, &str); 7] = [
        (json!({}), "`inputs` is missing; send a string or a list of strings"),
        (json!({"inputs": 5}), "`inputs` must be a string or a list of strings, got 5"),
        (json!({"inputs": ""}), "`inputs` must not be empty"),
        (json!({"inputs": []}), "`inputs` must not be empty"),
        (json!({"inputs": ["a", 3]}), "`inputs[1]` must be a string, got 3"),
        (json!({"inputs": ["a", ""]}), "`inputs[1]` must not be empty"),
        (json!(["a"]), "the body must be a JSON object, got [\"a\"]"),
    ];
    for (body, message) in cases {
        assert_eq!(rejection(&server.post(ROUTE, &body).await, 400), message, "{body}");
    }
    let answer = server.post(ROUTE, &json!({"inputs": ["a", "it ".repeat(600)]})).await;
    rejection(&answer, 400);
    assert_eq!(answer.1["error"]["type"], "exceed_context_size_error");
    assert_eq!(answer.1["error"]["n_ctx"], 512);
    let mut errors = ErrorTable::default();
    errors.add("a long text", &answer);
    errors.add("an unknown model", &server.post(ROUTE, &json!({"model": "nobody", "inputs": "a"})).await);
    insta::assert_snapshot!("classification_errors", errors);
}

#[tokio::test]
async fn unsupported_classifier_head_is_rejected() {
    let server = encoders().await;
    let mut errors = ErrorTable::default();
    for model in ["pooler-lost", "reranker", "tiny"] {
        let answer = server.post(ROUTE, &json!({"model": model, "inputs": "a river"})).await;
        rejection(&answer, 501);
        errors.add(model, &answer);
    }
    insta::assert_snapshot!("models_without_classification", errors);
}

#[tokio::test]
async fn classification_without_its_flag_is_rejected() {
    let message = rejection(&server().await.post(ROUTE, &json!({"inputs": "a"})).await, 501);
    assert_eq!(message, "scores are not enabled; start the server with --reranking");
}

/// With `--classifier-head direct`, the hidden state is projected without a dense layer.
#[tokio::test]
async fn encoder_serves_embeddings_and_scores_without_flags() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/encoders/pooler-lost.gguf");
    let server = Server::start(&["--model", path, "--classifier-head", "direct"]);
    server.wait_ready().await;
    for (text, reference) in expected()["classify"]["pooler-lost.gguf"].as_object().unwrap() {
        let answer = server.answer(ROUTE, &json!({"inputs": text})).await;
        let found = logits(&answer["predictions"], &["one", "two", "three"]);
        assert!(difference(&found, &super::numbers(reference)) < TOLERANCE, "{text}: {found:?}");
    }
    let embedding = server.answer("/v1/embeddings", &json!({"input": "a river"})).await;
    assert_eq!(embedding["data"][0]["embedding"].as_array().unwrap().len(), 32);
    server.wait_for_log("scores enabled").await;

    let (status, answer) =
        server.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": "Hello"}]})).await;
    assert_eq!(
        (status, message_of(&answer)),
        (501, "the model 'pooler-lost' generates no text: it is an encoder, for embeddings and scores")
    );
    let (_, models) = server.get("/v1/models").await;
    assert_eq!(models["data"][0]["capabilities"], json!(["embedding", "classify"]));
    let page = server.request(reqwest::Method::GET, "/playground").send().await.unwrap();
    assert_eq!(page.status(), 200);
    assert!(page.text().await.unwrap().contains("cannot generate text"));
}
