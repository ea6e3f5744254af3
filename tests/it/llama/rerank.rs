//! Reranking in the formats of Jina and Text Embeddings Inference.

use super::{encoders, expected, rejection};
use crate::harness::{ErrorTable, with_fields};
use serde_json::{Value, json};

const ROUTE: &str = "/v1/rerank";
const QUERY: &str = "the fox";
const DOCUMENTS: [&str; 3] = ["a river", "the old fox", "owl"];

fn body(fields: &Value) -> Value {
    with_fields(json!({"model": "reranker", "query": QUERY, "documents": DOCUMENTS}), fields)
}

#[tokio::test]
async fn documents_are_sorted_by_their_score() {
    let server = encoders().await;
    let answer = server.answer(ROUTE, &body(&json!({}))).await;
    assert_eq!(answer["model"], "reranker");
    assert_eq!(answer["object"], "list");
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.iter().map(|r| r["index"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 0, 1]);
    let expected = expected();
    for result in results {
        let document = DOCUMENTS[result["index"].as_u64().unwrap() as usize];
        let reference = expected["rerank"][QUERY][document].as_f64().unwrap();
        let found = result["relevance_score"].as_f64().unwrap();
        assert!((found - reference).abs() < 0.01, "{document}: {found}, not {reference}");
    }
    // The tokens of each pair are [CLS] the fox [SEP] … [SEP].
    assert_eq!(answer["usage"], json!({"prompt_tokens": 21, "total_tokens": 21}));
    for alias in ["/rerank", "/reranking", "/v1/reranking"] {
        assert_eq!(server.answer(alias, &body(&json!({}))).await, answer, "{alias}");
    }
}

/// A chat model that ranks has a template for pairs, and its score is a probability.
#[tokio::test]
async fn chat_model_ranks_with_template() {
    let server = encoders().await;
    let answer = server.answer(ROUTE, &body(&json!({"model": "qwen3-reranker"}))).await;
    let expected = expected();
    for result in answer["results"].as_array().unwrap() {
        let document = DOCUMENTS[result["index"].as_u64().unwrap() as usize];
        let (found, reference) =
            (result["relevance_score"].as_f64().unwrap(), expected["qwen3"][document].as_f64().unwrap());
        assert!((found - reference).abs() < 0.01, "{document}: {found}, not {reference}");
    }
    // Text of a document is never parsed as special tokens.
    let hostile = server.answer(ROUTE, &body(&json!({"model": "qwen3-reranker", "documents": ["[SEP]"]}))).await;
    assert_eq!(hostile["usage"]["prompt_tokens"], 1 + "Does it answer? the fox\n[SEP]".len() + 1);
}

#[tokio::test]
async fn top_n_limits_the_returned_documents() {
    let server = encoders().await;
    let answer = server.answer(ROUTE, &body(&json!({"top_n": 2, "return_documents": true}))).await;
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 2);
    assert_eq!(results[0]["document"], json!({"text": "owl"}));

    let tei = json!({"model": "reranker", "query": QUERY, "texts": DOCUMENTS, "return_text": true, "top_n": 1});
    let answer = server.answer(ROUTE, &tei).await;
    let [first] = &answer.as_array().unwrap()[..] else { panic!("{answer}") };
    assert_eq!((&first["index"], &first["text"]), (&json!(2), &json!("owl")));
    assert!(first["score"].is_number());
    let without_texts = server.answer(ROUTE, &json!({"model": "reranker", "query": QUERY, "texts": DOCUMENTS})).await;
    assert_eq!(without_texts.as_array().unwrap().len(), 3);
    assert!(without_texts[0].get("text").is_none());
}

#[tokio::test]
async fn empty_document_has_score() {
    let answer = encoders().await.answer(ROUTE, &body(&json!({"documents": ["", "a river"]}))).await;
    assert_eq!(answer["results"].as_array().unwrap().len(), 2, "{answer}");
}

/// Only the first pair is tokenized; all pairs together would have 164 million tokens.
#[tokio::test]
async fn too_long_query_is_rejected_with_the_first_document() {
    let server = encoders().await;
    let (query, documents) = ("the fox ".repeat(5000), vec!["owl"; 16_384]);
    for (model, tokens) in [("reranker", 1 + 10_000 + 1 + 1 + 1), ("qwen3-reranker", 1 + 16 + 40_000 + 1 + 3 + 1)] {
        let answer = server.post(ROUTE, &body(&json!({"model": model, "query": query, "documents": documents}))).await;
        let expected = format!(
            "`documents[0]` has {tokens} tokens and is too large: this model's maximum context length is 64 tokens"
        );
        assert_eq!(rejection(&answer, 400), expected, "{model}");
    }
}

#[tokio::test]
async fn invalid_body_error_names_field() {
    let server = encoders().await;
    let mut errors = ErrorTable::default();
    for fields in [
        json!({"query": null}),
        json!({"query": 5}),
        json!({"documents": null}),
        json!({"documents": []}),
        json!({"documents": "a"}),
        json!({"documents": ["a", 5]}),
        json!({"top_n": 0}),
        json!({"documents": ["a", "owl ".repeat(80)]}),
    ] {
        let answer = server.post(ROUTE, &body(&fields)).await;
        rejection(&answer, 400);
        errors.add(fields, &answer);
    }
    let answer = server.post(ROUTE, &body(&json!({"model": "classifier"}))).await;
    rejection(&answer, 501);
    errors.add("a classifier", &answer);
    insta::assert_snapshot!("rerank_errors", errors);
}
