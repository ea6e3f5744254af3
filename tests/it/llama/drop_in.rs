//! Behavior that clients and scripts written for llama-server rely on.

use super::encoders;
use crate::harness::{Server, client, message_of, server, with_fields};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";

fn chat(fields: &Value) -> Value {
    with_fields(json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}), fields)
}

#[tokio::test]
async fn unknown_model_name_selects_the_only_model() {
    let server = server().await;
    for (path, body) in [
        (CHAT, chat(&json!({}))),
        ("/v1/messages", chat(&json!({}))),
        ("/v1/responses", json!({"input": "Hello!", "max_output_tokens": 2})),
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": 2})),
        ("/completion", json!({"prompt": "Once", "n_predict": 2})),
    ] {
        for name in ["gpt-4o", "openai/gpt-4o"] {
            let mut body = body.clone();
            body["model"] = name.into();
            assert_eq!(server.answer(path, &body).await["model"], "tiny", "{path} {name}");
        }
    }
    let answer = server.answer(CHAT, &chat(&json!({"model": "gpt-4o/log-top"}))).await;
    let run = server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
    assert_eq!(run["run"]["mods"][0], "log-top", "{run}");
    for name in ["tiny/typo", "openai/gpt-4o/typo"] {
        let (status, answer) = server.post(CHAT, &chat(&json!({"model": name}))).await;
        assert_eq!((status, &answer["error"]["code"]), (400, &json!("unknown_mod")), "{name}: {answer}");
    }
}

#[tokio::test]
async fn flags_of_llama_server_take_effect() {
    let flags =
        ["--ctx_size", "256", "-np", "2", "--kv_unified", "--verbose", "--no-slots", "--metrics", "--embedding"];
    let server = Server::start(&[&flags[..], &["--alias", "b,a"]].concat());
    server.wait_ready().await;
    let (_, props) = server.get("/props").await;
    let n_ctx = &props["default_generation_settings"]["n_ctx"];
    assert_eq!((n_ctx, &props["total_slots"]), (&json!(256), &json!(2)), "each slot has the whole context");

    let answer = server.answer(CHAT, &chat(&json!({}))).await;
    assert!(answer["__verbose"]["prompt"].as_str().unwrap().contains("Hello!"), "{answer}");
    let answer = server.answer(CHAT, &chat(&json!({"verbose": false}))).await;
    assert_eq!(answer.get("__verbose"), None);

    for path in ["/slots", "/v1/slots/0/info", "/sessions"] {
        assert_eq!(server.get(path).await.0, 501, "{path}");
    }

    let (_, models) = server.get("/models").await;
    assert_eq!(models["data"][0]["aliases"], json!(["b", "a"]), "the aliases must not include the file name");

    let before = token_counts(&server).await;
    server.answer("/v1/embeddings", &json!({"input": ["hello world", "goodbye"]})).await;
    let after = token_counts(&server).await;
    assert!(after.0 > before.0 && after.1 > before.1, "{before:?} {after:?}");
    assert_eq!(before.2, after.2, "an embedding generates no token");

    let (status, answer) = server.post("/completion", &json!({"prompt": "a river ".repeat(200)})).await;
    assert_eq!(status, 400, "{answer}");
    assert!(message_of(&answer).ends_with("this model's maximum context length is 256 tokens"), "{answer}");
}

/// Returns the counts of prompt tokens, decodes and generated tokens.
pub(super) async fn token_counts(server: &Server) -> (f64, f64, f64) {
    let (_, text) = server.get("/metrics").await;
    let value = |name: &str| -> f64 {
        let line = text.as_str().unwrap().lines().find_map(|line| line.strip_prefix(&format!("llamacpp:{name} ")));
        line.unwrap().parse().unwrap()
    };
    (value("prompt_tokens_total"), value("n_decode_total"), value("tokens_predicted_total"))
}

#[tokio::test]
async fn reranking_is_counted_and_empty_text_is_embedded() {
    let reranker = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/encoders/reranker.gguf");
    let server = Server::start(&["--model", reranker, "--reranking", "--metrics"]);
    server.wait_ready().await;
    assert_eq!(token_counts(&server).await, (0.0, 0.0, 0.0));
    let ranked = server.answer("/v1/rerank", &json!({"query": "a", "documents": ["a river", "the sky"]})).await;
    let (prompt, decodes, _) = token_counts(&server).await;
    assert_eq!(Some(prompt), ranked["usage"]["prompt_tokens"].as_f64());
    assert!(decodes >= 1.0);

    let encoders = encoders().await;
    for input in [json!(""), json!(["a", ""]), json!({"prompt_string": ""})] {
        let answer = encoders.answer("/v1/embeddings", &json!({"input": input})).await;
        let last = answer["data"].as_array().unwrap().last().unwrap();
        assert!(last["embedding"].as_array().unwrap().len() > 1, "{input}");
    }
}

