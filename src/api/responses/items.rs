//! Converts input items to the messages of a chat completion.

use crate::api::shared::chat::images;
use crate::api::shared::fields::{invalid_value, join_text_parts, required_text};
use crate::server::{ApiError, ErrorCode};
use serde_json::{Value, json};

/// Appends the converted item. Reasoning, text and calls of one answer become one message.
pub(super) fn push_item(messages: &mut Vec<Value>, item: &Value, at: &str) -> Result<(), ApiError> {
    let text = |field: &str| required_text(item, field, at);
    match item["type"].as_str() {
        None | Some("message") => {
            let Some(role @ ("user" | "assistant" | "system" | "developer")) = item["role"].as_str() else {
                let expected = "\"user\", \"assistant\", \"system\" or \"developer\"";
                return Err(invalid_value(&format!("{at}.role"), expected, &item["role"]));
            };
            let content = content_of(&item["content"], &format!("{at}.content"))?;
            if role != "assistant" {
                messages.push(json!({ "role": role, "content": content }));
                return Ok(());
            }
            let message = assistant_message(messages, |last| last["content"] == "" && last.get("tool_calls").is_none());
            message["content"] = content;
        }
        Some("function_call") => {
            let call = json!({ "id": text("call_id")?, "type": "function",
                               "function": { "name": text("name")?, "arguments": text("arguments")? } });
            let message = assistant_message(messages, |_| true);
            match message["tool_calls"].as_array_mut() {
                Some(calls) => calls.push(call),
                None => message["tool_calls"] = json!([call]),
            }
        }
        Some("function_call_output") => {
            let content = content_of(&item["output"], &format!("{at}.output"))?;
            messages.push(json!({ "role": "tool", "tool_call_id": text("call_id")?, "content": content }));
        }
        Some("reasoning") => {
            let parts = |field: &str| {
                let texts = item[field].as_array().into_iter().flatten().filter_map(|part| part["text"].as_str());
                texts.collect::<Vec<_>>().join("\n")
            };
            let reasoning = Some(parts("content")).filter(|text| !text.is_empty()).unwrap_or_else(|| parts("summary"));
            messages.push(json!({ "role": "assistant", "content": "", "reasoning_content": reasoning }));
        }
        Some(_) => {
            let expected =
                "\"message\", \"function_call\", \"function_call_output\", \"reasoning\" or \"item_reference\"";
            return Err(invalid_value(&format!("{at}.type"), expected, &item["type"]));
        }
    }
    Ok(())
}

/// Returns the last message if it is the assistant's and can be extended; otherwise appends a new one.
fn assistant_message(messages: &mut Vec<Value>, belongs: impl Fn(&Value) -> bool) -> &mut Value {
    let extends = messages.last().is_some_and(|last| last["role"] == "assistant" && belongs(last));
    if !extends {
        messages.push(json!({ "role": "assistant", "content": "" }));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// Returns the content of a message: a text, or a list of parts if there are images.
fn content_of(value: &Value, at: &str) -> Result<Value, ApiError> {
    let is_image = |part: &Value| part["type"] == "input_image";
    let Some(parts) = value.as_array().filter(|parts| parts.iter().any(is_image)) else {
        return join_text_parts(value, at, part_text).map(Value::from);
    };
    let convert = |(index, part): (usize, &Value)| {
        let at = format!("{at}[{index}]");
        if !is_image(part) {
            let text = part_text(part).ok_or_else(|| invalid_value(&at, "a part with text or an image", part))?;
            return Ok(json!({ "type": "text", "text": text }));
        }
        if let Some(id) = part["file_id"].as_str() {
            let detail = format!(
                "`{at}.file_id`: the server stores no files, so '{id}' is unknown; send the image as a data URL in \
                 image_url"
            );
            return Err(ApiError::invalid(format!("{at}.file_id"), detail).code(ErrorCode::Unsupported));
        }
        Ok(images::image_part(&required_text(part, "image_url", &at)?, &format!("{at}.image_url")))
    };
    parts.iter().enumerate().map(convert).collect()
}

fn part_text(part: &Value) -> Option<&str> {
    match part["type"].as_str() {
        Some("input_text" | "output_text" | "text") => part["text"].as_str(),
        Some("refusal") => part["refusal"].as_str(),
        _ => None,
    }
}
