//! The messages of the protocol's specification, verbatim.

use super::client::COMPRESSED;
use super::{Client, assemble_text, with_type};
use crate::harness::{Server, folder, server};
use serde_json::{Value, json};
use thunder::events::system;

#[tokio::test]
async fn run_sends_init_tokens_and_completion() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    let messages = client
        .run(&json!({
            "type": "config",
            "prompt": "Write a short story about a robot learning to paint.",
            "parameters": {"max_tokens": 20, "temperature": 0.7},
            "options": {"stream": true}
        }))
        .await;
    let init = &messages[0];
    assert_eq!(init["type"], "init");
    let id = init["request_id"].as_str().unwrap();
    assert!(id.starts_with("gen_"), "{init}");
    assert_eq!(init["model"], "tiny");
    assert!(init["model_info"]["max_tokens"].as_u64().unwrap() >= 2048, "{init}");
    assert!(init["model_info"]["quantization"].is_string() && init["model_info"]["version"].is_string());
    let completion = messages.last().unwrap();
    assert_eq!(completion["type"], "completion", "{completion}");
    assert_eq!(completion["request_id"], id);
    assert!(["length", "stop"].contains(&completion["finish_reason"].as_str().unwrap()));
    let usage = &completion["usage"];
    let tokens: Vec<&Value> = with_type(&messages, "token").collect();
    assert_eq!(usage["completion_tokens"], tokens.len());
    assert_eq!(usage["total_tokens"].as_u64().unwrap(), usage["prompt_tokens"].as_u64().unwrap() + tokens.len() as u64);
    assert!(completion.get("timing").is_none());
    let mut text = String::new();
    for (index, token) in tokens.iter().enumerate() {
        text += token["token"].as_str().unwrap();
        assert_eq!(token["generated_text"], text);
        assert_eq!(token["index"], index + 1);
        let last = index + 1 == tokens.len() && completion["finish_reason"] == "length";
        assert_eq!(token["finished"], last, "{token}");
        assert_eq!(token["finish_reason"].is_null(), !last, "{token}");
        assert!(token.get("token_id").is_none() && token.get("logprobs").is_none() && token.get("timing").is_none());
    }
    assert_eq!(completion["generated_text"], text);
}

#[tokio::test]
async fn complete_config_of_contract_is_accepted() {
    let server = server().await;
    let mut client = Client::connect_with(server, &[COMPRESSED]).await.unwrap();
    let messages = client
        .run(&json!({
            "type": "config",
            "model": "tiny",
            "prompt": "Once upon a time",
            "parameters": {"max_tokens": 24, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1,
                           "stop": ["\n\n", "THE END"], "seed": 3},
            "options": {"stream": true, "echo_prompt": true, "include_token_ids": true, "include_logprobs": true,
                        "include_timing": true}
        }))
        .await;
    let echo = &messages[1];
    assert_eq!((&echo["token"], &echo["echo"]), (&json!("Once upon a time"), &json!(true)), "{echo}");
    let token = &messages[2];
    assert!(token["token_id"].is_u64(), "{token}");
    assert!(token["generated_text"].as_str().unwrap().starts_with("Once upon a time"));
    let logprobs = token["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 5);
    assert!(logprobs.iter().all(|entry| entry["token"].is_string() && entry["logprob"].as_f64().unwrap() <= 0.0));
    assert!(token["timing"]["total_ms"].as_f64().unwrap() >= token["timing"]["token_ms"].as_f64().unwrap());
    let completion = messages.last().unwrap();
    let timing = &completion["timing"];
    assert!(timing["total_ms"].as_f64().unwrap() >= timing["first_token_ms"].as_f64().unwrap(), "{completion}");
    assert_eq!(completion["generated_text"], assemble_text(&messages));
}

#[tokio::test]
async fn delta_mode_omits_text_so_far() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    let config = json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 12, "ignore_eos": true},
                        "options": {"generated_text": "delta"}});
    let messages = client.run(&config).await;
    assert!(with_type(&messages, "token").all(|token| token.get("generated_text").is_none()));
    assert_eq!(messages.last().unwrap()["generated_text"], assemble_text(&messages));
    let config = json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 12, "ignore_eos": true},
                        "options": {"stream": false}});
    let kinds: Vec<Value> = client.run(&config).await.iter().map(|message| message["type"].clone()).collect();
    assert_eq!(kinds, ["init", "completion"]);
}