#[tokio::test]
async fn slot_is_free_and_has_no_budget_after_its_run() {
    let server = Server::start(&["-np", "1"]);
    server.wait_ready().await;
    server.answer("/completion", &json!({"prompt": "Once", "n_predict": 3, "ignore_eos": true})).await;
    let (_, slots) = server.get("/slots").await;
    assert_eq!(slots[0]["is_processing"], false, "the slot must be free when the answer is complete");
    let next = &slots[0]["next_token"][0];
    assert_eq!((&next["n_remain"], &next["n_decoded"]), (&json!(-1), &json!(0)), "{slots}");
}

#[tokio::test]
async fn progress_begins_before_the_first_decode() {
    let server = Server::start(&["-np", "1", "-b", "32", "-ub", "32"]);
    server.wait_ready().await;
    let fields = json!({"stream": true, "return_progress": true, "timings_per_token": true, "cache_prompt": false});
    let text = "the old fox went to the river ".repeat(12);
    let chat = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 2});
    for (path, body) in [("/completion", json!({"prompt": text, "n_predict": 2})), (CHAT, chat)] {
        let events = server.stream(path, &with_fields(body, &fields)).await;
        let events = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
        let events: Vec<Value> = events.filter(|event| event.get("prompt_progress").is_some()).collect();
        assert_progress(&events);
    }
    let body = with_fields(json!({"input": text, "max_output_tokens": 2}), &fields);
    let events = server.events("/v1/responses", &body).await;
    let progress = events.iter().filter(|(_, event)| event.get("prompt_progress").is_some());
    let progress: Vec<_> = progress.map(|(name, event)| (name.as_str(), event.clone())).collect();
    assert!(progress.iter().all(|(name, _)| *name == "response.in_progress"));
    let progress: Vec<Value> = progress.into_iter().map(|(_, event)| event).collect();
    assert_progress(&progress);
    let deltas = || events.iter().filter(|(name, _)| name == "response.output_text.delta");
    assert!(deltas().all(|(_, event)| event["timings"]["predicted_n"].as_u64() > Some(0)), "{events:?}");
    assert!(deltas().count() > 0, "{events:?}");
}

fn assert_progress(events: &[Value]) {
    let number = |event: &Value, name: &str| event["prompt_progress"][name].as_u64().unwrap();
    let timing = |event: &Value, name: &str| event["timings"][name].as_f64().unwrap();
    let (first, last) = (events.first().unwrap(), events.last().unwrap());
    assert_eq!((number(first, "processed"), number(first, "cache")), (0, 0));
    assert_eq!((timing(first, "prompt_n"), timing(first, "prompt_ms"), timing(first, "predicted_ms")), (0.0, 0.0, 0.0));
    assert_eq!(number(last, "processed"), number(last, "total"));
    assert_eq!(timing(last, "prompt_n"), number(last, "total") as f64);
    assert_eq!(
        events.len() as u64,
        1 + number(last, "total").div_ceil(32),
        "one report before the first decode and one for each decode"
    );
    assert!(events.is_sorted_by(|a, b| timing(a, "prompt_ms") < timing(b, "prompt_ms")));
}

