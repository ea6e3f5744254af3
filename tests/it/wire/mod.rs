//! Complete responses of every protocol: successes, streams and errors.
//!
//! Mods force the generated texts, since the model's weights are random. `INSTA_UPDATE=always` rewrites the snapshots.

use crate::chat::{CALLS, forced_answer, tools};
use crate::harness::redaction::redacted;
use crate::harness::{server, with_fields};
use reqwest::Method;
use serde_json::{Value, json};

/// Sends the bodies and compares the responses with the snapshots of these names.
async fn snapshots(path: &str, bodies: impl IntoIterator<Item = (&'static str, Value)>) {
    let server = server().await;
    for (name, body) in bodies {
        let response = server.request(Method::POST, path).json(&body).send().await.unwrap();
        insta::assert_json_snapshot!(name, redacted(response).await);
    }
}

/// Sends `GET` requests and compares the responses with the snapshots of these names.
async fn get_snapshots(paths: impl IntoIterator<Item = (&'static str, &'static str)>) {
    let server = server().await;
    for (name, path) in paths {
        let response = server.request(Method::GET, path).send().await.unwrap();
        insta::assert_json_snapshot!(name, redacted(response).await);
    }
}

fn chat_request() -> Value {
    json!({"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "Hello!"}], "mods": forced_answer("Good day.")})
}

fn completion_request() -> Value {
    json!({"model": "tiny", "max_tokens": 20, "prompt": "Once", "mods": forced_answer(" upon a time.")})
}

#[tokio::test]
async fn openai_chat_completions_match_snapshots() {
    let bodies = [
        ("chat_completion", chat_request()),
        (
            "chat_completion_stream",
            with_fields(chat_request(), &json!({"stream": true, "stream_options": {"include_usage": true}})),
        ),
        ("chat_completion_logprobs", with_fields(chat_request(), &json!({"logprobs": true, "max_tokens": 1}))),
        ("chat_completion_without_messages", json!({"model": "tiny"})),
        ("chat_completion_wrong_type", with_fields(chat_request(), &json!({"temperature": "hot"}))),
        (
            "chat_completion_too_long",
            with_fields(chat_request(), &json!({"messages": [{"role": "user", "content": "a ".repeat(5000)}]})),
        ),
    ];
    snapshots("/v1/chat/completions", bodies).await;
}

#[tokio::test]
async fn openai_completions_match_snapshots() {
    let bodies = [
        ("completion", completion_request()),
        ("completion_stream", with_fields(completion_request(), &json!({"stream": true}))),
        ("completion_without_prompt", json!({"model": "tiny"})),
    ];
    snapshots("/v1/completions", bodies).await;
    get_snapshots([("unknown_model", "/v1/models/huge"), ("unknown_route", "/v1/nowhere")]).await;
}

#[tokio::test]
async fn openai_responses_match_snapshots() {
    let body = json!({"model": "tiny", "input": "Hello!", "max_output_tokens": 20, "mods": forced_answer("Good day.")});
    let bodies = [
        ("response", body.clone()),
        ("response_stream", with_fields(body.clone(), &json!({"stream": true}))),
        ("response_after_unknown_response", with_fields(body.clone(), &json!({"previous_response_id": "resp_1"}))),
    ];
    snapshots("/v1/responses", bodies).await;
}

#[tokio::test]
async fn anthropic_messages_match_snapshots() {
    let bodies = [
        ("message", chat_request()),
        ("message_stream", with_fields(chat_request(), &json!({"stream": true}))),
        ("message_without_messages", json!({"model": "tiny", "max_tokens": 4})),
        ("message_wrong_type", with_fields(chat_request(), &json!({"max_tokens": "many"}))),
    ];
    snapshots("/v1/messages", bodies).await;
    snapshots("/v1/messages/count_tokens", [("message_count_tokens", chat_request())]).await;
}

#[tokio::test]
async fn ollama_routes_match_snapshots() {
    let options = |text: &str| json!({"num_predict": 20, "mods": forced_answer(text)});
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}],
                      "options": options("<think>hm</think>Good day.")});
    let tools = json!({"tools": tools(), "options": {"num_predict": 200, "mods": forced_answer(CALLS)}});
    let bodies = [
        ("ollama_chat", with_fields(body.clone(), &json!({"stream": false}))),
        ("ollama_chat_stream", body.clone()),
        ("ollama_chat_tools", with_fields(with_fields(body.clone(), &tools), &json!({"stream": false}))),
        ("ollama_chat_tools_stream", with_fields(body.clone(), &tools)),
        ("ollama_chat_load", json!({"model": "tiny", "messages": []})),
        ("ollama_chat_wrong_type", with_fields(body.clone(), &json!({"options": {"temperature": "hot"}}))),
        ("ollama_chat_image", json!({"messages": [{"role": "user", "content": "?", "images": ["aGk="]}]})),
    ];
    snapshots("/api/chat", bodies).await;
    let body = json!({"model": "tiny", "prompt": "Once", "options": options(" upon a time.")});
    let bodies = [
        ("ollama_generate", with_fields(body.clone(), &json!({"stream": false, "system": "Be brief."}))),
        ("ollama_generate_stream", body.clone()),
        ("ollama_generate_raw", with_fields(body.clone(), &json!({"stream": false, "raw": true}))),
        ("ollama_generate_suffix", with_fields(body.clone(), &json!({"suffix": "."}))),
        ("ollama_generate_template", with_fields(body.clone(), &json!({"template": "{{ .Prompt }}"}))),
    ];
    snapshots("/api/generate", bodies).await;
    snapshots("/api/show", [("ollama_show", json!({"model": "tiny:latest"}))]).await;
    let paths = [
        ("ollama_tags", "/api/tags"),
        ("ollama_ps", "/api/ps"),
        ("ollama_version", "/api/version"),
        ("ollama_wrong_method", "/api/chat"),
        ("ollama_unknown_route", "/api/blobs/sha256:0"),
    ];
    get_snapshots(paths).await;
    snapshots("/api/embed", [("ollama_embed_without_encoder", json!({"model": "tiny", "input": "Hello!"}))]).await;
}

