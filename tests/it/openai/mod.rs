//! OpenAI's API with a real model. Its weights are random, so a mod forces the texts that tests depend on.

mod invalid_requests;
mod mods;

use super::harness::{server, with_fields};
use serde_json::{Value, json};
use thunder::events::system;

const CHAT: &str = "/v1/chat/completions";

#[expect(clippy::needless_pass_by_value, reason = "callers write json!(…) in place")]
fn chat(fields: Value) -> Value {
    with_fields(json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 12, "seed": 7}), &fields)
}

/// Returns a mod that forces the start of the answer.
fn forced_start(text: &str) -> Value {
    json!([{ "name": "force-prefix", "config": { "text": text } }])
}

/// Returns the answer with placeholders for the values that differ between runs.
fn redacted(answer: &Value) -> Value {
    let mut answer = answer.clone();
    for (pointer, placeholder) in [
        ("/id", "[id]"),
        ("/created", "[time]"),
        ("/system_fingerprint", "[release]"),
        ("/choices/0/message/content", "[text]"),
        ("/timings", "[timings]"),
        ("/usage/prompt_tokens", "[count]"),
        ("/usage/total_tokens", "[count]"),
        ("/usage/prompt_tokens_details/cached_tokens", "[count]"),
        ("/thunder/run_id", "[id]"),
        ("/thunder/replay", "[path]"),
        ("/thunder/id_slot", "[slot]"),
    ] {
        *answer.pointer_mut(pointer).unwrap() = placeholder.into();
    }
    answer
}

fn chunks(events: &[String]) -> Vec<Value> {
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    events[..events.len() - 1].iter().map(|data| serde_json::from_str(data).unwrap()).collect()
}

fn content(chunks: &[Value]) -> String {
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect()
}

#[tokio::test]
async fn chat_response_has_openai_format() {
    let answer = server().await.answer(CHAT, &chat(json!({"ignore_eos": true}))).await;
    insta::assert_json_snapshot!(redacted(&answer), @r#"
    {
      "id": "[id]",
      "object": "chat.completion",
      "created": "[time]",
      "model": "tiny",
      "system_fingerprint": "[release]",
      "choices": [
        {
          "index": 0,
          "message": {
            "role": "assistant",
            "content": "[text]"
          },
          "logprobs": null,
          "finish_reason": "length"
        }
      ],
      "usage": {
        "prompt_tokens": "[count]",
        "completion_tokens": 12,
        "total_tokens": "[count]",
        "prompt_tokens_details": {
          "cached_tokens": "[count]"
        },
        "completion_tokens_details": {
          "reasoning_tokens": 0
        }
      },
      "timings": "[timings]",
      "thunder": {
        "run_id": "[id]",
        "replay": "[path]",
        "id_slot": "[slot]"
      }
    }
    "#);
    let run_id = answer["thunder"]["run_id"].as_str().unwrap();
    assert_eq!(answer["id"], format!("chatcmpl-{run_id}"));
    assert_eq!(answer["thunder"]["replay"], format!("/runs/{run_id}"));
    assert!(answer["thunder"]["id_slot"].as_u64().is_some_and(|slot| slot < 4));
}

#[tokio::test]
async fn streamed_answer_equals_complete_answer() {
    let server = server().await;
    let body = chat(json!({"ignore_eos": true, "max_tokens": 20}));
    let whole = server.answer(CHAT, &body).await;
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let chunks = chunks(&server.stream(CHAT, &streamed).await);

    let first = &chunks[0];
    assert_eq!(first["object"], "chat.completion.chunk");
    assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": null}));
    assert!(first["thunder"]["run_id"].is_string());
    assert!(chunks[1..].iter().all(|chunk| chunk["choices"][0]["delta"].get("role").is_none()));
    assert_eq!(content(&chunks), whole["choices"][0]["message"]["content"].as_str().unwrap());

    let [.., finish, usage] = &chunks[..] else { panic!("too few chunks") };
    assert_eq!(finish["choices"][0]["delta"], json!({}));
    assert_eq!(finish["choices"][0]["finish_reason"], "length");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 20);
    assert!(usage["timings"]["predicted_per_second"].is_number());
    assert!(chunks.iter().all(|chunk| chunk["id"] == first["id"]));
}

