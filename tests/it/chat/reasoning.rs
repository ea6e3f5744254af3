//! Reasoning: separated from text, counted, limited, disabled.

use super::{CHAT, assemble, chat, chunks, forced_answer};
use crate::harness::server;
use serde_json::{Value, json};

#[tokio::test]
async fn reasoning_tokens_are_counted() {
    let server = server().await;
    let text = "<think>one two three</think>\n\nfour";
    let answer = server.answer(CHAT, &chat(json!({"mods": forced_answer(text)}))).await;
    let usage = &answer["usage"];
    let reasoning = server.answer("/tokenize", &json!({"content": "<think>one two three</think>"})).await;
    assert_eq!(
        usage["completion_tokens_details"]["reasoning_tokens"],
        reasoning["tokens"].as_array().unwrap().len(),
        "{usage}"
    );
    let body = json!({"input": "Hello!", "mods": forced_answer(text)});
    let details = &server.answer("/v1/responses", &body).await["usage"]["output_tokens_details"];
    assert_eq!(details["reasoning_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]);
    // `deepseek-legacy` has the same effect as the default format.
    let older =
        server.answer(CHAT, &chat(json!({"mods": forced_answer(text), "reasoning_format": "deepseek-legacy"}))).await;
    assert_eq!(older["choices"][0]["message"], answer["choices"][0]["message"]);
    let inside_text =
        server.answer(CHAT, &chat(json!({"mods": forced_answer(text), "reasoning_format": "none"}))).await;
    assert_eq!(
        inside_text["usage"]["completion_tokens_details"]["reasoning_tokens"], 0,
        "the reasoning is part of the text"
    );
}

#[tokio::test]
async fn reasoning_is_separated_from_text() {
    let body = chat(json!({"mods": forced_answer("<think>\nThe sum\nis 5. </think>\n\nFive.")}));
    let answer = server().await.answer(CHAT, &body).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("The sum\nis 5."), &json!("Five.")));
    let streamed = assemble(&chunks(&body).await, 0);
    assert_eq!((&streamed["reasoning"], &streamed["content"]), (&json!("The sum\nis 5."), &json!("Five.")));
    let unparsed = chat(json!({"mods": forced_answer("<think>a</think>b"), "reasoning_format": "none"}));
    let answer = server().await.answer(CHAT, &unparsed).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "<think>a</think>b");
}

#[tokio::test]
async fn reasoning_can_be_disabled() {
    let server = server().await;
    for fields in [
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
        json!({"reasoning_effort": "none"}),
        json!({"reasoning_budget_tokens": 0}),
    ] {
        let prompt =
            server.answer("/apply-template", &chat(fields.clone())).await["prompt"].as_str().unwrap().to_owned();
        assert!(prompt.ends_with("<think>\n\n</think>\n\n"), "{fields}: {prompt}");
    }
}

/// Returns the id of a text that is one token.
async fn token(text: &str) -> i64 {
    let tokens = server().await.answer("/tokenize", &json!({"content": text})).await["tokens"].clone();
    assert_eq!(tokens.as_array().unwrap().len(), 1, "{text}");
    tokens[0].as_i64().unwrap()
}

#[tokio::test]
async fn reasoning_ends_when_budget_is_spent() {
    let server = server().await;
    let (open, close) = (token("<think>").await, token("</think>").await);
    let forced_start = json!([{"name": "force-prefix", "config": {"text": "<think>"}}]);
    for (budget, stream) in [(5, false), (1, false), (7, true)] {
        let body =
            chat(json!({"mods": forced_start, "reasoning_budget_tokens": budget, "max_tokens": 16, "ignore_eos": true,
                               "logprobs": true, "banned_tokens": [open, close]}));
        let entries: Vec<Value> = if stream {
            let entries = |chunk: &Value| chunk["choices"][0]["logprobs"]["content"].as_array().cloned();
            chunks(&body).await.iter().filter_map(entries).flatten().collect()
        } else {
            let answer = server.answer(CHAT, &body).await;
            let message = &answer["choices"][0]["message"];
            assert!(!message["reasoning_content"].as_str().unwrap().is_empty(), "{answer}");
            assert!(!message["content"].as_str().unwrap().contains("think>"), "{answer}");
            answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone()
        };
        let ids: Vec<i64> = entries.iter().map(|entry| entry["id"].as_i64().unwrap()).collect();
        let position_of = |token: i64| ids.iter().position(|&id| id == token).unwrap();
        assert_eq!((position_of(open), position_of(close), ids.len()), (0, budget + 1, 16), "{ids:?}");
    }
    let body = chat(json!({"mods": forced_start, "thinking_budget_tokens": 2, "reasoning_budget_message": " Enough.",
                           "max_tokens": 16, "ignore_eos": true, "banned_tokens": [open, close]}));
    let answer = server.answer(CHAT, &body).await;
    let reasoning = answer["choices"][0]["message"]["reasoning_content"].as_str().unwrap();
    assert!(reasoning.ends_with(" Enough."), "{answer}");
    let run = server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
    let events = server.get(&format!("/api/v1/runs/{}/events", run["run"]["run_id"].as_str().unwrap())).await.1;
    assert!(events.to_string().contains("the budget of 2 reasoning tokens is used up"), "{events}");
}

