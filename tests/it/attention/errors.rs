//! Errors of the attention API.

use super::{PATH, connect, generate_request, next, send, tokens_of, until_done};
use crate::harness::postgres::SilentDatabase;
use crate::harness::{ErrorTable, Server, message_of, server};
use futures::SinkExt;
use serde_json::json;
use yawc::{Frame, Options};

#[tokio::test]
async fn errors_have_code_and_message() {
    let server = server().await;
    let prompt = tokens_of(server, "x").await;
    let long: Vec<i64> = vec![50; 20_000];
    let invalid = [
        (json!({"input_ids": [1, 999_999]}), "INVALID_TOKEN"),
        (json!({"input_ids": [-1]}), "INVALID_TOKEN"),
        (json!({"input_ids": [1.5]}), "INVALID_TOKEN"),
        (json!({"input_ids": ["a"]}), "INVALID_TOKEN"),
        (json!({"input_ids": []}), "INVALID_REQUEST"),
        (json!({"input_ids": "1,2"}), "INVALID_REQUEST"),
        (json!({"input_ids": null}), "INVALID_REQUEST"),
        (json!({"input_ids": long}), "CONTEXT_LENGTH_EXCEEDED"),
        (json!({"stop_tokens": [640]}), "INVALID_TOKEN"),
        (json!({"banned_tokens": [9_000_000_000_i64]}), "INVALID_TOKEN"),
        (json!({"max_new_tokens": 0}), "INVALID_REQUEST"),
        (json!({"max_new_tokens": "many"}), "INVALID_REQUEST"),
        (json!({"repetition_penalty": -1}), "INVALID_REQUEST"),
        (json!({"temperature": "hot"}), "INVALID_REQUEST"),
        (json!({"attention_format": "holographic"}), "INVALID_REQUEST"),
        (json!({"attention_dtype": "float8"}), "INVALID_REQUEST"),
        (json!({"attention_encoding": "smoke"}), "INVALID_REQUEST"),
        (json!({"attention_encoding": "binary"}), "INVALID_REQUEST"),
        (json!({"attention_format": "aggregated", "aggregation_mode": "median"}), "INVALID_REQUEST"),
        (json!({"attention_format": "sparse", "attention_top_k": 0}), "INVALID_REQUEST"),
        // Also with formats in which the field has no effect.
        (json!({"aggregation_mode": "median"}), "INVALID_REQUEST"),
        (json!({"attention_format": "viz", "layer_weights": "x"}), "INVALID_REQUEST"),
        (json!({"attention_top_k": -5}), "INVALID_REQUEST"),
        (
            json!({"attention_format": "aggregated", "aggregation_mode": "weighted_layers", "layer_weights": [1]}),
            "INVALID_REQUEST",
        ),
        (
            json!({"attention_format": "aggregated", "aggregation_mode": "weighted_layers", "layer_weights": [3e38, 3e38, 3e38, 3e38]}),
            "INVALID_REQUEST",
        ),
        (json!({"num_samples": 1_000_000_000}), "INVALID_REQUEST"),
        (json!({"num_samples": -1}), "INVALID_REQUEST"),
        (json!({"top_logprobs": 10_000}), "INVALID_REQUEST"),
        (json!({"suggest_pruning": true, "sentences": [{"start": 5}]}), "INVALID_REQUEST"),
        (json!({"model": "tiny/nobody"}), "UNKNOWN_MOD"),
        (json!({"mods": ["nobody"]}), "UNKNOWN_MOD"),
    ];
    let mut socket = connect(server, PATH, Options::default()).await;
    let mut errors = ErrorTable::default();
    for (fields, code) in invalid {
        let body = generate_request(&prompt, &fields);
        let answer = server.post("/api/v1/generate", &body).await;
        assert_eq!((&answer.1["type"], &answer.1["error_code"]), (&json!("error"), &json!(code)), "{}", answer.1);
        errors.add(&fields, &answer);
        if fields.get("attention_encoding") == Some(&json!("binary")) {
            continue;
        }
        send(&mut socket, &body).await;
        let (error, _) = next(&mut socket).await;
        assert_eq!((&error["error_code"], &error["request_id"]), (&json!(code), &body["request_id"]), "{error}");
    }
    insta::assert_snapshot!("attention_errors", errors);
    for (text, code) in [("{", "INVALID_JSON"), ("[]", "INVALID_REQUEST"), ("{\"type\": \"dance\"}", "INVALID_REQUEST")]
    {
        socket.send(Frame::text(text)).await.unwrap();
        assert_eq!(next(&mut socket).await.0["error_code"], code, "{text}");
    }
    // The connection is still open.
    send(&mut socket, &generate_request(&prompt, &json!({}))).await;
    assert_eq!(until_done(&mut socket).await.len(), 5);
    for (path, body) in [
        ("/api/v1/tokenize", json!({"text": 5})),
        ("/api/v1/tokenize", json!({})),
        ("/api/v1/detokenize", json!({"token_ids": [640]})),
        ("/api/v1/detokenize", json!({"token_ids": {"a": 1}})),
    ] {
        let (status, error) = server.post(path, &body).await;
        assert_eq!((status, &error["type"]), (400, &json!("error")), "{path} {body}: {error}");
    }
    let (status, error) = server.get("/api/v1/generate").await;
    assert_eq!((status, &error["error_code"]), (405, &json!("METHOD_NOT_ALLOWED")));
    let (status, error) = server.get(PATH).await;
    assert_eq!((status, &error["type"]), (400, &json!("error")), "the request is not a WebSocket handshake");
}

