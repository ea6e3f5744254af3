//! Invalid requests and ignored fields of OpenAI's API.

use super::{CHAT, chat};
use crate::harness::{ErrorTable, Server, server};
use serde_json::{Value, json};

#[tokio::test]
async fn invalid_field_error_names_the_field() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for (fields, param) in [
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"min_p": -0.1}), "min_p"),
        (json!({"top_k": 1.5}), "top_k"),
        (json!({"max_tokens": -2}), "max_tokens"),
        (json!({"max_tokens": "many"}), "max_tokens"),
        (json!({"seed": "lucky"}), "seed"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stop": 5}), "stop"),
        (json!({"stop": ["a", 5]}), "stop"),
        (json!({"n": 99}), "n"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"logit_bias": {"999999": 1}}), "logit_bias"),
        (json!({"logit_bias": vec![json!([1, 1]); 40_000]}), "logit_bias"),
        (json!({"banned_tokens": vec![1; 40_000]}), "banned_tokens"),
        (json!({"stop_tokens": vec![1; 40_000]}), "stop_tokens"),
        (json!({"banned_tokens": [999_999]}), "banned_tokens"),
        (json!({"stop_tokens": "a"}), "stop_tokens"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 1001}), "top_logprobs"),
        (json!({"mods": "force-prefix"}), "mods"),
        (json!({"mods": [{"config": {}}]}), "mods"),
        (json!({"record": "sometimes"}), "record"),
        (json!({"request_id": ""}), "request_id"),
        (json!({"attention": 1}), "attention"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": null}), "messages"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0].image_url",
        ),
        (json!({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}), "messages[0].content"),
        (json!({"response_format": {"type": "xml"}}), "response_format"),
        (json!({"tool_choice": "required"}), "tool_choice"),
    ] {
        let answer = server.post(CHAT, &chat(fields.clone())).await;
        let error = &answer.1["error"];
        assert_eq!(
            (error["param"].as_str(), &error["type"]),
            (Some(param), &json!("invalid_request_error")),
            "{error}"
        );
        errors.add(fields, &answer);
    }
    insta::assert_snapshot!("chat_errors", errors);
}

#[tokio::test]
async fn unknown_and_null_fields_are_ignored() {
    let body =
        chat(json!({"max_tokens": 1, "frobnicate": [1], "stop": null, "temperature": null, "n": 1, "user": "u"}));
    server().await.answer(CHAT, &body).await;
}

#[tokio::test]
async fn body_that_is_not_json_is_rejected() {
    let server = server().await;
    for body in ["", "{", "[]", "\"text\"", "{\"messages\": [}"] {
        let response = server.request(reqwest::Method::POST, CHAT).body(body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 400, "{body}");
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["type"], "invalid_request_error", "{body}");
    }
    let (status, answer) = server.get(CHAT).await;
    assert_eq!((status, answer["error"]["type"].as_str()), (405, Some("invalid_request_error")));
    assert_eq!(server.get("/v1/nowhere").await.0, 404);
}

#[tokio::test]
async fn too_long_and_empty_prompts_are_rejected() {
    let body = json!({"prompt": "bread ".repeat(6000), "max_tokens": 1});
    let (status, answer) = server().await.post("/v1/completions", &body).await;
    assert_eq!((status, answer["error"]["code"].as_str()), (400, Some("context_length_exceeded")), "{answer}");
    assert_eq!(answer["error"]["type"], "exceed_context_size_error", "the error has the type of llama-server");
    let (status, _) = server().await.post("/v1/completions", &json!({"prompt": [], "max_tokens": 1})).await;
    assert_eq!(status, 400);
}

#[tokio::test]
async fn strict_model_names_reject_unknown_models_and_list_known_ones() {
    let server = Server::start(&["--strict-model-names"]);
    server.wait_ready().await;
    for name in ["gpt-4", "tiny2", "gpt-4/log-top"] {
        let (status, answer) = server.post(CHAT, &chat(json!({"model": name}))).await;
        let error = &answer["error"];
        assert_eq!(
            (status, error["param"].as_str(), error["code"].as_str()),
            (404, Some("model"), Some("model_not_found"))
        );
        assert_eq!(
            error["message"],
            format!("unknown model '{name}'; known models: tiny; without \"model\" a request uses tiny")
        );
    }
    for name in ["tiny", "tiny.gguf", "publisher/tiny", ""] {
        let answer = server.answer(CHAT, &chat(json!({"model": name, "max_tokens": 1}))).await;
        assert_eq!(answer["model"], "tiny");
    }
}