#[tokio::test]
async fn llama_server_routes_match_snapshots() {
    let body = json!({"prompt": "Once", "n_predict": 20, "mods": forced_answer(" upon a time.")});
    let bodies = [
        ("llama_completion", body.clone()),
        ("llama_completion_stream", with_fields(body.clone(), &json!({"stream": true}))),
        ("llama_completion_wrong_type", with_fields(body.clone(), &json!({"n_predict": "many"}))),
    ];
    snapshots("/completion", bodies).await;
    snapshots("/tokenize", [("llama_tokenize", json!({"content": "Once upon", "with_pieces": true}))]).await;
    snapshots("/detokenize", [("llama_detokenize_wrong", json!({"tokens": [-1]}))]).await;
}

#[tokio::test]
async fn koboldcpp_routes_match_snapshots() {
    let body = json!({"prompt": "Once", "max_length": 20, "mods": forced_answer(" upon a time.")});
    snapshots("/api/v1/generate", [("kobold_generate", body.clone())]).await;
    let bodies = [
        ("kobold_stream", body.clone()),
        ("kobold_stream_wrong_type", with_fields(body.clone(), &json!({"max_length": "many"}))),
        ("kobold_stream_wrong_token", json!({"input_ids": [-4]})),
    ];
    snapshots("/api/extra/generate/stream", bodies).await;
    get_snapshots([("kobold_model", "/api/v1/model"), ("kobold_unknown_route", "/api/extra/nothing")]).await;
}

