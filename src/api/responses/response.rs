//! JSON of a response and its items.

use crate::api::shared::chat::ChatStream;
use crate::events::FinishReason;
use serde_json::{Map, Value, json};

/// Request fields that the response repeats.
#[derive(Debug, Clone)]
pub(super) struct EchoedFields(Map<String, Value>);

impl EchoedFields {
    pub(super) fn from_body(body: &Value) -> Self {
        let or = |name: &str, default: Value| {
            let present = body.get(name).filter(|value| !value.is_null());
            (name.to_owned(), present.cloned().unwrap_or(default))
        };
        Self(Map::from_iter([
            or("instructions", Value::Null),
            or("max_output_tokens", Value::Null),
            or("metadata", json!({})),
            or("parallel_tool_calls", true.into()),
            or("previous_response_id", Value::Null),
            or("reasoning", json!({ "effort": null, "summary": null })),
            or("store", true.into()),
            or("temperature", Value::Null),
            or("text", json!({ "format": { "type": "text" } })),
            or("tool_choice", "auto".into()),
            or("tools", json!([])),
            or("top_p", Value::Null),
            or("truncation", "disabled".into()),
            or("user", Value::Null),
        ]))
    }
}

/// Returns the complete response.
pub(super) fn response(chat: &ChatStream, echo: &EchoedFields) -> Value {
    let parsed = chat.message(0);
    let mut output = Vec::new();
    if !parsed.reasoning.is_empty() {
        output.push(reasoning(chat, output.len(), &parsed.reasoning, true));
    }
    let calls = chat.calls(0);
    if !parsed.content.is_empty() || (calls.is_empty() && output.is_empty()) {
        output.push(message(chat, output.len(), Some(&parsed.content), status(chat)));
    }
    for call in calls {
        let index = output.len();
        let whole = serde_json::from_str::<Value>(call.arguments).is_ok();
        let status = if whole { "completed" } else { "incomplete" };
        output.push(function_call(chat, index, call.id, call.name, call.arguments, status));
    }
    ended_response(chat, echo, output)
}

/// Returns an ended response with these items.
pub(super) fn ended_response(chat: &ChatStream, echo: &EchoedFields, output: Vec<Value>) -> Value {
    let mut response = empty_response(chat, echo, status(chat));
    if status(chat) == "incomplete" {
        response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
    }
    response["output"] = output.into();
    if let Some(finish) = chat.finish(0).filter(|_| status(chat) == "completed") {
        let seconds = (finish.prompt_us + finish.generation_us) / 1_000_000;
        response["completed_at"] = json!(chat.created + seconds as i64);
    }
    let usage = chat.usage();
    response["usage"] = json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": chat.reasoning_tokens() },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    });
    response
}

/// Returns a response without output.
pub(super) fn empty_response(chat: &ChatStream, echo: &EchoedFields, status: &str) -> Value {
    let run = chat.run();
    let mut response = json!({
        "id": format!("resp_{}", run.0.simple()),
        "object": "response",
        "created_at": chat.created,
        "completed_at": null,
        "status": status,
        "background": false,
        "error": null,
        "incomplete_details": null,
        "model": chat.model,
        "output": [],
        "usage": null,
        "thunder": { "run_id": run, "replay": format!("/runs/{run}") },
    });
    if let Value::Object(object) = &mut response {
        object.extend(echo.0.clone());
    }
    response
}

fn status(chat: &ChatStream) -> &'static str {
    match chat.finish(0).map(|finish| finish.reason) {
        None => "in_progress",
        Some(FinishReason::Length) => "incomplete",
        Some(_) => "completed",
    }
}

fn id(chat: &ChatStream, kind: &str, index: usize) -> String {
    format!("{kind}_{}_{index}", chat.run().0.simple())
}

/// Returns a reasoning item.
pub(super) fn reasoning(chat: &ChatStream, index: usize, text: &str, done: bool) -> Value {
    let content = if done { json!([{ "type": "reasoning_text", "text": text }]) } else { json!([]) };
    json!({ "id": id(chat, "rs", index), "type": "reasoning", "summary": [], "content": content,
            "encrypted_content": null, "status": if done { "completed" } else { "in_progress" } })
}

/// Returns a message item; `None` as text means that the item has just started.
pub(super) fn message(chat: &ChatStream, index: usize, text: Option<&str>, status: &str) -> Value {
    let content: Vec<Value> = text.map(part).into_iter().collect();
    json!({ "id": id(chat, "msg", index), "type": "message", "status": status, "role": "assistant",
            "content": content })
}

/// Returns the text part of a message.
pub(super) fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

/// Returns a function call item.
pub(super) fn function_call(
    chat: &ChatStream,
    index: usize,
    call: &str,
    name: &str,
    arguments: &str,
    status: &str,
) -> Value {
    json!({ "id": id(chat, "fc", index), "type": "function_call", "status": status, "call_id": call, "name": name,
            "arguments": arguments })
}
