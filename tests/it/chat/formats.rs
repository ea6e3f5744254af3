//! Answers that are constrained to calls or to a format.

use super::{CHAT, chat, tools};
use crate::harness::{message_of, server};
use serde_json::{Value, json};

#[tokio::test]
async fn required_call_is_generated() {
    let server = server().await;
    for seed in 0..4 {
        let body = chat(json!({"tools": tools(), "tool_choice": "required", "temperature": 3.0, "seed": seed,
                               "parallel_tool_calls": false}));
        let answer = server.answer(CHAT, &body).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!((calls.len(), &choice["message"]["content"]), (1, &Value::Null));
        assert_arguments_match(&calls[0]);
    }
}

/// Asserts that the arguments of a call match the schema of its function.
pub(super) fn assert_arguments_match(call: &Value) {
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    match call["function"]["name"].as_str().unwrap() {
        "get_weather" => {
            assert!(arguments["city"] == "Oakford" || arguments["city"] == "Zürich", "{arguments}");
            assert!(arguments["celsius"].is_boolean(), "{arguments}");
        }
        "add" => assert!(arguments["a"] == 1 || arguments["a"] == 2, "{arguments}"),
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn named_function_is_called() {
    let server = server().await;
    for name in ["get_weather", "add"] {
        let choice = json!({"type": "function", "function": {"name": name}});
        let body = chat(json!({"tools": tools(), "tool_choice": choice, "temperature": 3.0}));
        let answer = server.answer(CHAT, &body).await;
        let calls = answer["choices"][0]["message"]["tool_calls"].as_array().unwrap();
        assert_eq!((calls.len(), calls[0]["function"]["name"].as_str()), (1, Some(name)));
        assert_arguments_match(&calls[0]);
    }
}

#[tokio::test]
async fn arguments_of_strict_function_match_schema() {
    let server = server().await;
    let mut tools = tools();
    tools[1]["function"]["strict"] = true.into();
    let body = chat(json!({"tools": tools, "temperature": 3.0, "max_tokens": 200, "parallel_tool_calls": false,
        "mods": [{"name": "force-prefix",
        "config": {"text": "So: <tool_call>\n{\"name\": \"add\", \"arguments\": "}}]}));
    let answer = server.answer(CHAT, &body).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], "So:", "{answer}");
    assert_arguments_match(&message["tool_calls"][0]);
}

#[tokio::test]
async fn answer_matches_requested_format() {
    let server = server().await;
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}, "of": {"enum": ["a", "b"]}},
                        "required": ["ok", "of"], "additionalProperties": false});
    for format in [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"json_schema": schema}),
    ] {
        let mut body = chat(format.clone());
        body["temperature"] = 3.0.into();
        let answer = server.answer(CHAT, &body).await;
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{format}: {text}"));
        assert!(value["ok"].is_boolean() && value["of"].is_string(), "{text}");
    }
    let answer = server.answer(CHAT, &chat(json!({"grammar": "root ::= \"yes\" | \"no\"", "temperature": 3.0}))).await;
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text == "yes" || text == "no", "{text}");
}

#[tokio::test]
async fn schemas_of_tools_are_prepared_like_those_of_answers() {
    let server = server().await;
    let tool = |strict: bool, property: &Value| {
        json!([{"type": "function", "function": {"name": "set", "strict": strict, "parameters": {
            "properties": {"value": {"enum": [1]}, "other": property}, "required": ["value"]}}}])
    };
    let unique = json!({"type": "array", "uniqueItems": true, "items": {"enum": [1, 2]}, "maxItems": 2});
    for (strict, property) in [
        (false, &json!({"type": "string", "format": "uri-reference", "maxLength": 4})),
        (true, &json!({"type": "string", "format": "password", "maxLength": 4})),
        (
            true,
            &json!({"oneOf": [{"properties": {"x": {"enum": [1]}}}, {"properties": {"y": {"enum": [2]}}}], "type": "object"}),
        ),
        (false, &unique),
    ] {
        let body = chat(json!({"tools": tool(strict, property), "tool_choice": "required", "temperature": 3.0,
                               "parallel_tool_calls": false}));
        let answer = server.answer(CHAT, &body).await;
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments["value"], 1, "{property} {answer}");
        let names = arguments.as_object().unwrap().keys();
        assert!(names.into_iter().all(|name| name == "value" || name == "other"), "{arguments}");
    }
    let format = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let free = json!({"type": "object"});
    for (fields, param, message) in [
        (
            json!({"tools": tool(true, &unique), "tool_choice": "required"}),
            "tools",
            "`tools`: the parameters of the function 'set': Unimplemented keys: [\"uniqueItems\"]",
        ),
        (
            json!({"tools": tool(false, &free), "response_format": format(unique.clone())}),
            "response_format",
            "`response_format`: Unimplemented keys: [\"uniqueItems\"]",
        ),
    ] {
        let (status, answer) = server.post(CHAT, &chat(fields)).await;
        assert_eq!((status, answer["error"]["param"].as_str(), message_of(&answer)), (400, Some(param), message));
    }
}