#[tokio::test]
async fn constraint_applies_after_ended_reasoning() {
    let mut body = chat(json!({"reasoning_budget": 4, "ignore_eos": true, "temperature": 3.0, "max_tokens": 100,
        "banned_tokens": [token("</think>").await],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object",
            "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}}}}));
    let forced_start = json!({"role": "assistant", "content": "", "reasoning_content": "so"});
    body["messages"].as_array_mut().unwrap().push(forced_start);
    let answer = server().await.answer(CHAT, &body).await;
    let message = &answer["choices"][0]["message"];
    assert!(message["reasoning_content"].is_string(), "{answer}");
    let content: Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
    assert!(content["ok"].is_boolean(), "{answer}");
}

#[tokio::test]
async fn reasoning_can_be_ended_by_client() {
    const CONTROL: &str = "/v1/chat/completions/control";
    const CONTENT: &str = "\"content\":\"";
    let server = server().await;
    let end = |id: &str| json!({"id": id, "action": "reasoning_end"});
    let forced_start = json!([{"name": "force-prefix", "config": {"text": "<think>"}}]);
    let tokens = [token("<think>").await, token("</think>").await];
    let start = async |controlled: bool, max_tokens: u32| {
        let body = chat(json!({"mods": forced_start, "max_tokens": max_tokens, "ignore_eos": true,
            "banned_tokens": tokens, "reasoning_control": controlled, "stream": true}));
        let response = server.request(reqwest::Method::POST, CHAT).json(&body).send().await.unwrap();
        let id = format!("chatcmpl-{}", response.headers()["x-thunder-run-id"].to_str().unwrap());
        (response, id)
    };
    for (controlled, expected) in [
        (true, json!({"success": true})),
        (false, json!({"success": false, "message": "the request did not set \"reasoning_control\": true"})),
    ] {
        // Long enough to receive a control request during generation.
        let (mut response, id) = start(controlled, 2000).await;
        // The reasoning cannot be ended before the first token.
        let done = loop {
            let done = server.answer(CONTROL, &end(&id)).await;
            if done["message"] != "the answer is not reasoning" {
                break done;
            }
        };
        assert_eq!(done, expected);
        // The answer begins at the end of the reasoning.
        let mut text = Vec::new();
        while controlled && !String::from_utf8_lossy(&text).contains(CONTENT) {
            text.extend(response.chunk().await.unwrap().expect("the reasoning does not end"));
        }
        while !controlled && String::from_utf8_lossy(&text).matches("reasoning_content").count() < 100 {
            text.extend(response.chunk().await.unwrap().expect("the reasoning goes on"));
            assert!(!String::from_utf8_lossy(&text).contains(CONTENT), "the reasoning ended without permission");
        }
    }
    let (response, id) = start(true, 24).await;
    assert!(!response.text().await.unwrap().contains(CONTENT), "the reasoning ended without a control request");
    let after_end = server.answer(CONTROL, &end(&id)).await;
    assert_eq!((&after_end["success"], after_end["message"].is_string()), (&json!(false), true), "{after_end}");
    for (body, name) in [
        (json!({"action": "reasoning_end"}), "id"),
        (json!({"id": "x", "action": "stop"}), "action"),
        (json!({"id": "x"}), "action"),
    ] {
        let (status, error) = server.post(CONTROL, &body).await;
        assert!(status == 400 && error["error"]["param"] == name, "{error}");
    }
    assert_eq!(server.answer(CONTROL, &end("x")).await["success"], false);
}