#[tokio::test]
async fn backtrack_counts_only_sent_tokens() {
    let mut client = Client::connect(server().await).await;
    let config = json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 12, "temperature": 0},
                        "options": {"generated_text": "delta"},
                        "mods": ["force_end", "continue_after_end", "remove_four"]});
    let messages = client.run(&config).await;
    let mut sent: Vec<&str> = Vec::new();
    let mut removed_tokens = Vec::new();
    for message in &messages {
        if message["type"] == "token" {
            sent.push(message["token"].as_str().unwrap());
        } else if message["type"] == "backtrack" {
            let count = message["removed_tokens"].as_u64().unwrap() as usize;
            let removed = sent.split_off(sent.len() - count);
            assert_eq!(removed.concat(), message["removed_text"], "{message}");
            removed_tokens.push(count);
        }
    }
    assert_eq!(removed_tokens, [2], "the end token was not sent, and the last of the four tokens not yet");
}

#[tokio::test]
async fn generated_text_ends_before_stop_string() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    let mut config = json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 40, "temperature": 0,
                            "ignore_eos": true}});
    let full = client.run(&config).await;
    let text = full.last().unwrap()["generated_text"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(20).take(3).collect();
    config["parameters"]["stop"] = json!([stop]);
    let stopped = client.run(&config).await;
    let completion = stopped.last().unwrap();
    assert_eq!((&completion["finish_reason"], &completion["stop_string"]), (&json!("stop"), &json!(stop)));
    assert_eq!(completion["generated_text"], text.split(&stop).next().unwrap());
    assert_eq!(assemble_text(&stopped), text.split(&stop).next().unwrap());
}

#[tokio::test]
async fn backtrack_message_contains_removed_text() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    let config = json!({"type": "config", "prompt": "Once", "mods": ["replace_start"],
                        "parameters": {"max_tokens": 24, "ignore_eos": true, "seed": 5}});
    let messages = client.run(&config).await;
    let backtrack = with_type(&messages, "backtrack").next().expect("a backtrack");
    assert!(backtrack["removed_tokens"].as_u64().unwrap() > 0, "{backtrack}");
    let completion = messages.last().unwrap();
    assert_eq!(assemble_text(&messages), completion["generated_text"].as_str().unwrap());
    assert!(completion["generated_text"].as_str().unwrap().starts_with("Instead"), "{completion}");
    for message in messages.iter().filter(|message| message["type"] == "token" || message["type"] == "backtrack") {
        let index = message["index"].as_u64().unwrap() as usize;
        let so_far: Vec<Value> = messages
            .iter()
            .filter(|other| other["index"].as_u64().is_some_and(|other| other as usize <= index))
            .cloned()
            .collect();
        assert_eq!(message["generated_text"], assemble_text(&so_far));
    }
}

#[tokio::test]
async fn removal_of_tokens_without_text_is_reported() {
    let mods = folder();
    // A control token has no text. It is removed after it was sent.
    let source = "from thunder import Added, ForwardPass, mod\n\n\n@mod\ndef take_back(event, actions):\n    \
                  if isinstance(event, ForwardPass) and event.step == 2:\n        return actions.force_tokens([1])\n    \
                  if isinstance(event, Added) and event.step == 3:\n        return actions.backtrack(2)\n";
    std::fs::write(mods.join("take_back.py"), source).unwrap();
    let server = Server::start(&["--mods-dir", mods.to_str().unwrap()]);
    server.wait_ready().await;
    let mut client = Client::connect(&server).await;
    let config = json!({"type": "config", "prompt": "Once", "mods": ["take_back"],
                        "parameters": {"max_tokens": 6, "ignore_eos": true, "seed": 5}});
    let messages = client.run(&config).await;
    let backtrack = with_type(&messages, "backtrack").next().expect("a backtrack");
    assert_eq!(
        (&backtrack["removed_tokens"], &backtrack["removed_characters"], &backtrack["removed_text"]),
        (&json!(1), &json!(0), &json!("")),
        "{messages:?}"
    );
    let completion = messages.last().unwrap();
    let sent = with_type(&messages, "token").count() as u64;
    assert_eq!(completion["usage"]["completion_tokens"], sent - 1, "{messages:?}");
}

