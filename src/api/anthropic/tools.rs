//! Converts tools and `tool_choice`.

use crate::api::shared::fields::invalid_value;
use crate::server::ApiError;
use serde_json::{Map, Value, json};

/// Converts a tool. Returns `None` for tools that only Anthropic's server can run.
pub(super) fn convert_tool(tool: &Value, at: &str) -> Result<Option<Value>, ApiError> {
    match &tool["type"] {
        Value::Null => {}
        Value::String(kind) if kind == "custom" => {}
        Value::String(kind) => {
            tracing::info!(field = at, tool.type = kind, "unsupported tool ignored");
            return Ok(None);
        }
        other => return Err(invalid_value(&format!("{at}.type"), "\"custom\"", other)),
    }
    if !tool["input_schema"].is_object() {
        return Err(invalid_value(&format!("{at}.input_schema"), "a JSON schema object", &tool["input_schema"]));
    }
    let mut function = json!({ "name": tool["name"], "parameters": tool["input_schema"] });
    for field in ["description", "strict"] {
        if let Some(value) = tool.get(field) {
            function[field] = value.clone();
        }
    }
    Ok(Some(json!({ "type": "function", "function": function })))
}

/// Converts `tool_choice`.
pub(super) fn convert_tool_choice(choice: &Map<String, Value>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let converted = match choice.get("type").and_then(Value::as_str) {
        Some("auto") => "auto".into(),
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => {
            if let Some(name) = choice.get("name").and_then(Value::as_str) {
                json!({ "type": "function", "function": { "name": name } })
            } else {
                let found = choice.get("name").unwrap_or(&Value::Null);
                return Err(invalid_value("tool_choice.name", "the name of a tool", found));
            }
        }
        _ => {
            let found = choice.get("type").unwrap_or(&Value::Null);
            return Err(invalid_value("tool_choice.type", "\"auto\", \"any\", \"tool\" or \"none\"", found));
        }
    };
    chat.insert("tool_choice".into(), converted);
    if choice.get("disable_parallel_tool_use") == Some(&Value::Bool(true)) {
        chat.insert("parallel_tool_calls".into(), false.into());
    }
    Ok(())
}
