//! OpenAI's Responses API with a real model. Its weights are random, so a mod forces the answers that tests depend on.

use super::chat::{CALLS, forced_answer};
use super::harness::{Server, server, with_fields};
use serde_json::{Value, json};

const RESPONSES: &str = "/v1/responses";

#[expect(clippy::needless_pass_by_value, reason = "callers write json!(…) in place")]
fn response_request(fields: Value) -> Value {
    with_fields(json!({"input": "Hello!", "max_output_tokens": 200, "seed": 7}), &fields)
}

fn tools() -> Value {
    json!([
        {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
        {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}},
         "required": ["a"], "additionalProperties": false}, "strict": false},
    ])
}

/// Returns items with their ids redacted.
fn without_ids(items: &Value) -> Value {
    let mut items = items.clone();
    for item in items.as_array_mut().unwrap() {
        for field in ["id", "call_id"] {
            if item.get(field).is_some() {
                assert!(item[field].is_string());
                item[field] = "[id]".into();
            }
        }
    }
    items
}

#[tokio::test]
async fn response_consists_of_items() {
    let server = server().await;
    let body = response_request(
        json!({"tools": tools(), "mods": forced_answer(&format!("<think>hm</think>{CALLS}")), "metadata": {"a": "b"}}),
    );
    let response = server.answer(RESPONSES, &body).await;
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(response["metadata"], json!({"a": "b"}));
    assert!(response["usage"]["total_tokens"].as_u64().unwrap() > 20);
    insta::assert_json_snapshot!(without_ids(&response["output"]), @r#"
    [
      {
        "type": "reasoning",
        "id": "[id]",
        "summary": [],
        "content": [
          {
            "type": "reasoning_text",
            "text": "hm"
          }
        ],
        "encrypted_content": null,
        "status": "completed"
      },
      {
        "type": "message",
        "id": "[id]",
        "status": "completed",
        "role": "assistant",
        "content": [
          {
            "type": "output_text",
            "text": "I look.",
            "annotations": [],
            "logprobs": []
          }
        ]
      },
      {
        "type": "function_call",
        "id": "[id]",
        "status": "completed",
        "call_id": "[id]",
        "name": "get_weather",
        "arguments": "{\"city\": \"Zürich\", \"celsius\": true}"
      },
      {
        "type": "function_call",
        "id": "[id]",
        "status": "completed",
        "call_id": "[id]",
        "name": "add",
        "arguments": "{\"a\": 2}"
      }
    ]
    "#);
}

#[tokio::test]
async fn streamed_response_equals_complete_response() {
    let server = server().await;
    let body = response_request(
        json!({"tools": tools(), "stream": true, "mods": forced_answer(&format!("<think>hm</think>{CALLS}"))}),
    );
    let events = server.events(RESPONSES, &body).await;
    for (number, (name, data)) in events.iter().enumerate() {
        assert_eq!((&data["type"], &data["sequence_number"]), (&json!(name), &json!(number)));
    }
    assert_eq!(events[0].0, "response.created");
    assert_eq!(events[1].0, "response.in_progress");
    let (last, completed) = events.last().unwrap();
    assert_eq!(last, "response.completed");
    assert!(
        completed["timings"]["predicted_n"].as_u64() > Some(10),
        "the event has the timings of llama-server: {completed}"
    );
    let output = &completed["response"]["output"];
    // Each item ends as in the complete response, and its deltas form its text.
    let done: Vec<Value> =
        events.iter().filter(|(name, _)| name == "response.output_item.done").map(|(_, d)| d["item"].clone()).collect();
    assert_eq!(&Value::from(done), output);
    let pieces = |kind: &str, index: usize| -> String {
        let deltas = events.iter().filter(|(name, data)| name == kind && data["output_index"] == index);
        deltas.map(|(_, data)| data["delta"].as_str().unwrap()).collect()
    };
    assert_eq!(pieces("response.reasoning_text.delta", 0), "hm");
    assert_eq!(pieces("response.output_text.delta", 1), "I look.");
    assert_eq!(pieces("response.function_call_arguments.delta", 3), "{\"a\": 2}");
    let complete = server.answer(RESPONSES, &response_request(json!({"tools": tools(), "mods": body["mods"]}))).await;
    assert_eq!(without_ids(output), without_ids(&complete["output"]));
}

#[tokio::test]
async fn stream_of_a_failed_run_ends_with_the_failed_response() {
    let body = response_request(json!({"stream": true, "ignore_eos": true, "mods": ["refuse_late"]}));
    let events = server().await.events(RESPONSES, &body).await;
    let [.., (error, _), (failed, data)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((error.as_str(), failed.as_str()), ("error", "response.failed"));
    let response = &data["response"];
    assert_eq!((&response["id"], &response["status"]), (&events[0].1["response"]["id"], &json!("failed")));
    assert_eq!(
        (&response["error"]["message"], response["error"]["code"].is_string()),
        (&json!("enough"), true),
        "{data}"
    );
}

#[tokio::test]
async fn retracted_text_is_removed_from_the_open_item() {
    let server = server().await;
    let fields = json!({"stream": true, "mods": ["replace_start"], "max_output_tokens": 16, "ignore_eos": true});
    let events = server.events(RESPONSES, &response_request(fields)).await;
    assert!(events.iter().any(|(name, data)| name == "thunder.retract" && data["chars"].as_u64() > Some(0)));
    let text = |name: &str| &events.iter().find(|(found, _)| found == name).expect(name).1;
    let whole = &events.last().unwrap().1["response"]["output"][0]["content"][0]["text"];
    assert!(whole.as_str().unwrap().starts_with("Instead"), "{whole}");
    assert_eq!(&text("response.output_text.done")["text"], whole);
    assert_eq!(&text("response.content_part.done")["part"]["text"], whole);
    assert_eq!(&text("response.output_item.done")["item"]["content"][0]["text"], whole);
}

#[tokio::test]
async fn items_are_accepted_as_input_and_tokens_counted() {
    let server = server().await;
    let body = response_request(json!({"instructions": "Be short.", "tools": tools(), "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{\"a\": 1}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"}]}));
    let count = server.answer("/v1/responses/input_tokens", &body).await;
    assert_eq!(count["object"], "response.input_tokens");
    let mut request = body.clone();
    request["mods"] = forced_answer("Three.");
    let response = server.answer(RESPONSES, &request).await;
    assert_eq!(response["output"][0]["content"][0]["text"], "Three.");
    assert_eq!(response["usage"]["input_tokens"], count["input_tokens"]);
    assert_eq!(server.answer("/responses/input_tokens", &body).await, count);
}