#[tokio::test]
async fn error_contains_partial_text() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    let config = json!({"type": "config", "prompt": "Once", "mods": ["refuse_late"],
                        "parameters": {"max_tokens": 40, "ignore_eos": true}});
    let messages = client.run(&config).await;
    let error = messages.last().unwrap();
    assert_eq!((&error["type"], &error["error"]), (&json!("error"), &json!("content_filter")), "{error}");
    assert_eq!((&error["message"], &error["recoverable"]), (&json!("enough"), &json!(false)));
    assert_eq!(error["request_id"], messages[0]["request_id"]);
    assert!(!error["generated_text"].as_str().unwrap().is_empty());
    assert_eq!(error["generated_text"], assemble_text(&messages));
    assert!(error["usage"]["completion_tokens"].as_u64().unwrap() > 0);
    // The connection stays open: the client may retry with other parameters.
    let retry = client.run(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 3}})).await;
    assert_eq!(retry.last().unwrap()["type"], "completion");
}

#[tokio::test]
async fn run_without_permitted_tokens_is_an_invalid_request() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    let all: Vec<u32> = (0..640).collect();
    let config =
        json!({"type": "config", "prompt": "Once", "mods": ["replace_start"], "parameters": {"banned_tokens": all}});
    let error = client.run(&config).await.pop().unwrap();
    assert_eq!((&error["error"], &error["recoverable"]), (&json!("invalid_request"), &json!(false)), "{error}");
    assert_eq!(
        error["message"],
        "no token can be drawn: mods, bans and biases leave no token with a probability above 0"
    );
    let (status, error) = server.post("/v1/generate", &json!({"prompt": "Once", "banned_tokens": all})).await;
    assert_eq!((status, &error["error"]), (422, &json!("invalid_request")), "{error}");
}

#[tokio::test]
async fn timed_out_run_returns_partial_text() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    let mut config = super::endless();
    config["options"]["timeout_ms"] = 150.into();
    config["options"]["generated_text"] = "delta".into();
    let messages = client.run(&config).await;
    let error = messages.last().unwrap();
    assert_eq!((&error["error"], &error["recovery_action"]), (&json!("timeout"), &json!("retry")), "{error}");
    assert_eq!(error["generated_text"], assemble_text(&messages));
}

#[tokio::test]
async fn several_runs_share_a_connection() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    let ids = ["a", "b", "c"].map(|name| format!("{name}-{}", system::new_id()));
    for id in &ids {
        client
            .send(&json!({"type": "config", "request_id": id, "prompt": "Once",
                          "parameters": {"max_tokens": 30, "ignore_eos": true}}))
            .await;
    }
    let mut messages = Vec::new();
    while with_type(&messages, "completion").count() < ids.len() {
        messages.push(client.message().await);
    }
    for id in &ids {
        let of_run: Vec<Value> = messages.iter().filter(|message| message["request_id"] == *id).cloned().collect();
        assert_eq!(of_run[0]["type"], "init");
        assert_eq!(of_run.last().unwrap()["generated_text"], assemble_text(&of_run));
        assert_eq!(with_type(&of_run, "token").count(), 30);
    }
}

#[tokio::test]
async fn api_documents_describe_protocol() {
    let server = server().await;
    let (status, document) = server.get("/api/v1/asyncapi.json").await;
    assert_eq!((status, &document["asyncapi"]), (200, &json!("3.0.0")));
    assert_eq!(document["channels"]["generate"]["address"], "/generate");
    for name in
        ["config", "control", "feedback", "resume", "init", "token", "backtrack", "completion", "error", "status"]
    {
        assert!(document["components"]["messages"][format!("generate_{name}")]["payload"].is_object(), "{name}");
    }
    let (_, document) = server.get("/api/v1/openapi.json").await;
    assert!(document["paths"]["/v1/generate"]["post"].is_object());
    assert!(document["paths"]["/api/v1/runs/{id}/feedback"]["post"].is_object());
}
