//! Conversion of a client's messages to the format that templates expect.

use super::ChatTemplateError;
use super::family::ModelFamily;
use super::syntax::AnswerSyntax;
use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_64;

/// The existing part of an answer to continue.
#[derive(Debug)]
pub(super) struct PartialAnswer {
    pub(super) reasoning: String,
    pub(super) content: String,
}

/// Removes the last message, which must be the assistant's.
pub(super) fn take_partial_answer(messages: &mut Vec<Value>) -> Result<PartialAnswer, ChatTemplateError> {
    let invalid = |pointer: String, message: &str| ChatTemplateError::Message { pointer, message: message.to_owned() };
    let at = messages.len() - 1;
    let last = &messages[at];
    if last["role"] != "assistant" {
        return Err(invalid(
            format!("messages[{at}].role"),
            "`continue_final_message` requires an assistant message at the end of `messages`",
        ));
    }
    if last["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty()) {
        return Err(invalid(format!("messages[{at}].tool_calls"), "a message with tool calls cannot be continued"));
    }
    if at == 0 {
        return Err(invalid(
            "messages".into(),
            "`messages` must contain a message before the assistant message to continue",
        ));
    }
    let text = |field: &str| last[field].as_str().unwrap_or_default().to_owned();
    let last = PartialAnswer { reasoning: text("reasoning_content"), content: text("content") };
    messages.pop();
    Ok(last)
}

/// Adapts the messages to the template: the role of tool results, and the format of arguments and ids.
pub(super) fn adapt(messages: &mut [Value], syntax: &AnswerSyntax, arguments_as_text: bool, source: &str) {
    let mentions = |word: &str| source.contains(&format!("'{word}'")) || source.contains(&format!("\"{word}\""));
    let rename_results = syntax.tool_role != "tool" && !mentions("tool");
    let rename_developer = !mentions("developer");
    for message in messages {
        let Some(fields) = message.as_object_mut() else { continue };
        let role = fields.get("role").and_then(Value::as_str).unwrap_or_default();
        if role == "tool" && rename_results {
            fields.insert("role".into(), syntax.tool_role.into());
        } else if role == "developer" && rename_developer {
            fields.insert("role".into(), "system".into());
        }
        if syntax.family == ModelFamily::Mistral
            && let Some(id) = fields.get_mut("tool_call_id")
        {
            shorten(id);
        }
        if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
            for call in calls {
                if syntax.family == ModelFamily::Mistral
                    && let Some(id) = call.get_mut("id")
                {
                    shorten(id);
                }
                if arguments_as_text
                    && let Some(arguments) = call.pointer_mut("/function/arguments")
                    && arguments.is_object()
                {
                    *arguments = arguments.to_string().into();
                }
            }
        }
    }
}

/// Converts the text of every message to a list with one part.
pub(super) fn with_typed_content(messages: &[Value]) -> Vec<Value> {
    let mut typed = messages.to_vec();
    for content in typed.iter_mut().filter_map(|message| message.get_mut("content")) {
        if let Some(text) = content.as_str().filter(|text| !text.is_empty()) {
            *content = serde_json::json!([{ "type": "text", "text": text }]);
        }
    }
    typed
}

/// Prepends the system message to the next message, for a template that does not support system messages.
pub(super) fn merge_system(messages: &mut Vec<Value>) {
    let system = messages.remove(0);
    let text = |message: &Value| message["content"].as_str().unwrap_or_default().to_owned();
    messages[0]["content"] = format!("{}\n{}", text(&system), text(&messages[0])).into();
}

/// Shortens an id: Mistral's templates only accept ids of nine letters and digits.
fn shorten(id: &mut Value) {
    const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let Some(text) = id.as_str().filter(|text| text.len() != 9 || !text.bytes().all(|b| b.is_ascii_alphanumeric()))
    else {
        return;
    };
    let mut hash = xxh3_64(text.as_bytes());
    let short: String = (0..9)
        .map(|_| {
            let letter = LETTERS[(hash % 62) as usize];
            hash /= 62;
            char::from(letter)
        })
        .collect();
    *id = short.into();
}

/// Normalizes messages for templates: `content` becomes a string (parts are joined), the arguments of tool calls become
/// objects.
pub(super) fn normalize(messages: &Value) -> Result<Vec<Value>, ChatTemplateError> {
    let invalid = |pointer: String, message: String| ChatTemplateError::Message { pointer, message };
    let list = messages
        .as_array()
        .filter(|list| !list.is_empty())
        .ok_or_else(|| invalid("messages".into(), "`messages` must be an array with at least one message".into()))?;
    let mut normalized = Vec::with_capacity(list.len());
    for (index, message) in list.iter().enumerate() {
        let at = |field: &str| format!("messages[{index}]{field}");
        let Some(fields) = message.as_object() else {
            return Err(invalid(at(""), format!("`messages[{index}]` must be an object with `role` and `content`")));
        };
        let role = fields.get("role").and_then(Value::as_str).filter(|role| !role.is_empty());
        if role.is_none() {
            return Err(invalid(at(".role"), format!("`messages[{index}].role` must be a string, e.g. \"user\"")));
        }
        let content = match fields.get("content") {
            None if role != Some("assistant") => {
                return Err(invalid(
                    at(".content"),
                    format!("`messages[{index}].content` is missing; it must be a string or an array of parts"),
                ));
            }
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => join_parts(parts, &at(".content"))?,
            Some(_) => {
                return Err(invalid(
                    at(".content"),
                    format!("`messages[{index}].content` must be a string or an array of parts"),
                ));
            }
        };
        let mut fields = fields.clone();
        fields.insert("content".into(), content.into());
        check_calls(&fields, &at(".tool_calls"))?;
        if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
            for call in calls {
                if let Some(arguments) = call.pointer_mut("/function/arguments")
                    && let Some(object) = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok())
                    && object.is_object()
                {
                    *arguments = object;
                }
            }
        }
        normalized.push(Value::Object(fields));
    }
    Ok(normalized)
}

fn check_calls(fields: &Map<String, Value>, pointer: &str) -> Result<(), ChatTemplateError> {
    let invalid = |pointer: String, expected: &str| {
        let message = format!("`{pointer}` must be {expected}");
        Err(ChatTemplateError::Message { pointer, message })
    };
    let calls = match fields.get("tool_calls") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Array(calls)) => calls,
        Some(_) => return invalid(pointer.to_owned(), "an array of {\"id\", \"type\", \"function\"}"),
    };
    for (index, call) in calls.iter().enumerate() {
        let function = call.get("function").unwrap_or(call);
        if !function["name"].is_string() {
            return invalid(format!("{pointer}[{index}].function.name"), "a string, the name of the called function");
        }
    }
    Ok(())
}

fn join_parts(parts: &[Value], pointer: &str) -> Result<String, ChatTemplateError> {
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("text") | None, Some(text)) => texts.push(text),
            (kind, _) => {
                return Err(ChatTemplateError::Message {
                    pointer: pointer.to_owned(),
                    message: format!(
                        "`{pointer}` has a part of type '{}'; the server accepts `text` and `image_url` parts",
                        kind.unwrap_or("?")
                    ),
                });
            }
        }
    }
    Ok(texts.join("\n"))
}
