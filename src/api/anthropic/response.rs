//! JSON of a message and its content blocks.

use crate::api::shared::chat::{ChatStream, ToolCallRef};
use crate::events::FinishReason;
use serde_json::{Value, json};

/// Returns the complete message.
pub(super) fn message(chat: &ChatStream, stop_sequences: &[String]) -> Value {
    let parsed = chat.message(0);
    let mut content = Vec::new();
    if !parsed.reasoning.is_empty() {
        content.push(json!({ "type": "thinking", "thinking": parsed.reasoning, "signature": "" }));
    }
    if !parsed.content.is_empty() {
        content.push(json!({ "type": "text", "text": parsed.content }));
    }
    content.extend(chat.calls(0).iter().map(tool_use));
    let (reason, stop) = stop_reason(chat, stop_sequences);
    let mut message = empty_message(chat);
    message["content"] = content.into();
    message["stop_reason"] = reason.into();
    message["stop_sequence"] = stop;
    message["usage"] = usage(chat);
    message["thunder"] = thunder(chat);
    message
}

/// Returns a message without content.
pub(super) fn empty_message(chat: &ChatStream) -> Value {
    let cached = chat.cached_tokens(0) as usize;
    json!({
        "id": format!("msg_{}", chat.run().0.simple()),
        "type": "message",
        "role": "assistant",
        "model": chat.model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": { "input_tokens": chat.options.prompt_tokens.saturating_sub(cached), "cache_read_input_tokens": cached,
                   "cache_creation_input_tokens": 0, "output_tokens": 0 },
    })
}

/// Returns the id of the run and the path of its replay.
pub(super) fn thunder(chat: &ChatStream) -> Value {
    json!({ "run_id": chat.run(), "replay": format!("/runs/{}", chat.run()) })
}

fn tool_use(call: &ToolCallRef<'_>) -> Value {
    match serde_json::from_str::<Value>(call.arguments) {
        Ok(input) if input.is_object() => {
            json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input })
        }
        // The answer was cut off inside the arguments, but a `tool_use` block requires an object.
        _ => json!({ "type": "text", "text": format!("{} {}", call.name, call.arguments) }),
    }
}

/// Returns `stop_reason` and `stop_sequence`.
pub(super) fn stop_reason(chat: &ChatStream, stop_sequences: &[String]) -> (&'static str, Value) {
    let Some(finish) = chat.finish(0) else { return ("end_turn", Value::Null) };
    let stop = finish.stop_string.as_ref().filter(|stop| stop_sequences.contains(stop));
    match (finish.reason, stop) {
        (FinishReason::Length, _) => ("max_tokens", Value::Null),
        (_, Some(stop)) => ("stop_sequence", stop.as_str().into()),
        _ if chat.reason(0) == "tool_calls" => ("tool_use", Value::Null),
        _ => ("end_turn", Value::Null),
    }
}

/// Returns the token counts. Cached prompt tokens count as read from a cache.
pub(super) fn usage(chat: &ChatStream) -> Value {
    let usage = chat.usage();
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "thinking_tokens": chat.reasoning_tokens() },
    })
}
