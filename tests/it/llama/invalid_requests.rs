//! `/completion`: ignored and invalid fields, invalid bodies, and runs that fail.

use super::completion::{PATH, body};
use crate::harness::{ErrorTable, server};
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn numbers_are_clamped_and_unknown_fields_ignored() {
    let server = server().await;
    let request =
        body(json!({"temperature": -1, "top_p": 7, "min_p": -2, "frobnicate": [1], "stop": null, "seed": -1}));
    let answer = server.answer(PATH, &request).await;
    let settings = &answer["generation_settings"];
    assert_eq!(
        (&settings["temperature"], &settings["top_p"], &settings["min_p"]),
        (&json!(0.0), &json!(1.0), &json!(0.0))
    );
}

#[tokio::test]
async fn fields_of_llama_server_are_accepted() {
    let server = server().await;
    // Clients send an empty prompt to warm up the model.
    for prompt in [json!(""), json!([[]])] {
        let answer = server.answer(PATH, &body(json!({"prompt": prompt, "n_predict": 1}))).await;
        assert_eq!(answer["tokens_evaluated"], 1, "{answer}");
    }
    // Clients name a stage that llama.cpp has removed, and disable limits with any negative number.
    let request = json!({"samplers": ["top_k", "tfs_z", "temperature"], "top_k": -3, "n_probs": -1, "n_predict": 2});
    let settings = server.answer(PATH, &body(request)).await["generation_settings"].clone();
    assert_eq!(settings["samplers"], json!(["top_k", "temperature"]));
    assert_eq!((&settings["top_k"], &settings["speculative.types"]), (&json!(0), &json!("none")));
    // Editor plugins send this list with every completion.
    for samplers in [json!(["top_k", "top_p", "infill"]), json!("kpi")] {
        let request = json!({"samplers": samplers, "ignore_eos": true, "n_predict": 4});
        let answer = server.answer(PATH, &body(request)).await;
        assert_eq!(answer["tokens_predicted"], 4);
        assert_eq!(answer["generation_settings"]["samplers"], json!(["top_k", "top_p", "infill"]));
    }
}

#[tokio::test]
async fn invalid_field_error_names_field_and_frees_slot() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for fields in [
        json!({"prompt": null}),
        json!({"prompt": []}),
        json!({"prompt": 5}),
        json!({"prompt": [1, 999_999]}),
        json!({"prompt": ["a", {"x": 1}]}),
        json!({"prompt": {"prompt_string": 5}}),
        json!({"prompt": {"prompt_string": "a", "multimodal_data": "x"}}),
        json!({"n_predict": -2}),
        json!({"n_predict": "many"}),
        json!({"n_cmpl": 0}),
        json!({"n_cmpl": 5}),
        json!({"temperature": "hot"}),
        json!({"repeat_last_n": -7}),
        json!({"stop": 5}),
        json!({"n_probs": 1.5}),
        json!({"samplers": ["nope"]}),
        json!({"stream": "yes"}),
        json!({"logit_bias": [[999_999, 1]]}),
        json!({"response_fields": [1]}),
        json!({"mods": ["nope"]}),
        json!({"prompt": ["a", "b"], "request_id": "x"}),
        json!({"sse_ping_interval": "often"}),
        json!({"t_max_predict_ms": "long"}),
        json!({"lora": [{"id": 0, "scale": 1}]}),
    ] {
        let mut request = body(fields.clone());
        let complete = server.post(PATH, &request).await;
        let error = &complete.1["error"];
        assert_eq!((&error["code"], &error["type"]), (&json!(400), &json!("invalid_request_error")), "{fields}");
        if fields.get("stream").is_none() {
            request["stream"] = true.into();
            assert_eq!(server.post(PATH, &request).await, complete, "{fields}");
        }
        errors.add(fields, &complete);
    }
    insta::assert_snapshot!("completion_errors", errors);
    let all = server.answer(PATH, &body(json!({"prompt": ["a", "b", "c", "d"]}))).await;
    assert_eq!(all.as_array().unwrap().len(), 4, "a slot is still in use");
}

#[tokio::test]
async fn body_that_is_not_json_is_rejected() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for body in ["", "{", "{\"prompt\": [}", "[]", "\"text\""] {
        let mut first = None;
        for path in [PATH, "/completions", "/tokenize", "/detokenize", "/apply-template", "/infill"] {
            let response = server.request(Method::POST, path).body(body).send().await.unwrap();
            let status = response.status().as_u16();
            let answer: (u16, Value) = (status, response.json().await.unwrap());
            assert_eq!(answer.1["error"]["type"], "invalid_request_error");
            assert_eq!(first.get_or_insert_with(|| answer.clone()), &answer, "{path} {body}");
        }
        errors.add(body, &first.unwrap());
    }
    insta::assert_snapshot!("body_errors", errors);
}

#[tokio::test]
async fn invalid_query_or_path_has_the_format_of_the_protocol() {
    for path in [
        "/props?model=a&model=b",
        "/metrics?model=a&model=b",
        "/lora-adapters?model=a&model=b",
        "/slots?model=a&model=b",
        "/tokenizer_info?model=a&model=b",
        "/v1/models?reload=1&reload=2",
        "/v1/models/%FF",
        "/v1/responses/%FF",
        "/v1/responses/%FF/input_items",
    ] {
        let (status, answer) = server().await.get(path).await;
        assert_eq!((status, &answer["error"]["type"]), (400, &json!("invalid_request_error")), "{path}: {answer}");
    }
}

#[tokio::test]
async fn failed_run_releases_slot() {
    let server = server().await;
    for _ in 0..6 {
        let (status, answer) = server.post(PATH, &body(json!({"mods": ["refuse"]}))).await;
        assert_eq!((status, answer["error"]["message"].as_str()), (422, Some("not today")), "{answer}");
    }
    let events = server.stream(PATH, &body(json!({"mods": ["refuse_late"], "stream": true, "n_predict": 30}))).await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!((&last["error"]["message"], &last["error"]["code"]), (&json!("enough"), &json!(422)));
    server.answer(PATH, &body(json!({}))).await;
}