#[tokio::test]
async fn truncated_response_is_incomplete() {
    let body = response_request(json!({"max_output_tokens": 2, "ignore_eos": true}));
    let response = server().await.answer(RESPONSES, &body).await;
    assert_eq!(
        (&response["status"], &response["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
}

#[tokio::test]
async fn only_the_cut_item_is_incomplete() {
    let server = server().await;
    for (text, statuses) in [
        ("<think>hm, so", json!(["incomplete"])),
        ("<think>hm</think>Hi", json!(["completed", "incomplete"])),
        (
            "<think>hm</think>Hi.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": ",
            json!(["completed", "completed", "incomplete"]),
        ),
    ] {
        let tokens = server.answer("/tokenize", &json!({"content": text})).await["tokens"].as_array().unwrap().len();
        let mods = json!([{"name": "force-prefix", "config": {"text": text}}]);
        let fields = json!({"tools": tools(), "mods": mods, "max_output_tokens": tokens, "stream": true});
        let events = server.events(RESPONSES, &response_request(fields)).await;
        let (last, data) = events.last().unwrap();
        assert_eq!(last, "response.incomplete", "{text}");
        let statuses_of = |items: Vec<&Value>| items.iter().map(|item| item["status"].clone()).collect::<Value>();
        let done = events.iter().filter(|(name, _)| name == "response.output_item.done");
        assert_eq!(statuses_of(done.map(|(_, data)| &data["item"]).collect()), statuses, "{text}");
        let output = &data["response"]["output"];
        assert_eq!(statuses_of(output.as_array().unwrap().iter().collect()), statuses, "{output}");
    }
}

#[tokio::test]
async fn response_matches_requested_format() {
    let server = server().await;
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false});
    let body = response_request(
        json!({"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}, "temperature": 3.0}),
    );
    let response = server.answer(RESPONSES, &body).await;
    let text = response["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(text).unwrap()["ok"].is_boolean(), "{text}");
    let body = response_request(
        json!({"tools": tools(), "tool_choice": {"type": "function", "name": "add"}, "temperature": 3.0}),
    );
    assert_eq!(server.answer(RESPONSES, &body).await["output"][0]["name"], "add");
}

#[tokio::test]
async fn response_continues_previous_response() {
    let server = server().await;
    let first = server
        .answer(RESPONSES, &response_request(json!({"mods": forced_answer("<think>hm</think>Hello, Ann.")})))
        .await;
    let id = first["id"].as_str().unwrap();
    assert_eq!(first["store"], true);
    assert_eq!(server.get(&format!("/v1/responses/{id}")).await, (200, first.clone()));
    let continuation = json!({"previous_response_id": id, "input": "And now?"});
    let complete = json!({"input": [
        {"role": "user", "content": "Hello!"},
        first["output"][0],
        first["output"][1],
        {"role": "user", "content": "And now?"},
    ]});
    let count = server.answer("/v1/responses/input_tokens", &response_request(continuation.clone())).await;
    assert_eq!(server.answer("/v1/responses/input_tokens", &response_request(complete)).await, count);
    let mut streamed = response_request(continuation);
    streamed["stream"] = true.into();
    let events = server.events(RESPONSES, &streamed).await;
    let second = &events.last().unwrap().1["response"];
    assert_eq!(second["previous_response_id"], first["id"]);
    // The slot still contains the reasoning of the first answer, so the prompt may be longer than counted.
    assert!(second["usage"]["input_tokens"].as_u64() >= count["input_tokens"].as_u64());
    let third = server
        .answer(RESPONSES, &response_request(json!({"previous_response_id": second["id"], "store": false})))
        .await;
    assert!(third["usage"]["input_tokens"].as_u64() > second["usage"]["input_tokens"].as_u64());
    let path = format!("/v1/responses/{id}");
    let listed = format!("/v1/responses/{}/input_items", second["id"].as_str().unwrap());
    let (_, page) = server.get(&format!("{listed}?limit=3&order=asc")).await;
    let kinds: Vec<&str> = page["data"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!((kinds, &page["has_more"]), (vec!["message", "reasoning", "message"], &json!(true)), "{page}");
    let (_, rest) = server.get(&format!("{listed}?order=asc&after={}", page["last_id"].as_str().unwrap())).await;
    assert_eq!(rest["data"][0]["content"], json!([{"type": "input_text", "text": "And now?"}]));
    assert_eq!(
        (&rest["has_more"], server.get(&listed).await.1["data"][0].clone()),
        (&json!(false), rest["data"][0].clone())
    );
    for invalid in ["limit=0", "limit=x", "order=up", "after=nothing"] {
        assert_eq!(server.get(&format!("{listed}?{invalid}")).await.0, 400, "{invalid}");
    }
    let deleted = server.request(reqwest::Method::DELETE, &path).send().await.unwrap();
    assert_eq!(deleted.json::<Value>().await.unwrap(), json!({"id": id, "object": "response", "deleted": true}));
    assert_eq!(server.get(&path).await.0, 404);
    assert_eq!(
        server.get(&format!("/v1/responses/{}", third["id"].as_str().unwrap())).await.0,
        404,
        "the response is not stored"
    );
    let second = second["id"].clone();
    server.answer(RESPONSES, &response_request(json!({"previous_response_id": second}))).await;
}

#[tokio::test]
async fn item_references_are_replaced_with_stored_items() {
    let server = server().await;
    let mods = forced_answer(&format!("<think>hm</think>{CALLS}"));
    let first = server.answer(RESPONSES, &response_request(json!({"tools": tools(), "mods": mods}))).await;
    let output = first["output"].as_array().unwrap();
    assert_eq!(output.len(), 4);
    let results = ["7", "3"].iter().zip(&output[2..]);
    let results = results
        .map(|(result, call)| json!({"type": "function_call_output", "call_id": call["call_id"], "output": result}));
    let request = |items: Vec<Value>| {
        let question = json!({"role": "user", "content": "Hello!"});
        let input: Vec<Value> = std::iter::once(question).chain(items).chain(results.clone()).collect();
        response_request(json!({"tools": tools(), "input": input, "max_output_tokens": 4}))
    };
    let references =
        || -> Vec<Value> { output.iter().map(|item| json!({"type": "item_reference", "id": item["id"]})).collect() };
    let count = server.answer("/v1/responses/input_tokens", &request(output.clone())).await;
    assert_eq!(server.answer("/v1/responses/input_tokens", &request(references())).await, count);
    let second = server.answer(RESPONSES, &request(references())).await;
    assert!(second["usage"]["input_tokens"].as_u64() >= count["input_tokens"].as_u64(), "{second}");
    // The stored conversation has the items, not the references.
    let path = format!("/v1/responses/{}/input_items?order=asc", second["id"].as_str().unwrap());
    let (_, page) = server.get(&path).await;
    assert_eq!(page["data"][2]["content"], output[1]["content"], "{page}");
    // A streamed answer may have more messages than the stored one, whose message has all of their texts.
    let mods = forced_answer(&format!("<think>hm</think>{CALLS}"));
    let body = response_request(json!({"tools": tools(), "mods": mods, "stream": true}));
    let events = server.events(RESPONSES, &body).await;
    let done = events.iter().filter(|(name, _)| name == "response.output_item.done");
    let mut streamed: Vec<Value> =
        done.map(|(_, data)| json!({"type": "item_reference", "id": data["item"]["id"]})).collect();
    assert_eq!(streamed.len(), 4);
    let (run, _) = streamed[1]["id"].as_str().unwrap().rsplit_once('_').unwrap();
    let other_message = format!("{run}_1");
    streamed.insert(2, json!({"type": "item_reference", "id": other_message}));
    assert_eq!(server.answer("/v1/responses/input_tokens", &request(streamed)).await, count);

    let unknown = || vec![json!({"type": "item_reference", "id": "msg_1f_0"})];
    let twice = || [references(), references()].concat();
    for (items, param) in [(unknown(), "input[1].id"), (twice(), "input[5].id")] {
        for path in [RESPONSES, "/v1/responses/input_tokens"] {
            let (status, answer) = server.post(path, &request(items.clone())).await;
            assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{answer}");
        }
    }
}

#[tokio::test]
async fn logprobs_are_those_of_the_text() {
    let server = server().await;
    let body = response_request(json!({"include": ["message.output_text.logprobs"], "tools": tools(),
                                       "mods": forced_answer(&format!("<think>hm</think>{CALLS}"))}));
    let text = |logprobs: &Value| -> String {
        let tokens = logprobs.as_array().unwrap().iter();
        tokens.map(|token| token["token"].as_str().filter(|_| token["logprob"].is_number()).unwrap()).collect()
    };
    let response = server.answer(RESPONSES, &body).await;
    let part = &response["output"][1]["content"][0];
    assert_eq!((part["text"].as_str(), text(&part["logprobs"]).trim()), (Some("I look."), "I look."), "{part}");
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = server.events(RESPONSES, &streamed).await;
    let deltas = events.iter().filter(|(name, _)| name == "response.output_text.delta");
    let sent: Vec<Value> = deltas.flat_map(|(_, data)| data["logprobs"].as_array().unwrap().clone()).collect();
    let done = |name: &str| &events.iter().find(|(found, _)| found == name).expect(name).1;
    assert_eq!(text(&sent.clone().into()).trim(), "I look.");
    assert_eq!(done("response.output_text.done")["logprobs"], Value::from(sent.clone()));
    let output = &events.last().unwrap().1["response"]["output"];
    assert_eq!(output[1]["content"][0]["logprobs"], Value::from(sent));

    let fields = json!({"top_logprobs": 2, "max_output_tokens": 8, "ignore_eos": true, "reasoning_format": "none"});
    let response = server.answer(RESPONSES, &response_request(fields)).await;
    let logprobs = response["output"][0]["content"][0]["logprobs"].as_array().unwrap();
    assert!(!logprobs.is_empty() && logprobs.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2));
}

#[tokio::test]
async fn truncation_drops_the_oldest_turns() {
    let server = Server::start(&["-c", "512", "-np", "1"]);
    server.wait_ready().await;
    let turn =
        |_| [json!({"role": "user", "content": "bread ".repeat(60)}), json!({"role": "assistant", "content": "Yes."})];
    let mut input: Vec<Value> = (0..12).flat_map(turn).collect();
    input.push(json!({"role": "user", "content": "Hello!"}));
    let body =
        |truncation: &str| response_request(json!({"input": input, "truncation": truncation, "max_output_tokens": 4}));
    let response = server.answer(RESPONSES, &body("auto")).await;
    assert_eq!(response["truncation"], "auto");
    assert!(response["usage"]["input_tokens"].as_u64().unwrap() < 512, "{response}");
    let (status, answer) = server.post(RESPONSES, &body("disabled")).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")), "{answer}");
}

#[tokio::test]
async fn response_survives_restart_and_belongs_to_owner() {
    let first = Server::start(&["--api-key", "one", "--api-key", "two"]);
    first.wait_ready().await;
    let body = response_request(json!({"max_output_tokens": 4, "record": false}));
    let stored = first.answer(RESPONSES, &body).await;
    let path = format!("/v1/responses/{}", stored["id"].as_str().unwrap());
    first.stop("TERM").await;
    let restarted = first.start_again(&["--api-key", "one", "--api-key", "two"]);
    restarted.wait_ready().await;
    assert_eq!(restarted.get(&path).await, (200, stored.clone()));
    let continuation =
        response_request(json!({"previous_response_id": stored["id"], "input": "And now?", "max_output_tokens": 4}));
    let continued = restarted.answer(RESPONSES, &continuation).await;
    assert!(continued["usage"]["input_tokens"].as_u64() > stored["usage"]["input_tokens"].as_u64());
    let other =
        crate::harness::http().get(format!("{}{path}", restarted.base)).bearer_auth("two").send().await.unwrap();
    assert_eq!(other.status(), 404, "the response belongs to another key");
    let reference =
        json!([{"type": "item_reference", "id": stored["output"][0]["id"]}, {"role": "user", "content": "And now?"}]);
    let body = response_request(json!({"input": reference, "max_output_tokens": 4}));
    for (key, expected) in [("two", 400), ("one", 200)] {
        let (status, answer) = restarted.send(key, reqwest::Method::POST, RESPONSES, Some(&body)).await;
        assert_eq!(status, expected, "{answer}");
    }
}

#[tokio::test]
async fn invalid_request_error_names_field() {
    let server = server().await;
    for (fields, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"store": "always"}), "store"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"background": true}), "background"),
        (json!({"input": []}), "input"),
        (json!({"tools": [{"type": 5}]}), "tools[0].type"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"truncation": "half"}), "truncation"),
        (json!({"top_logprobs": "many"}), "top_logprobs"),
        (json!({"reasoning": {"effort": 5}}), "reasoning.effort"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}), "tools[1].name"),
        (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].function.name"),
    ] {
        let (status, answer) = server.post(RESPONSES, &response_request(fields)).await;
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{answer}");
    }
}