#[tokio::test]
async fn attention_routes_match_snapshots() {
    let body = json!({"input_ids": [40, 41], "max_new_tokens": 20, "mods": forced_answer(" upon a time.")});
    let bodies = [
        ("attention_generate", body.clone()),
        ("attention_without_input", json!({"max_new_tokens": 2})),
        ("attention_wrong_token", with_fields(body.clone(), &json!({"input_ids": [40, -1]}))),
    ];
    snapshots("/api/v1/generate", bodies).await;
}

#[tokio::test]
async fn streaming_protocol_over_http_matches_snapshots() {
    let bodies = [
        ("generate", with_fields(completion_request(), &json!({"stream": false}))),
        ("generate_stream", with_fields(completion_request(), &json!({"stream": true}))),
        ("generate_without_prompt", json!({"stream": false})),
        ("generate_wrong_type", with_fields(completion_request(), &json!({"max_tokens": "many"}))),
    ];
    snapshots("/v1/generate", bodies).await;
}

#[tokio::test]
async fn native_routes_match_snapshots() {
    let run = json!({
        "request": {"request_id": "wire-1", "created_at": "2026-01-02T03:04:05Z", "model": "elsewhere"},
        "events": [
            {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 3},
            {"event_type": "Sampled", "step": 1, "sequence_order": 1, "sampled_token": 5, "token_text": " hi"},
            {"event_type": "Added", "step": 1, "sequence_order": 2, "added_tokens": [5], "forced": false},
        ],
        "mod_calls": [], "mod_logs": [], "actions": [],
    });
    let bodies = [
        ("ingest", run.clone()),
        ("ingest_without_events", json!({"request": {"request_id": "wire-2"}})),
        ("ingest_conflict", with_fields(run.clone(), &json!({"events": []}))),
    ];
    snapshots("/ingest", bodies).await;
    let paths = [
        ("run", "/api/v1/runs/wire-1"),
        ("run_events", "/api/v1/runs/wire-1/events"),
        ("unknown_run", "/api/v1/runs/no-such-run"),
        ("wrong_filter", "/api/v1/runs?q=status:odd"),
    ];
    get_snapshots(paths).await;
    snapshots("/api/v1/runs/wire-1/cancel", [("cancel_of_ended_run", json!({}))]).await;
}

#[tokio::test]
async fn models_and_properties_match_snapshots() {
    let paths = [
        ("models", "/v1/models"),
        ("model", "/v1/models/tiny"),
        ("health", "/healthz"),
        ("lora_adapters", "/lora-adapters"),
        ("slot_info_of_unknown_slot", "/v1/slots/99/info"),
        ("kobold_version", "/api/extra/version"),
        ("kobold_info_version", "/api/v1/info/version"),
        ("kobold_max_context_length", "/api/v1/config/max_context_length"),
        ("kobold_max_length", "/api/v1/config/max_length"),
        ("kobold_true_max_context_length", "/api/extra/true_max_context_length"),
        ("attention_model_info", "/api/v1/model/info"),
    ];
    get_snapshots(paths).await;
    snapshots("/models/load", [("load_unknown_model", json!({"model": "huge"}))]).await;
    snapshots("/models/unload", [("unload_unknown_model", json!({"model": "huge"}))]).await;
    snapshots("/props", [("change_props_without_flag", json!({"chat_template": "x"}))]).await;
    snapshots("/lora-adapters", [("scale_unknown_adapter", json!([{"id": 0, "scale": 1.0}]))]).await;
    snapshots("/slots/99?action=erase", [("erase_unknown_slot", json!({}))]).await;
}

#[tokio::test]
async fn embeddings_and_scores_require_a_flag() {
    let body = json!({"model": "tiny", "input": "Once"});
    snapshots("/v1/embeddings", [("embeddings_without_flag", body.clone())]).await;
    snapshots("/embeddings", [("llama_embeddings_without_flag", body.clone())]).await;
    snapshots("/v1/rerank", [("rerank_without_flag", json!({"query": "a", "documents": ["b"]}))]).await;
    snapshots("/v1/classify", [("classify_without_labels", body)]).await;
}

