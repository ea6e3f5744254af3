//! Anthropic's Messages API with a real model. Its weights are random, so a mod forces the answers that tests depend on.

use super::chat::{CALLS, forced_answer};
use super::harness::{ErrorTable, Server, message_of, server, with_fields};
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";

#[expect(clippy::needless_pass_by_value, reason = "callers write json!(…) in place")]
fn message_request(fields: Value) -> Value {
    let body =
        json!({"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "Hello!"}], "seed": 7});
    with_fields(body, &fields)
}

fn tools() -> Value {
    json!([
        {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
        {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}},
                                                                 "required": ["a"], "additionalProperties": false}},
    ])
}

#[tokio::test]
async fn reasoning_stops_at_its_budget() {
    let server = server().await;
    let body = |budget: Value| {
        json!({"max_tokens": 20, "ignore_eos": true, "messages": [{"role": "user", "content": "Hello!"}],
               "mods": [{"name": "force-prefix", "config": {"text": "<think>"}}],
               "thinking": {"type": "enabled", "budget_tokens": budget}})
    };
    let answer = server.answer(MESSAGES, &body(json!(3))).await;
    assert_eq!(
        (&answer["content"][0]["type"], &answer["content"][1]["type"]),
        (&json!("thinking"), &json!("text")),
        "{answer}"
    );
    let (status, answer) = server.post(MESSAGES, &body(json!(0))).await;
    assert_eq!((status, message_of(&answer)), (400, "`thinking.budget_tokens` must be an integer of 1 or more, got 0"));
}

#[tokio::test]
async fn message_has_blocks_of_reasoning_text_and_calls() {
    let server = server().await;
    let body = message_request(json!({"tools": tools(), "mods": forced_answer(&format!("<think>hm</think>{CALLS}"))}));
    let mut answer = server.answer(MESSAGES, &body).await;
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"));
    assert!(answer["usage"]["input_tokens"].is_u64() && answer["usage"]["output_tokens"].as_u64().unwrap() > 10);
    for call in [2, 3] {
        assert!(answer["content"][call]["id"].is_string());
        answer["content"][call]["id"] = "[id]".into();
    }
    insta::assert_json_snapshot!(json!([answer["type"], answer["role"], answer["model"], answer["content"],
                                        answer["stop_reason"], answer["stop_sequence"]]), @r#"
    [
      "message",
      "assistant",
      "tiny",
      [
        {
          "type": "thinking",
          "thinking": "hm",
          "signature": ""
        },
        {
          "type": "text",
          "text": "I look."
        },
        {
          "type": "tool_use",
          "id": "[id]",
          "name": "get_weather",
          "input": {
            "city": "Zürich",
            "celsius": true
          }
        },
        {
          "type": "tool_use",
          "id": "[id]",
          "name": "add",
          "input": {
            "a": 2
          }
        }
      ],
      "tool_use",
      null
    ]
    "#);
}

#[tokio::test]
async fn streamed_message_equals_complete_message() {
    let server = server().await;
    let body = message_request(
        json!({"tools": tools(), "stream": true, "mods": forced_answer(&format!("<think>hm</think>{CALLS}"))}),
    );
    let events = server.events(MESSAGES, &body).await;
    assert!(events.iter().all(|(name, data)| data["type"] == name.as_str()));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).filter(|name| *name != "ping").collect();
    let counts = |usage: &Value| ["input_tokens", "cache_read_input_tokens"].map(|name| usage[name].as_u64().unwrap());
    let end = &events.iter().find(|(name, _)| name == "message_delta").unwrap().1;
    assert_eq!(counts(&events[0].1["message"]["usage"]), counts(&end["usage"]), "the start reports the same usage");
    assert_eq!(names.first(), Some(&"message_start"));
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
    assert_eq!(events[0].1["message"]["content"], json!([]));
    let mut blocks: Vec<Value> = Vec::new();
    let mut open = false;
    for (name, data) in &events {
        match name.as_str() {
            "content_block_start" => {
                assert!(!open && data["index"] == blocks.len());
                open = true;
                blocks.push(data["content_block"].clone());
            }
            "content_block_delta" => {
                assert!(open && data["index"] == blocks.len() - 1);
                let delta = &data["delta"];
                let (field, piece) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", &delta["text"]),
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "input_json_delta" => ("json", &delta["partial_json"]),
                    "signature_delta" => continue,
                    other => panic!("{other}"),
                };
                let last = blocks.last_mut().unwrap();
                let text = last[field].as_str().unwrap_or_default().to_owned() + piece.as_str().unwrap();
                last[field] = text.into();
            }
            "content_block_stop" => open = false,
            "message_delta" => {
                assert_eq!(data["delta"]["stop_reason"], "tool_use");
                assert!(data["usage"]["output_tokens"].as_u64().unwrap() > 10);
            }
            _ => {}
        }
    }
    assert!(!open);
    assert_eq!((&blocks[0]["thinking"], &blocks[1]["text"]), (&json!("hm"), &json!("I look.")));
    let input = |block: &Value| serde_json::from_str::<Value>(block["json"].as_str().unwrap()).unwrap();
    assert_eq!(
        (&blocks[2]["name"], input(&blocks[2])),
        (&json!("get_weather"), json!({"city": "Zürich", "celsius": true}))
    );
    assert_eq!((&blocks[3]["name"], input(&blocks[3])), (&json!("add"), json!({"a": 2})));
}