#[tokio::test]
async fn same_seed_gives_same_answer() {
    let server = server().await;
    let text = async |seed: i64| {
        let answer = server.answer(CHAT, &chat(json!({"seed": seed, "ignore_eos": true, "temperature": 2.0}))).await;
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let (first, repeated, other) = (text(1).await, text(1).await, text(2).await);
    assert_eq!(first, repeated);
    assert_ne!(first, other);
}

#[tokio::test]
async fn answer_ends_before_stop_text() {
    let server = server().await;
    let body = chat(json!({"mods": forced_start("One, two, three, four"), "stop": [" three", ""], "max_tokens": 40}));
    let answer = server.answer(CHAT, &body).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "One, two,");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let mut streamed = body;
    streamed["stream"] = true.into();
    for too_much in [vec!["a".to_owned(); 1025], vec!["a".repeat(40_000); 2]] {
        let (status, error) = server.post(CHAT, &chat(json!({"stop": too_much}))).await;
        assert_eq!((status, error["error"]["param"].as_str()), (400, Some("stop")), "{error}");
    }
    streamed["stop"] = " three".into();
    assert_eq!(content(&chunks(&server.stream(CHAT, &streamed).await)), "One, two,");
}

#[tokio::test]
async fn log_probabilities_have_alternatives() {
    let server = server().await;
    let body =
        chat(json!({"logprobs": true, "top_logprobs": 3, "temperature": 0, "ignore_eos": true, "max_tokens": 4}));
    let answer = server.answer(CHAT, &body).await;
    let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(entries.len(), 4);
    for entry in &entries {
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 3);
        assert!(entry["bytes"].is_array() && entry["id"].is_number());
    }
    let bytes: Vec<u8> =
        entries.iter().flat_map(|e| e["bytes"].as_array().unwrap()).map(|b| b.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8_lossy(&bytes), answer["choices"][0]["message"]["content"].as_str().unwrap());

    let mut streamed = body;
    streamed["stream"] = true.into();
    let chunks = chunks(&server.stream(CHAT, &streamed).await);
    let count: usize =
        chunks.iter().filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array()).map(Vec::len).sum();
    assert_eq!(count, 4);

    let completion = json!({"prompt": "Once", "logprobs": 2, "max_tokens": 3, "ignore_eos": true});
    let answer = server.answer("/v1/completions", &completion).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[field].as_array().unwrap().len(), 3, "{field}: {logprobs}");
    }
}

#[tokio::test]
async fn prompt_can_be_text_or_tokens() {
    let server = server().await;
    let body = |prompt: Value| json!({"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": true});
    let answer = server.answer("/v1/completions", &body("Once there was".into())).await;
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let listed = server.answer("/v1/completions", &body(json!(["Once there was"]))).await;
    assert_eq!(listed["choices"][0]["text"], answer["choices"][0]["text"]);
    let tokens = server.answer("/v1/completions", &body(json!([20, 30, 40]))).await;
    assert_eq!(tokens["usage"]["prompt_tokens"], 3);
    let mut streamed = body("Once there was".into());
    streamed["stream"] = true.into();
    let chunks = chunks(&server.stream("/v1/completions", &streamed).await);
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, answer["choices"][0]["text"].as_str().unwrap());
}

#[tokio::test]
async fn text_completion_of_silly_tavern_is_answered() {
    let server = server().await;
    // The fields of its type KoboldCpp that the route or a protocol of the server reads, and some others.
    let body = json!({"prompt": "The sky is", "model": "", "max_new_tokens": 6, "max_tokens": 6, "temperature": 1, "top_p": 1,
        "typical_p": 1, "min_p": 0.1, "frequency_penalty": 0, "presence_penalty": 0, "top_k": 0, "tfs": 1, "seed": -1,
        "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75, "dry_penalty_last_n": 0,
        "dry_sequence_breakers": r#"["\n", ":", "\"", "*"]"#, "stop": ["\nUser:"], "ban_eos_token": false,
        "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "", "banned_strings": [],
        "xtc_threshold": 0.1, "xtc_probability": 0, "top_n_sigma": 0, "min_keep": 0, "grammar": "", "trim_stop": true,
        "sampler_order": [6, 0, 1, 3, 4, 2, 5]});
    let answer = server.answer("/v1/completions", &body).await;
    assert!(answer["choices"][0]["text"].is_string(), "{answer}");
}

