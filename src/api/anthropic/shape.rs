//! A message and its content blocks.

use crate::api::chat::{CallOf, Talk};
use crate::events::FinishReason;
use serde_json::{Value, json};

/// The whole message.
pub(super) fn message(talk: &Talk, stops: &[String]) -> Value {
    let said = talk.message(0);
    let mut content = Vec::new();
    if !said.reasoning.is_empty() {
        content.push(json!({ "type": "thinking", "thinking": said.reasoning, "signature": "" }));
    }
    if !said.content.is_empty() {
        content.push(json!({ "type": "text", "text": said.content }));
    }
    content.extend(talk.calls(0).iter().map(tool_use));
    let (reason, stop) = ending(talk, stops);
    let mut message = head(talk);
    message["content"] = content.into();
    message["stop_reason"] = reason.into();
    message["stop_sequence"] = stop;
    message["usage"] = usage(talk);
    message["thunder"] = thunder(talk);
    message
}

/// A message of which nothing was said.
pub(super) fn head(talk: &Talk) -> Value {
    let cached = talk.cached_tokens(0) as usize;
    json!({
        "id": format!("msg_{}", talk.run().0.simple()),
        "type": "message",
        "role": "assistant",
        "model": talk.model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": { "input_tokens": talk.wishes.prompt_tokens.saturating_sub(cached), "cache_read_input_tokens": cached,
                   "cache_creation_input_tokens": 0, "output_tokens": 0 },
    })
}

/// Where the run can be looked at.
pub(super) fn thunder(talk: &Talk) -> Value {
    json!({ "run_id": talk.run(), "replay": format!("/runs/{}", talk.run()) })
}

fn tool_use(call: &CallOf<'_>) -> Value {
    match serde_json::from_str::<Value>(call.arguments) {
        Ok(input) if input.is_object() => {
            json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input })
        }
        // The answer was cut off within the arguments, and a block takes an object only.
        _ => json!({ "type": "text", "text": format!("{} {}", call.name, call.arguments) }),
    }
}

/// Why the answer ended, and the text that ended it.
pub(super) fn ending(talk: &Talk, stops: &[String]) -> (&'static str, Value) {
    let Some(finish) = talk.finish(0) else { return ("end_turn", Value::Null) };
    let stop = finish.stop_string.as_ref().filter(|stop| stops.contains(stop));
    match (finish.reason, stop) {
        (FinishReason::Length, _) => ("max_tokens", Value::Null),
        (_, Some(stop)) => ("stop_sequence", stop.as_str().into()),
        _ if talk.reason(0) == "tool_calls" => ("tool_use", Value::Null),
        _ => ("end_turn", Value::Null),
    }
}

/// Token counts; what was reused counts as read from a cache.
pub(super) fn usage(talk: &Talk) -> Value {
    let usage = talk.usage();
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "thinking_tokens": talk.reasoning_tokens() },
    })
}
