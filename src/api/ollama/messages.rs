//! Converts the messages of a chat.

use crate::api::shared::chat::images::{base64_part, image_part};
use crate::api::shared::fields::invalid_value;
use crate::server::ApiError;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;

/// Returns the content of a message: the text, with the images before it if there are any.
pub(super) fn with_images(text: Value, images: Option<&Value>, at: &str) -> Result<Value, ApiError> {
    let list = match images {
        None | Some(Value::Null) => return Ok(text),
        Some(Value::Array(list)) if list.is_empty() => return Ok(text),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(invalid_value(at, "a list of images in base64", other)),
    };
    let part = |(index, image): (usize, &Value)| {
        let at = format!("{at}[{index}]");
        match image.as_str() {
            Some(url) if url.starts_with("data:") => Ok(image_part(url, &at)),
            Some(data) => Ok(base64_part(data, &at)),
            None => Err(invalid_value(&at, "an image in base64", image)),
        }
    };
    let mut parts = list.iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?;
    if text.as_str().is_some_and(|text| !text.is_empty()) {
        parts.push(json!({ "type": "text", "text": text }));
    }
    Ok(parts.into())
}

/// Converts the messages. Ollama's tool calls have no ids: a result belongs to the first unanswered call of the tool
/// that it names, or else to the first unanswered call.
pub(super) fn messages(list: &[Value]) -> Result<Vec<Value>, ApiError> {
    let mut unanswered: VecDeque<(String, String)> = VecDeque::new();
    let convert = |(index, message): (usize, &Value)| {
        let at = format!("messages[{index}]");
        let fields = message.as_object().ok_or_else(|| invalid_value(&at, "an object", message))?;
        let mut converted = Map::new();
        for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
            match name.as_str() {
                "images" | "tool_calls" => {}
                "thinking" => {
                    converted.insert("reasoning_content".into(), value.clone());
                }
                "tool_name" => {
                    converted.insert("name".into(), value.clone());
                }
                _ => {
                    converted.insert(name.clone(), value.clone());
                }
            }
        }
        let content = converted.get("content").cloned().unwrap_or_else(|| "".into());
        converted.insert("content".into(), with_images(content, fields.get("images"), &format!("{at}.images"))?);
        match fields.get("tool_calls") {
            None | Some(Value::Null) => {}
            Some(Value::Array(calls)) if calls.is_empty() => {}
            Some(Value::Array(calls)) => {
                unanswered.clear();
                let mut list = Vec::with_capacity(calls.len());
                for (call_index, call) in calls.iter().enumerate() {
                    let function = &call["function"];
                    let name = function["name"].as_str().filter(|name| !name.is_empty()).ok_or_else(|| {
                        let at = format!("{at}.tool_calls[{call_index}].function.name");
                        invalid_value(&at, "the name of a tool", &function["name"])
                    })?;
                    let id = call["id"].as_str().map_or_else(|| format!("call_{index}_{call_index}"), str::to_owned);
                    unanswered.push_back((id.clone(), name.to_owned()));
                    list.push(json!({ "id": id, "type": "function", "function": function }));
                }
                converted.insert("tool_calls".into(), list.into());
            }
            Some(other) => return Err(invalid_value(&format!("{at}.tool_calls"), "a list of tool calls", other)),
        }
        if fields.get("role").is_some_and(|role| role == "tool") && !converted.contains_key("tool_call_id") {
            let tool = fields.get("tool_name").and_then(Value::as_str);
            let named = unanswered.iter().position(|(_, name)| Some(name.as_str()) == tool).unwrap_or(0);
            if let Some((id, _)) = unanswered.remove(named) {
                converted.insert("tool_call_id".into(), id.into());
            }
        }
        Ok(Value::Object(converted))
    };
    list.iter().enumerate().map(convert).collect()
}