#[tokio::test]
async fn server_without_attention_rejects_attention_request() {
    let database = SilentDatabase::new().await;
    let server = Server::start(&["--attention", "off", "--database-url", &database.url]);
    let body = json!({"input_ids": [40], "max_new_tokens": 1});
    let (status, error) = server.post("/api/v1/generate", &body).await;
    assert_eq!((status, &error["error_code"]), (503, &json!("NO_MODEL")), "while the server starts: {error}");
    database.answer();
    server.wait_ready().await;
    let (status, error) = server.post("/api/v1/generate", &json!({"input_ids": [1], "return_attention": true})).await;
    assert_eq!((status, &error["error_code"]), (400, &json!("ATTENTION_UNAVAILABLE")), "{error}");
    assert_eq!(error["field"], "return_attention");
    let (status, error) = server.post("/v1/completions", &json!({"prompt": "x", "lens": true})).await;
    let message = "--attention off excludes the logit lens; start the server with --attention auto or on";
    assert_eq!((status, message_of(&error), &error["error"]["param"]), (400, message, &json!("lens")));
    assert_eq!(server.get("/api/v1/model/info").await.1["attention_available"], false);
    let body = json!({"input_ids": [40, 41], "max_new_tokens": 2, "ignore_eos": true});
    assert_eq!(server.answer("/api/v1/generate", &body).await["generated_tokens"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn model_without_attention_is_reported() {
    let model = crate::exact::recurrent::mamba();
    let server = Server::start(&["--model", model.to_str().unwrap()]);
    server.wait_ready().await;
    let info = server.get("/api/v1/model/info").await.1;
    assert_eq!((&info["attention_available"], &info["attention_sinks"]), (&json!(false), &json!(false)));
    for field in ["return_attention", "output_attentions", "suggest_pruning"] {
        let (status, error) = server.post("/api/v1/generate", &json!({"input_ids": [40, 41], field: true})).await;
        assert_eq!((status, &error["error_code"]), (400, &json!("ATTENTION_UNAVAILABLE")), "{error}");
        assert_eq!(error["field"], field);
        assert_eq!(
            message_of(&error),
            "attention was requested, but the attention of the model 'recurrent' cannot be captured: its layers are recurrent and do not attend to tokens"
        );
    }
    let body = json!({"input_ids": [40, 41], "max_new_tokens": 2, "ignore_eos": true});
    assert_eq!(server.answer("/api/v1/generate", &body).await["generated_tokens"].as_array().unwrap().len(), 2);
    // A completion that requests attention runs without it.
    let body = json!({"prompt": "x", "max_tokens": 2, "attention": true});
    assert_eq!(server.post("/v1/completions", &body).await.0, 200);
}