#[tokio::test]
async fn continued_message_joins_its_parts_with_a_blank_line() {
    let server = server().await;
    let parts = json!([{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]);
    let request = |last: &[Value]| {
        let mut messages = vec![json!({"role": "user", "content": "Hello!"})];
        messages.extend(last.iter().cloned());
        json!({"messages": messages})
    };
    let answer = json!({"role": "assistant", "content": parts});
    let prompt = server.answer("/apply-template", &request(std::slice::from_ref(&answer))).await["prompt"].clone();
    assert!(prompt.as_str().unwrap().ends_with("assistant\nWh\n\nill"), "{prompt}");
    let (status, error) = server.post("/apply-template", &request(&[answer.clone(), answer])).await;
    assert_eq!((status, error["error"]["type"].as_str()), (400, Some("invalid_request_error")), "{error}");
}

/// Waits until `/props` reports that the model sleeps.
async fn wait_until_asleep(server: &Server) {
    let begun = Instant::now();
    while server.get("/props").await.1["is_sleeping"] != true {
        assert!(begun.elapsed() < Duration::from_mins(1), "the model does not sleep:\n{}", server.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn idle_model_sleeps_until_next_request() {
    let server = Server::start(&["--sleep-idle-seconds", "3", "--metrics"]);
    server.wait_ready().await;
    let body = json!({"prompt": "Once", "n_predict": 8, "seed": 1, "ignore_eos": true});
    let first = server.answer("/completion", &body).await;
    let (_, awake) = server.get("/props").await;
    let metrics = token_counts(&server).await;
    wait_until_asleep(&server).await;
    // The following requests do not wake the model.
    let (_, mut asleep) = server.get("/props").await;
    asleep["is_sleeping"] = false.into();
    assert_eq!(asleep["default_generation_settings"], awake["default_generation_settings"]);
    assert_eq!(asleep["chat_template"], awake["chat_template"]);
    let described = server.answer("/api/show", &json!({"model": "tiny"})).await;
    assert_eq!(described["template"], awake["chat_template"]);
    assert_eq!(described["capabilities"], json!(["completion", "tools", "thinking"]));
    assert_eq!(token_counts(&server).await, metrics);
    assert_eq!(server.get("/health").await.0, 200);
    while server.get("/models").await.1["data"][0]["status"]["value"] != "sleeping" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(server.get("/props").await.1["is_sleeping"], true);
    // A request wakes the model, even if it generates nothing.
    assert_eq!(server.answer("/completion", &body).await["content"], first["content"]);
    assert_eq!(server.get("/props").await.1["is_sleeping"], false);
    wait_until_asleep(&server).await;
    assert!(server.answer("/tokenize", &json!({"content": "Once"})).await["tokens"].is_array());
    // A run that takes longer than the idle time is not interrupted.
    let long = json!({"prompt": "Once", "n_predict": 3000, "ignore_eos": true});
    assert_eq!(server.answer("/completion", &long).await["tokens_predicted"], 3000);
}

#[tokio::test]
async fn vertex_predictions_are_requests_to_other_routes() {
    let env = [("AIP_MODE", "PREDICTION"), ("AIP_HEALTH_ROUTE", "/alive"), ("AIP_HTTP_PORT", "0")];
    let server = Server::start_with_env(&["--port", "1", "--api-key", "k"], &env);
    server.wait_ready().await;
    assert!(!server.base.ends_with(":1"), "AIP_HTTP_PORT must have an effect");
    let client = client().pool_max_idle_per_host(0).build().unwrap();
    let url = |path: &str| format!("{}{path}", server.base);
    assert_eq!(client.get(url("/alive")).send().await.unwrap().status().as_u16(), 200);
    let chat = chat(&json!({"@requestFormat": "chatCompletions", "stream": true}));
    let body = json!({"instances": [
        chat,
        {"@requestFormat": "/tokenize", "content": "Once upon"},
        {"@requestFormat": "/api/generate", "model": "tiny", "prompt": "Once", "options": {"num_predict": 4}},
        {"@requestFormat": "nonsense"},
        {"@requestFormat": "completion", "prompt": 5},
        7,
    ]});
    let predict = || client.post(url("/predict")).json(&body);
    assert_eq!(predict().send().await.unwrap().status().as_u16(), 401);
    let answer: Value = predict().bearer_auth("k").send().await.unwrap().json().await.unwrap();
    let predictions = answer["predictions"].as_array().unwrap();
    assert_eq!(predictions.len(), 6, "{answer}");
    assert_eq!(predictions[0]["choices"][0]["message"]["role"], "assistant", "{answer}");
    assert!(predictions[1]["tokens"].as_array().is_some_and(|tokens| !tokens.is_empty()), "{answer}");
    assert_eq!(predictions[2]["done"], true, "{answer}");
    let messages: Vec<&str> = predictions[3..].iter().map(message_of).collect();
    insta::assert_json_snapshot!("invalid_predictions", messages);
    let invalid = client.post(url("/predict")).json(&json!({"instances": {}})).bearer_auth("k").send().await.unwrap();
    assert_eq!(invalid.status().as_u16(), 400);
}
