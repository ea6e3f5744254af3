//! Converts messages and their content blocks.

use crate::api::shared::chat::images;
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
    let (mut parts, mut reasoning, mut calls) = (Vec::new(), String::new(), Vec::new());
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{at}[{index}]");
        let text = |field: &str| required_text(block, field, &at);
        match (block["type"].as_str().unwrap_or_default(), role) {
            ("text", _) => parts.push(text_part(&text("text")?)),
            ("image", "user") => parts.push(image_part(block, &at)?),
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
                let mut content = result_parts(&block["content"], &format!("{at}.content"))?;
                if block["is_error"] == Value::Bool(true) {
                    prefix_error(&mut content);
                }
                let content = content_of(content);
                messages.push(json!({ "role": "tool", "tool_call_id": text("tool_use_id")?, "content": content }));
            }
            _ => {
                let expected = if role == "user" {
                    "\"text\", \"image\" or \"tool_result\""
                } else {
                    "\"text\", \"thinking\", \"redacted_thinking\" or \"tool_use\""
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
        if !parts.is_empty() {
            messages.push(json!({ "role": "user", "content": content_of(parts) }));
        }
        return Ok(());
    }
    let texts: String = parts.iter().filter_map(|part| part["text"].as_str()).collect();
    let mut message = json!({ "role": "assistant", "content": texts });
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    messages.push(message);
    Ok(())
}

fn text_part(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

/// Converts an image block.
fn image_part(block: &Value, at: &str) -> Result<Value, ApiError> {
    let source = &block["source"];
    let text = |field: &str| required_text(source, field, &format!("{at}.source"));
    match source["type"].as_str() {
        Some("base64") => Ok(images::base64_part(&text("data")?, &format!("{at}.source.data"))),
        Some("url") => Ok(images::image_part(&text("url")?, &format!("{at}.source.url"))),
        _ => Err(invalid_value(&format!("{at}.source.type"), "\"base64\" or \"url\"", &source["type"])),
    }
}

/// Converts the content of a tool result.
fn result_parts(content: &Value, at: &str) -> Result<Vec<Value>, ApiError> {
    let Some(blocks) = content.as_array().filter(|blocks| blocks.iter().any(|block| block["type"] == "image")) else {
        return match content {
            Value::Null => Ok(Vec::new()),
            content => Ok(vec![text_part(&join_texts(content, at)?)]),
        };
    };
    let part = |(index, block): (usize, &Value)| {
        let at = format!("{at}[{index}]");
        match block["type"].as_str() {
            Some("image") => image_part(block, &at),
            Some("text") => Ok(text_part(&required_text(block, "text", &at)?)),
            _ => Err(invalid_value(&format!("{at}.type"), "\"text\" or \"image\"", &block["type"])),
        }
    };
    blocks.iter().enumerate().map(part).collect()
}

/// Marks the content of a tool result as an error.
fn prefix_error(parts: &mut Vec<Value>) {
    match parts.first_mut().filter(|first| first["type"] == "text") {
        Some(first) => first["text"] = format!("Error: {}", first["text"].as_str().unwrap_or_default()).into(),
        None => parts.insert(0, text_part("Error: ")),
    }
}

/// Returns the content of a message: a text unless there are images.
fn content_of(parts: Vec<Value>) -> Value {
    if parts.iter().all(|part| part["type"] == "text") {
        return parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n").into();
    }
    parts.into()
}

/// Returns a string, or the joined texts of content blocks.
pub(super) fn join_texts(value: &Value, at: &str) -> Result<String, ApiError> {
    join_text_parts(value, at, |block| block["text"].as_str().filter(|_| block["type"] == "text"))
}