#[tokio::test]
async fn stop_reason_names_what_ended_the_answer() {
    let server = server().await;
    let reason = async |fields: Value| {
        let answer = server.answer(MESSAGES, &message_request(fields)).await;
        (answer["stop_reason"].as_str().unwrap().to_owned(), answer["stop_sequence"].clone())
    };
    assert_eq!(reason(json!({"mods": forced_answer("Yes.")})).await, ("end_turn".into(), Value::Null));
    assert_eq!(reason(json!({"max_tokens": 2, "ignore_eos": true})).await, ("max_tokens".into(), Value::Null));
    let without_limit = json!({"max_tokens": null, "mods": forced_answer("Yes.")});
    assert_eq!(reason(without_limit).await.0, "end_turn", "only Anthropic's own server requires a limit");
    let stopped = reason(json!({"mods": forced_answer("One, two, three"), "stop_sequences": [" two"]})).await;
    assert_eq!(stopped, ("stop_sequence".into(), json!(" two")));
}

#[tokio::test]
async fn tool_results_are_accepted_and_tokens_counted() {
    let server = server().await;
    let body = message_request(json!({"system": "Be short.", "tools": tools(), "messages": [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "3"}]}]}));
    let count = server.answer("/v1/messages/count_tokens", &body).await["input_tokens"].as_u64().unwrap();
    let mut request = body.clone();
    request["mods"] = forced_answer("Three.");
    let answer = server.answer(MESSAGES, &request).await;
    assert_eq!(answer["content"], json!([{"type": "text", "text": "Three."}]));
    let usage = &answer["usage"];
    let reported = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(reported, count);
}

#[tokio::test]
async fn chosen_tool_is_called() {
    let server = server().await;
    for choice in [json!({"type": "tool", "name": "add"}), json!({"type": "any", "disable_parallel_tool_use": true})] {
        let tools = json!([tools()[1]]);
        let body = message_request(json!({"tools": tools, "tool_choice": choice, "temperature": 3.0}));
        let answer = server.answer(MESSAGES, &body).await;
        assert_eq!((&answer["stop_reason"], &answer["content"][0]["name"]), (&json!("tool_use"), &json!("add")));
        assert!(answer["content"][0]["input"]["a"].is_u64());
    }
}

