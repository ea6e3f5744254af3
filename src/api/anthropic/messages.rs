//! Converts messages and their content blocks.

use crate::api::shared::fields::{invalid_value, join_text_parts, required_text};
use crate::server::ApiError;
use serde_json::{Map, Value, json};

/// Appends the converted messages. A tool result becomes a separate message.
pub(super) fn push_message(messages: &mut Vec<Value>, message: &Value, at: &str) -> Result<(), ApiError> {
    let role = message["role"].as_str().unwrap_or_default();
    if !matches!(role, "user" | "assistant" | "system") {
        return Err(invalid_value(&format!("{at}.role"), "\"user\", \"assistant\" or \"system\"", &message["role"]));
    }
    let at = format!("{at}.content");
    if role == "system" {
        messages.push(json!({ "role": "system", "content": join_texts(&message["content"], &at)? }));
        return Ok(());
    }
    let blocks = match &message["content"] {
        Value::String(text) => {
            messages.push(json!({ "role": role, "content": text }));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        other => return Err(invalid_value(&at, "a string or a list of content blocks", other)),
    };
    let (mut texts, mut reasoning, mut calls) = (Vec::new(), String::new(), Vec::new());
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{at}[{index}]");
        let text = |field: &str| required_text(block, field, &at);
        match (block["type"].as_str().unwrap_or_default(), role) {
            ("text", _) => texts.push(text("text")?),
            ("thinking", "assistant") => reasoning.push_str(&text("thinking")?),
            ("redacted_thinking", "assistant") => {}
            ("tool_use", "assistant") => {
                let input = match &block["input"] {
                    Value::Null => Value::Object(Map::new()),
                    input @ Value::Object(_) => input.clone(),
                    other => return Err(invalid_value(&format!("{at}.input"), "an object", other)),
                };
                calls.push(json!({ "id": text("id")?, "type": "function",
                                   "function": { "name": text("name")?, "arguments": input } }));
            }
            ("tool_result", "user") => {
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    content => join_texts(content, &format!("{at}.content"))?,
                };
                let content =
                    if block["is_error"] == Value::Bool(true) { format!("Error: {content}") } else { content };
                messages.push(json!({ "role": "tool", "tool_call_id": text("tool_use_id")?, "content": content }));
            }
            _ => {
                let expected = if role == "user" {
                    "\"text\" or \"tool_result\""
                } else {
                    "\"text\", \"thinking\" or \"tool_use\""
                };
                return Err(invalid_value(
                    &format!("{at}.type"),
                    &format!("{expected} in a message of the {role}"),
                    &block["type"],
                ));
            }
        }
    }
    if role == "user" {
        if !texts.is_empty() {
            messages.push(json!({ "role": "user", "content": texts.join("\n") }));
        }
        return Ok(());
    }
    let mut message = json!({ "role": "assistant", "content": texts.join("") });
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    messages.push(message);
    Ok(())
}

/// Returns a string, or the joined texts of content blocks.
pub(super) fn join_texts(value: &Value, at: &str) -> Result<String, ApiError> {
    join_text_parts(value, at, |block| block["text"].as_str().filter(|_| block["type"] == "text"))
}
