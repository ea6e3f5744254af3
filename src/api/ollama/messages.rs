//! Converts the messages of a chat.

use crate::api::shared::fields::invalid_value;
use crate::server::ApiError;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;

/// Rejects images.
pub(super) fn refuse_images(images: Option<&Value>, at: &str) -> Result<(), ApiError> {
    match images {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(list)) if list.is_empty() => Ok(()),
        Some(_) => {
            Err(ApiError::invalid(at, format!("`{at}` must be absent or empty: the loaded models take text only")))
        }
    }
}

/// Converts the messages. Ollama's tool calls have no ids: results belong to the calls in their order, and to the call of
/// the tool that they name.
pub(super) fn messages(list: &[Value]) -> Result<Vec<Value>, ApiError> {
    let mut unanswered: VecDeque<(String, String)> = VecDeque::new();
    let convert = |(index, message): (usize, &Value)| {
        let at = format!("messages[{index}]");
        let fields = message.as_object().ok_or_else(|| invalid_value(&at, "an object", message))?;
        refuse_images(fields.get("images"), &format!("{at}.images"))?;
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
        converted.entry("content").or_insert_with(|| "".into());
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