#[tokio::test]
async fn errors_have_anthropic_format() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for fields in [
        json!({"messages": []}),
        json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        json!({"tools": [{"name": "f"}]}),
        json!({"tool_choice": {"type": "maybe"}}),
        json!({"temperature": "hot"}),
        json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "a b", "input_schema": {}}]}),
        json!({"output_format": {"type": "json_schema", "schema": {"type": "no type"}}}),
    ] {
        let answer = server.post(MESSAGES, &message_request(fields.clone())).await;
        assert_eq!((answer.0, &answer.1["type"]), (400, &json!("error")), "{fields}");
        assert_eq!(answer.1["error"]["type"], "invalid_request_error");
        errors.add(fields, &answer);
    }
    insta::assert_snapshot!("message_errors", errors);
    let (_, answer) = server.post(MESSAGES, &message_request(json!({"system": "bread ".repeat(9000)}))).await;
    let error = &answer["error"];
    assert_eq!(error["type"], "invalid_request_error", "{answer}");
    let (tokens, context) = (error["n_prompt_tokens"].as_u64().unwrap(), error["n_ctx"].as_u64().unwrap());
    assert!(tokens > context, "{answer}");
    let message = format!("prompt is too long: {tokens} tokens > {} maximum; the prompt has", context - 1);
    assert!(message_of(&answer).starts_with(&message), "{answer}");
    let (status, answer) = server.get(MESSAGES).await;
    assert_eq!((status, &answer["type"]), (405, &json!("error")));
    let body = message_request(json!({"mods": ["refuse"], "stream": true}));
    let (status, answer) = server.post(MESSAGES, &body).await;
    assert_eq!((status, &answer["error"]["message"]), (422, &json!("not today")));
}

#[tokio::test]
async fn answer_can_be_constrained() {
    let server = server().await;
    let format = json!({"type": "json_schema", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}},
                                                          "required": ["ok"], "additionalProperties": false}});
    for fields in [json!({"output_config": {"format": format, "effort": "low"}}), json!({"output_format": format})] {
        let answer = server.answer(MESSAGES, &message_request(fields)).await;
        let text = answer["content"].as_array().unwrap().iter().find_map(|block| block["text"].as_str()).unwrap();
        assert!(serde_json::from_str::<Value>(text).unwrap()["ok"].is_boolean(), "{answer}");
    }
}

#[tokio::test]
async fn system_message_may_follow_user_message() {
    let messages = json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]);
    server().await.answer(MESSAGES, &message_request(json!({"messages": messages, "max_tokens": 1}))).await;
}

/// Claude Code starts the system prompt with a header whose checksum changes with each request.
#[tokio::test]
async fn billing_header_does_not_prevent_cached_tokens() {
    let server = Server::start(&["-np", "1"]);
    server.wait_ready().await;
    let mut cached = Vec::new();
    for checksum in ["a5145", "1c8b4"] {
        let header = format!("x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch={checksum};");
        let system = json!([{"type": "text", "text": header}, {"type": "text", "text": "Be short. ".repeat(20)}]);
        let usage =
            server.answer(MESSAGES, &message_request(json!({"system": system, "max_tokens": 1}))).await["usage"]
                .clone();
        cached.push((usage["cache_read_input_tokens"].as_u64().unwrap(), usage["input_tokens"].as_u64().unwrap()));
    }
    assert!(cached[1].0 > 100 && cached[1].1 < 20, "{cached:?}");
}

#[tokio::test]
async fn anthropic_clients_receive_anthropic_model_list() {
    let server = server().await;
    let get = |path: &str| server.request(reqwest::Method::GET, path).header("anthropic-version", "2023-06-01").send();
    let list: Value = get("/v1/models").await.unwrap().json().await.unwrap();
    let model = list["data"][0].clone();
    assert_eq!(
        (&model["type"], &model["id"], &model["display_name"]),
        (&json!("model"), &json!("tiny"), &json!("tiny"))
    );
    assert!(chrono::DateTime::parse_from_rfc3339(model["created_at"].as_str().unwrap()).is_ok(), "{model}");
    assert!(model["max_input_tokens"].as_u64().unwrap() > 0, "{model}");
    assert_eq!(
        (&list["has_more"], &list["first_id"], &list["last_id"]),
        (&json!(false), &json!("tiny"), &json!("tiny"))
    );
    let one: Value = get("/v1/models/tiny").await.unwrap().json().await.unwrap();
    assert_eq!(one, model);
}
