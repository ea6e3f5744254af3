//! A response and its items.

use crate::api::chat::Talk;
use crate::events::FinishReason;
use serde_json::{Map, Value, json};

/// Fields of the request that the response repeats.
#[derive(Debug, Clone)]
pub(super) struct Echo(Map<String, Value>);

impl Echo {
    pub(super) fn of(body: &Value) -> Self {
        let or = |name: &str, default: Value| {
            let said = body.get(name).filter(|value| !value.is_null());
            (name.to_owned(), said.cloned().unwrap_or(default))
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

/// The whole response.
pub(super) fn response(talk: &Talk, echo: &Echo) -> Value {
    let said = talk.message(0);
    let mut output = Vec::new();
    if !said.reasoning.is_empty() {
        output.push(reasoning(talk, output.len(), &said.reasoning, true));
    }
    let calls = talk.calls(0);
    if !said.content.is_empty() || (calls.is_empty() && output.is_empty()) {
        output.push(message(talk, output.len(), Some(&said.content), status(talk)));
    }
    for call in calls {
        let index = output.len();
        let whole = serde_json::from_str::<Value>(call.arguments).is_ok();
        let status = if whole { "completed" } else { "incomplete" };
        output.push(function_call(talk, index, call.id, call.name, call.arguments, status));
    }
    ended(talk, echo, output)
}

/// A response that has ended, with these items.
pub(super) fn ended(talk: &Talk, echo: &Echo, output: Vec<Value>) -> Value {
    let mut response = head(talk, echo, status(talk));
    if status(talk) == "incomplete" {
        response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
    }
    response["output"] = output.into();
    if let Some(finish) = talk.finish(0).filter(|_| status(talk) == "completed") {
        let seconds = (finish.prompt_us + finish.generation_us) / 1_000_000;
        response["completed_at"] = json!(talk.created + seconds as i64);
    }
    let usage = talk.usage();
    response["usage"] = json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": talk.reasoning_tokens() },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    });
    response
}

/// A response of which nothing was said.
pub(super) fn head(talk: &Talk, echo: &Echo, status: &str) -> Value {
    let run = talk.run();
    let mut response = json!({
        "id": format!("resp_{}", run.0.simple()),
        "object": "response",
        "created_at": talk.created,
        "completed_at": null,
        "status": status,
        "background": false,
        "error": null,
        "incomplete_details": null,
        "model": talk.model,
        "output": [],
        "usage": null,
        "thunder": { "run_id": run, "replay": format!("/runs/{run}") },
    });
    if let Value::Object(object) = &mut response {
        object.extend(echo.0.clone());
    }
    response
}

fn status(talk: &Talk) -> &'static str {
    match talk.finish(0).map(|finish| finish.reason) {
        None => "in_progress",
        Some(FinishReason::Length) => "incomplete",
        Some(_) => "completed",
    }
}

fn id(talk: &Talk, kind: &str, index: usize) -> String {
    format!("{kind}_{}_{index}", talk.run().0.simple())
}

/// An item of thoughts.
pub(super) fn reasoning(talk: &Talk, index: usize, text: &str, done: bool) -> Value {
    let content = if done { json!([{ "type": "reasoning_text", "text": text }]) } else { json!([]) };
    json!({ "id": id(talk, "rs", index), "type": "reasoning", "summary": [], "content": content,
            "encrypted_content": null, "status": if done { "completed" } else { "in_progress" } })
}

/// An item of text; without any it has just begun.
pub(super) fn message(talk: &Talk, index: usize, text: Option<&str>, status: &str) -> Value {
    let content: Vec<Value> = text.map(part).into_iter().collect();
    json!({ "id": id(talk, "msg", index), "type": "message", "status": status, "role": "assistant",
            "content": content })
}

/// The part of a message that is its text.
pub(super) fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

/// An item of a call.
pub(super) fn function_call(talk: &Talk, index: usize, call: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({ "id": id(talk, "fc", index), "type": "function_call", "status": status, "call_id": call, "name": name,
            "arguments": arguments })
}