#[tokio::test]
async fn text_routes_match_snapshots() {
    let messages = json!([{"role": "user", "content": "Hello!"}]);
    let template = [("apply_template", json!({"messages": messages})), ("apply_template_without_messages", json!({}))];
    snapshots("/apply-template", template).await;
    snapshots("/v1/chat/completions/input_tokens", [("chat_input_tokens", json!({"messages": messages}))]).await;
    snapshots("/v1/responses/input_tokens", [("response_input_tokens", json!({"input": "Hello!"}))]).await;
    let control = [
        ("control_of_unknown_run", json!({"id": "chatcmpl-1", "action": "reasoning_end"})),
        ("control_without_id", json!({})),
    ];
    snapshots("/v1/chat/completions/control", control).await;
    snapshots("/infill", [("infill_without_prefix", json!({"input_suffix": "a"}))]).await;
    let count =
        [("kobold_tokencount", json!({"prompt": "Once upon"})), ("kobold_tokencount_without_prompt", json!({}))];
    snapshots("/api/extra/tokencount", count).await;
    snapshots("/api/extra/detokenize", [("kobold_detokenize", json!({"ids": [40, 41]}))]).await;
    let tokenize =
        [("attention_tokenize", json!({"text": "Once upon"})), ("attention_tokenize_wrong_type", json!({"text": 1}))];
    snapshots("/api/v1/tokenize", tokenize).await;
    let detokenize = [
        ("attention_detokenize", json!({"tokens": [40, 41]})),
        ("attention_detokenize_wrong_token", json!({"tokens": [-1]})),
    ];
    snapshots("/api/v1/detokenize", detokenize).await;
}

#[tokio::test]
async fn routes_of_runs_match_snapshots() {
    let run = json!({
        "request": {"request_id": "wire-3", "created_at": "2026-01-02T03:04:05Z", "model": "elsewhere"},
        "events": [], "mod_calls": [], "mod_logs": [], "actions": [],
    });
    snapshots("/ingest", [("ingest_without_steps", run)]).await;
    let feedback =
        [("feedback", json!({"rating": 1, "text": "good"})), ("feedback_wrong_rating", json!({"rating": 5}))];
    snapshots("/api/v1/runs/wire-3/feedback", feedback).await;
    let paths = [
        ("feedback_list", "/api/v1/runs/wire-3/feedback"),
        ("feedback_of_unknown_run", "/api/v1/runs/no-such-run/feedback"),
        ("alternatives_of_unknown_run", "/api/v1/runs/no-such-run/alternatives"),
        ("attention_of_unknown_run", "/api/v1/runs/no-such-run/attention?at=1"),
        ("attention_of_run_without_it", "/api/v1/runs/wire-3/attention?at=1"),
        ("columns_of_unknown_run", "/api/v1/runs/no-such-run/columns"),
        ("events_of_unknown_run", "/api/v1/runs/no-such-run/events"),
        ("found_runs", "/api/v1/runs?q=request:wire-3"),
        ("unknown_response", "/v1/responses/resp_1"),
        ("input_items_of_unknown_response", "/v1/responses/resp_1/input_items"),
    ];
    get_snapshots(paths).await;
    snapshots("/api/v1/reruns", [("rerun_without_run", json!({}))]).await;
}

#[tokio::test]
async fn routes_of_mods_require_a_flag() {
    let body = json!({"name": "calm", "source": "def calm(:"});
    snapshots("/api/v1/mods/check", [("check_without_flag", body.clone())]).await;
    snapshots("/v1/mods", [("upload_without_flag", body)]).await;
    snapshots("/v1/mods/nothing/enable", [("enable_without_flag", json!({}))]).await;
    get_snapshots([("versions_of_unknown_mod", "/v1/mods/nothing/versions")]).await;
}
