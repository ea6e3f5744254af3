//! Embeddings in the formats of OpenAI and llama-server.

use super::{classifier, difference, encoders, expected, numbers, rejection};
use crate::harness::{ErrorTable, Server};
use base64::Engine as _;
use serde_json::{Value, json};

const OPENAI: &str = "/v1/embeddings";
const LLAMA_SERVER: &str = "/embeddings";
const TEXT: &str = "I love this product, it works great!";

fn embedding(answer: &Value, index: usize) -> Vec<f64> {
    assert_eq!(answer["data"][index]["index"], index);
    numbers(&answer["data"][index]["embedding"])
}

fn length(vector: &[f64]) -> f64 {
    vector.iter().map(|value| value * value).sum::<f64>().sqrt()
}

#[tokio::test]
async fn embedding_has_openai_format() {
    let answer = encoders().await.answer(OPENAI, &json!({"input": TEXT, "model": "classifier"})).await;
    assert_eq!(answer["object"], "list");
    assert_eq!(answer["model"], "classifier");
    assert_eq!(answer["usage"], json!({"prompt_tokens": 11, "total_tokens": 11}));
    assert_eq!(answer["data"][0]["object"], "embedding");
    assert!((length(&embedding(&answer, 0)) - 1.0).abs() < 1e-5);
}

/// The embedding is the hidden state that the head of the classifier reads.
#[tokio::test]
async fn classifier_embeds_first_token() {
    let server = encoders().await;
    for (text, reference) in expected()["embed"]["cls"].as_object().unwrap() {
        let answer = server.answer(OPENAI, &json!({"input": text})).await;
        let found = embedding(&answer, 0);
        assert!(difference(&found, &numbers(reference)) < 2e-3, "{text}: {}", difference(&found, &numbers(reference)));
    }
}

#[tokio::test]
async fn input_forms_are_equivalent() {
    // Texts of other requests in the same decode would change the rounding.
    let server = classifier().await;
    let plain = embedding(&server.answer(OPENAI, &json!({"input": TEXT})).await, 0);
    let tokens = server.answer("/tokenize", &json!({"content": TEXT, "add_special": true})).await["tokens"].clone();
    for input in [
        json!([TEXT]),
        tokens.clone(),
        json!([tokens]),
        json!({"prompt_string": TEXT}),
        json!([{"prompt_string": TEXT}]),
        json!({"content": [{"type": "text", "text": TEXT}]}),
    ] {
        let answer = server.answer(OPENAI, &json!({"input": input})).await;
        assert!(difference(&embedding(&answer, 0), &plain) < 1e-4, "{input}");
    }
    let llama_answer = server.answer(LLAMA_SERVER, &json!({"content": TEXT})).await;
    assert_eq!(llama_answer[0]["index"], 0);
    assert!(difference(&numbers(&llama_answer[0]["embedding"][0]), &plain) < 1e-4);
    let alias = server.answer("/embedding", &json!({"input": TEXT})).await;
    assert!(difference(&numbers(&alias[0]["embedding"][0]), &plain) < 1e-4);
}

#[tokio::test]
async fn batch_equals_single_texts() {
    let server = encoders().await;
    for model in ["classifier", "modernbert", "tiny"] {
        let texts: Vec<String> =
            (1..20).map(|index| format!("Cup {index} is {}fine.", "very ".repeat(index % 7))).collect();
        let batch = server.answer(OPENAI, &json!({"model": model, "input": texts})).await;
        for (index, text) in texts.iter().enumerate() {
            let alone = server.answer(OPENAI, &json!({"model": model, "input": text})).await;
            let deviation = difference(&embedding(&batch, index), &embedding(&alone, 0));
            assert!(deviation < 2e-3, "{model}, {text}: {deviation}");
        }
    }
}

#[tokio::test]
async fn embedding_has_requested_encoding_and_norm() {
    let server = classifier().await;
    let plain = embedding(&server.answer(OPENAI, &json!({"input": TEXT})).await, 0);
    let answer = server.answer(OPENAI, &json!({"input": TEXT, "encoding_format": "base64"})).await;
    assert_eq!(answer["data"][0]["encoding_format"], "base64");
    let bytes = base64::engine::general_purpose::STANDARD.decode(answer["data"][0]["embedding"].as_str().unwrap());
    let bytes = bytes.unwrap();
    let decoded: Vec<f64> = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect();
    assert!(difference(&decoded, &plain) < 1e-6);

    let raw = embedding(&server.answer(OPENAI, &json!({"input": TEXT, "embd_normalize": -1})).await, 0);
    assert!(length(&raw) > 2.0);
    let scaled: Vec<f64> = raw.iter().map(|value| value / length(&raw)).collect();
    assert!(difference(&scaled, &plain) < 1e-5);
    let taxicab = embedding(&server.answer(OPENAI, &json!({"input": TEXT, "embd_normalize": 1})).await, 0);
    assert!((taxicab.iter().map(|value| value.abs()).sum::<f64>() - 1.0).abs() < 1e-4);

    assert_eq!(server.post(OPENAI, &json!({"input": TEXT, "dimensions": 128})).await.0, 200);
}

