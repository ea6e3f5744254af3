//! Tools for a model without tools in its template: they are described in the system message, or in the first user
//! message if the template supports no system message. Calls and results become text in the format of the Hermes
//! family, which other models also understand.

use serde_json::{Map, Value, json};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Returns the description of the tools for the model.
fn description(tools: &Value) -> String {
    let mut text = String::from("You may call these functions. Each is described by a JSON object:\n<tools>");
    for tool in tools.as_array().into_iter().flatten() {
        let function = tool.get("function").unwrap_or(tool);
        text.push('\n');
        text.push_str(&function.to_string());
    }
    text.push_str("\n</tools>\nTo call one, answer with its name and its arguments as JSON:\n");
    text.push_str(OPEN);
    text.push_str("\n{\"name\": \"the function\", \"arguments\": {}}\n");
    text.push_str(CLOSE);
    text.push_str("\nThe result comes in <tool_response>. Answer without a call when none is needed.");
    text
}

/// Adds the description of the tools to the messages. `supports_system` is true if the template supports a system
/// message.
pub(super) fn describe_tools(messages: &mut Vec<Value>, tools: &Value, supports_system: bool) {
    let text = description(tools);
    let content_of = |message: &Value| message["content"].as_str().unwrap_or_default().to_owned();
    let join = |first: &str, second: &str| match (first.is_empty(), second.is_empty()) {
        (false, false) => format!("{first}\n\n{second}"),
        _ => format!("{first}{second}"),
    };
    match messages.first_mut() {
        Some(system) if system["role"] == "system" || system["role"] == "developer" => {
            system["content"] = join(&content_of(system), &text).into();
        }
        _ if supports_system => messages.insert(0, json!({ "role": "system", "content": text })),
        _ => {
            if let Some(user) = messages.iter_mut().find(|message| message["role"] == "user") {
                user["content"] = join(&text, &content_of(user)).into();
            }
        }
    }
}

/// Converts calls and results in the messages to text.
pub(super) fn render_calls_as_text(messages: Vec<Value>) -> Vec<Value> {
    let mut converted: Vec<Value> = Vec::with_capacity(messages.len());
    let mut follows_result = false;
    for mut message in messages {
        let is_result = message["role"] == "tool";
        if is_result {
            let text =
                format!("<tool_response>\n{}\n</tool_response>", message["content"].as_str().unwrap_or_default());
            match converted.last_mut().filter(|_| follows_result) {
                // Consecutive results are one turn.
                Some(last) => {
                    let before = last["content"].as_str().unwrap_or_default();
                    last["content"] = format!("{before}\n{text}").into();
                }
                None => converted.push(json!({ "role": "user", "content": text })),
            }
        } else {
            let calls = message.as_object_mut().and_then(|fields| fields.remove("tool_calls"));
            if let Some(Value::Array(calls)) = calls {
                message["content"] = with_calls(message["content"].as_str().unwrap_or_default(), &calls).into();
            }
            converted.push(message);
        }
        follows_result = is_result;
    }
    converted
}

fn with_calls(content: &str, calls: &[Value]) -> String {
    let mut text = content.to_owned();
    for call in calls {
        let function = call.get("function").unwrap_or(call);
        let mut object = Map::new();
        object.insert("name".into(), function["name"].clone());
        object.insert("arguments".into(), function["arguments"].clone());
        if !text.is_empty() {
            text.push('\n');
        }
        text.extend([OPEN, "\n", &Value::Object(object).to_string(), "\n", CLOSE]);
    }
    text
}
