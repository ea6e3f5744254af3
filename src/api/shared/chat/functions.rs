//! Parses the functions that a request offers to the model.

use crate::api::shared::fields::{Fields, invalid_value};
use crate::model::chat::answer::ToolDefinition;
use crate::model::chat::tools::ToolChoice;
use crate::server::ApiError;
use serde_json::{Map, Value};

/// Maximum functions in one request.
const MAX_TOOLS: usize = 512;

/// Parses the functions offered to the model.
pub(super) fn parse_tools(tools: &[Value]) -> Result<Vec<ToolDefinition>, ApiError> {
    if tools.len() > MAX_TOOLS {
        return Err(ApiError::invalid(
            "tools",
            format!("`tools` must have at most {MAX_TOOLS} functions, got {}", tools.len()),
        ));
    }
    tools
        .iter()
        .enumerate()
        .map(|(index, tool)| {
            let at = |field: &str| format!("tools[{index}]{field}");
            if !tool.is_object() {
                return Err(invalid_value(&at(""), "an object {\"type\": \"function\", \"function\": {…}}", tool));
            }
            if tool.get("type").is_some_and(|kind| kind != "function") {
                return Err(invalid_value(&at(".type"), "\"function\"", &tool["type"]));
            }
            let function = &tool["function"];
            let name = function["name"].as_str().filter(|name| is_name(name)).ok_or_else(|| {
                let expected = "a name of at most 128 letters, digits, '_', '-' and '.'";
                invalid_value(&at(".function.name"), expected, &function["name"])
            })?;
            let parameters = match function.get("parameters") {
                None | Some(Value::Null) => Value::Object(Map::new()),
                Some(Value::Object(schema)) => Value::Object(schema.clone()),
                Some(other) => {
                    return Err(invalid_value(&at(".function.parameters"), "a JSON schema object", other));
                }
            };
            let strict = match function.get("strict") {
                None | Some(Value::Null) => false,
                Some(Value::Bool(strict)) => *strict,
                Some(other) => return Err(invalid_value(&at(".function.strict"), "true or false", other)),
            };
            Ok(ToolDefinition { name: name.to_owned(), parameters, strict })
        })
        .collect()
}

fn is_name(name: &str) -> bool {
    (1..=128).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
}

/// Parses `tool_choice`. A function that it names must be one of `functions`.
pub(super) fn parse_tool_choice(fields: Fields<'_>, functions: &[ToolDefinition]) -> Result<ToolChoice, ApiError> {
    const EXPECTED: &str = "\"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}";
    let Some(value) = fields.get("tool_choice") else { return Ok(ToolChoice::Auto) };
    let choice = match value {
        Value::String(word) => match word.as_str() {
            "auto" => return Ok(ToolChoice::Auto),
            "none" => return Ok(ToolChoice::None),
            "required" | "any" => ToolChoice::Required,
            _ => return Err(invalid_value("tool_choice", EXPECTED, value)),
        },
        Value::Object(_) => match value.pointer("/function/name").and_then(Value::as_str) {
            Some(name) => ToolChoice::Function(name.to_owned()),
            None => return Err(invalid_value("tool_choice", EXPECTED, value)),
        },
        other => return Err(invalid_value("tool_choice", EXPECTED, other)),
    };
    if functions.is_empty() {
        return Err(ApiError::invalid(
            "tool_choice",
            "`tool_choice` requires a call, but `tools` is empty; send tools or omit `tool_choice`",
        ));
    }
    if let ToolChoice::Function(name) = &choice
        && !functions.iter().any(|tool| tool.name == *name)
    {
        let known: Vec<&str> = functions.iter().map(|tool| tool.name.as_str()).collect();
        return Err(ApiError::invalid(
            "tool_choice",
            format!(
                "`tool_choice` names the function '{name}', which is not in `tools`; known functions: {}",
                known.join(", ")
            ),
        ));
    }
    Ok(choice)
}