/// A chat model embeds and generates concurrently, with the same weights.
#[tokio::test]
async fn chat_model_generates_and_embeds() {
    let server = encoders().await;
    let input: Vec<String> = (0..40).map(|index| format!("text number {index}")).collect();
    let alone = server.answer(OPENAI, &json!({"model": "tiny", "input": input})).await;
    let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40, "seed": 7,
                      "ignore_eos": true});
    let chat_answer = server.answer("/v1/chat/completions", &chat).await;
    let body = json!({"model": "tiny", "input": input});
    let (embedded, concurrent_chat_answer) =
        tokio::join!(server.answer(OPENAI, &body), server.answer("/v1/chat/completions", &chat));
    assert_eq!(
        concurrent_chat_answer["choices"][0]["message"]["content"],
        chat_answer["choices"][0]["message"]["content"]
    );
    for index in 0..input.len() {
        assert!(difference(&embedding(&embedded, index), &embedding(&alone, index)) < 2e-3);
    }
    assert!((length(&embedding(&alone, 0)) - 1.0).abs() < 1e-5);
}

/// The text is longer than a physical batch of 512 tokens, so it is evaluated in parts.
#[tokio::test]
async fn chat_model_embeds_long_texts() {
    let server = encoders().await;
    let long = "The baker sells bread. ".repeat(150);
    let answer = server.answer(OPENAI, &json!({"model": "tiny", "input": long})).await;
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 512, "{}", answer["usage"]);
    assert!((length(&embedding(&answer, 0)) - 1.0).abs() < 1e-5);
}

#[tokio::test]
async fn invalid_body_error_names_field() {
    let server = encoders().await;
    let mut errors = ErrorTable::default();
    let cases: [(Value, &str); 8] = [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": {"content": "a"}}), "input"),
        (json!({"input": true}), "input"),
        (json!({"input": [[1, 99_999_999]]}), "input[0]"),
        (json!({"input": "a", "encoding_format": "int8"}), "encoding_format"),
        (json!({"input": "a", "dimensions": 64}), "dimensions"),
        (json!({"input": "word ".repeat(600)}), "input"),
    ];
    for (body, field) in cases {
        let answer = server.post(OPENAI, &body).await;
        assert_eq!(answer.1["error"]["param"], field, "{}", answer.1);
        errors.add(format!("{OPENAI} {body}"), &answer);
    }
    let image = json!({"input": [{"content": [{"type": "image_url"}]}]});
    errors.add(format!("{OPENAI} {image}"), &server.post(OPENAI, &image).await);
    for body in [json!({"content": 5}), json!({}), json!({"input": [[]]})] {
        let answer = server.post(LLAMA_SERVER, &body).await;
        rejection(&answer, 400);
        errors.add(format!("{LLAMA_SERVER} {body}"), &answer);
    }
    insta::assert_snapshot!("embedding_errors", errors);
}

#[tokio::test]
async fn every_token_has_an_embedding_without_pooling() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/classifier.gguf");
    let server = Server::start(&["--model", path, "--embedding", "--pooling", "none"]);
    server.wait_ready().await;
    let llama_answer = server.answer(LLAMA_SERVER, &json!({"input": [TEXT, "terrible"]})).await;
    assert_eq!(llama_answer[0]["embedding"].as_array().unwrap().len(), 11);
    let rows: Vec<Vec<f64>> = llama_answer[1]["embedding"].as_array().unwrap().iter().map(numbers).collect();
    assert_eq!(rows.len(), 3);
    let mean: Vec<f64> =
        (0..rows[0].len()).map(|column| rows.iter().map(|row| row[column]).sum::<f64>() / 3.0).collect();
    let mean: Vec<f64> = mean.iter().map(|value| value / length(&mean)).collect();
    let reference = numbers(&expected()["embed"]["mean"]["terrible"]);
    assert!(difference(&mean, &reference) < 2e-3, "{}", difference(&mean, &reference));
    let mut errors = ErrorTable::default();
    errors.add(OPENAI, &server.post(OPENAI, &json!({"input": TEXT})).await);
    errors.add("/classify", &server.post("/classify", &json!({"inputs": TEXT})).await);
    insta::assert_snapshot!("errors_without_pooling", errors);
}

/// The requests share decodes.
#[tokio::test]
async fn hidden_states_that_a_model_lacks_do_not_affect_embeddings() {
    let server = classifier().await;
    let texts: Vec<String> = (0..40).map(|index| format!("{index} {TEXT}")).collect();
    let (embeddings, states) = (json!({"input": texts}), json!({"input": texts, "model": "classifier"}));
    for _ in 0..4 {
        let ((status, answer), refused) =
            tokio::join!(server.post(OPENAI, &embeddings), server.post("/api/v1/hidden-states", &states));
        assert_eq!(status, 200, "{answer}");
        let message =
            "hidden states are not available: llama.cpp does not name the outputs of the layers of this model";
        assert_eq!((refused.0, &refused.1["detail"]), (501, &json!(message)));
    }
}