#[tokio::test]
async fn banned_token_is_never_sampled() {
    let server = server().await;
    let text = async |fields: Value| {
        let body = json!({"prompt": "Once", "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": true});
        let answer = server.answer("/v1/completions", &with_fields(body, &fields)).await;
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let chat = chat(json!({"temperature": 0, "logprobs": true, "max_tokens": 1, "ignore_eos": true}));
    let first = server.answer(CHAT, &chat).await["choices"][0]["logprobs"]["content"][0]["id"].as_i64().unwrap();
    for ban in [
        json!({"banned_tokens": [first]}),
        json!({"logit_bias": {first.to_string(): -100}}),
        json!({"logit_bias": [[first, false]]}),
    ] {
        let answer = server.answer(CHAT, &with_fields(chat.clone(), &ban)).await;
        assert_ne!(answer["choices"][0]["logprobs"]["content"][0]["id"], first, "{ban}");
    }
    assert_eq!(text(json!({})).await, text(json!({"banned_tokens": []})).await);
}

#[tokio::test]
async fn request_id_is_unique() {
    let server = server().await;
    let id = format!("mine/{}", system::new_id());
    let body = chat(json!({"request_id": id, "max_tokens": 2}));
    let answer = server.answer(CHAT, &body).await;
    server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
    // The server accepts the request if its lookup in the database takes too long.
    let mut answer = server.post(CHAT, &body).await;
    for _ in 0..20 {
        if answer.0 == 409 {
            break;
        }
        answer = server.post(CHAT, &body).await;
    }
    let (status, error) = answer;
    assert_eq!((status, error["error"]["param"].as_str()), (409, Some("request_id")), "{error}");
}

#[tokio::test]
async fn disconnect_cancels_run() {
    let server = server().await;
    let body = json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": true});
    let response = server.request(reqwest::Method::POST, "/v1/completions").json(&body).send().await.unwrap();
    let run_id = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
    drop(response);
    let run = server.finished(&run_id).await;
    assert_eq!(run["run"]["status"], "cancelled");
    assert!(run["run"]["completion_tokens"].as_i64().unwrap() < 4000);
}

#[tokio::test]
async fn answers_are_recorded_unless_disabled() {
    let server = server().await;
    let answer = server.answer(CHAT, &chat(json!({"user": "a user"}))).await;
    let run = server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
    assert_eq!(run["run"]["surface"], "openai");
    assert_eq!(run["run"]["user_label"], "a user");
    assert_eq!(run["run"]["prompt_preview"], "Hello!");
    let unrecorded = server.answer(CHAT, &chat(json!({"record": false}))).await;
    // Runs are stored in order, so the earlier run would be stored, too.
    let later = server.answer(CHAT, &chat(json!({}))).await;
    server.finished(later["thunder"]["run_id"].as_str().unwrap()).await;
    let path = format!("/api/v1/runs/{}", unrecorded["thunder"]["run_id"].as_str().unwrap());
    assert_eq!(server.get(&path).await.0, 404);
}

#[tokio::test]
async fn model_is_listed() {
    let server = server().await;
    let (status, list) = server.get("/v1/models").await;
    assert_eq!((status, list["data"][0]["id"].as_str()), (200, Some("tiny")));
    assert!(list["data"][0]["meta"]["n_ctx"].as_u64().unwrap() > 0);
    assert_eq!(server.get("/v1/models/tiny").await.0, 200);
    let (status, error) = server.get("/v1/models/huge").await;
    assert_eq!((status, error["error"]["code"].as_str()), (404, Some("model_not_found")));
    assert_eq!(server.get("/models").await.1, list);
}
