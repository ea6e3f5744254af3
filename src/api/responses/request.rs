//! Converts the body of OpenAI's Responses to that of a chat completion.
//!
//! The converted body is parsed like that of any other chat completion, so it is a JSON value, not a struct.

use crate::api::shared::chat::images;
use crate::api::shared::fields::{Fields, invalid_value, join_text_parts, required_text};
use crate::server::{ApiError, ErrorCode};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// Fields that are converted; all others are copied.
const CONVERTED: &[&str] = &[
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "text",
    "max_output_tokens",
    "reasoning",
    "top_logprobs",
    "previous_response_id",
    "store",
    "n",
    "messages",
];

/// Fields that refer to data that the server does not store, with the cause and the remedy.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("conversation", "conversations are not stored; send `previous_response_id`, or the whole conversation as `input`"),
    ("prompt", "stored prompts are not supported; send `instructions` and `input`"),
];

/// The body of a response. All fields of a chat completion are accepted too.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct ResponsesBody {
    /// Name of the model, optionally followed by mods; default is the server's default model.
    model: Option<String>,
    /// A text, or a list of items: messages, function calls and their outputs, and reasoning.
    #[schema(value_type = Value)]
    input: Value,
    /// The system prompt.
    instructions: Option<String>,
    /// The response to continue.
    previous_response_id: Option<String>,
    /// Maximum tokens of the answer; default is the rest of the context.
    max_output_tokens: Option<u32>,
    /// Functions: `{type: "function", name, description?, parameters?, strict?}`.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// `auto`, `none`, `required`, or `{type: "function", name}`.
    #[schema(value_type = Option<Value>)]
    tool_choice: Option<Value>,
    /// `{format: {type: "text" | "json_object" | "json_schema", …}}`.
    #[schema(value_type = Option<Object>)]
    text: Option<Value>,
    /// `{effort?}`.
    #[schema(value_type = Option<Object>)]
    reasoning: Option<Value>,
    /// Store the response, so that a later request can continue it.
    #[schema(default = true)]
    store: Option<bool>,
    /// Answer with server-sent events.
    #[schema(default = false)]
    stream: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
}

/// Returns the items of `input`.
pub(super) fn input(fields: Fields<'_>) -> Result<Vec<Value>, ApiError> {
    match fields.get("input") {
        Some(Value::String(text)) => Ok(vec![json!({ "role": "user", "content": text })]),
        Some(Value::Array(items)) if !items.is_empty() => Ok(items.clone()),
        found => {
            Err(invalid_value("input", "a string or a list with at least one item", found.unwrap_or(&Value::Null)))
        }
    }
}

/// Converts the body to that of a chat completion, with the items of an `earlier` conversation before its input.
pub(super) fn to_chat(body: &Value, earlier: &[Value]) -> Result<Value, ApiError> {
    let fields = Fields::new(body)?;
    for (name, reason) in UNSUPPORTED {
        if fields.get(name).is_some() {
            return Err(
                ApiError::invalid(*name, format!("`{name}` must be absent: {reason}")).code(ErrorCode::Unsupported)
            );
        }
    }
    if fields.flag("background")? == Some(true) {
        let detail = "`background` must be false: background responses are not supported; keep the connection open";
        return Err(ApiError::invalid("background", detail).code(ErrorCode::Unsupported));
    }
    let mut chat = fields.without(CONVERTED);
    let mut messages = Vec::new();
    if let Some(instructions) = fields.text("instructions")? {
        messages.push(json!({ "role": "system", "content": instructions }));
    }
    for item in earlier {
        push_item(&mut messages, item, "previous_response_id")?;
    }
    for (index, item) in input(fields)?.iter().enumerate() {
        push_item(&mut messages, item, &format!("input[{index}]"))?;
    }
    chat.insert("messages".into(), messages.into());
    if let Some(tools) = fields.list("tools")? {
        let tools = tools.iter().enumerate().map(|(index, tool)| convert_tool(tool, &format!("tools[{index}]")));
        let tools = tools.filter_map(Result::transpose).collect::<Result<Vec<_>, _>>()?;
        chat.insert("tools".into(), tools.into());
    }
    match fields.get("tool_choice") {
        Some(Value::Object(choice)) if choice.get("type").is_some_and(|kind| kind == "function") => {
            let name = choice.get("name").cloned().unwrap_or_default();
            chat.insert("tool_choice".into(), json!({ "type": "function", "function": { "name": name } }));
        }
        Some(choice) => {
            chat.insert("tool_choice".into(), choice.clone());
        }
        None => {}
    }
    if let Some(format) = fields.object("text")?.and_then(|text| text.get("format")) {
        chat.insert("response_format".into(), format.clone());
    }
    if let Some(limit) = fields.get("max_output_tokens") {
        fields.integer("max_output_tokens", 1..=i64::from(i32::MAX))?;
        chat.insert("max_tokens".into(), limit.clone());
    }
    if let Some(effort) = fields.object("reasoning")?.and_then(|reasoning| reasoning.get("effort")) {
        chat.insert("reasoning_effort".into(), effort.clone());
    }
    Ok(Value::Object(chat))
}

/// Converts a tool. Returns `None` for tools that only OpenAI's server can run; clients such as Codex always offer
/// some.
fn convert_tool(tool: &Value, at: &str) -> Result<Option<Value>, ApiError> {
    match tool["type"].as_str() {
        Some("function") => {}
        Some(kind) => {
            tracing::info!(field = at, tool.type = kind, "unsupported tool ignored");
            return Ok(None);
        }
        None => return Err(invalid_value(&format!("{at}.type"), "\"function\"", &tool["type"])),
    }
    if tool["function"].is_object() {
        return Ok(Some(tool.clone()));
    }
    let mut function = Map::new();
    for field in ["name", "description", "parameters", "strict"] {
        if let Some(value) = tool.get(field).filter(|value| !value.is_null()) {
            function.insert(field.into(), value.clone());
        }
    }
    Ok(Some(json!({ "type": "function", "function": function })))
}

/// Appends the converted item. Reasoning, text and calls of one answer become one message.
fn push_item(messages: &mut Vec<Value>, item: &Value, at: &str) -> Result<(), ApiError> {
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
            let expected = "\"message\", \"function_call\", \"function_call_output\" or \"reasoning\"";
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

#[cfg(test)]
mod tests {
    use super::to_chat;
    use serde_json::json;

    #[test]
    fn items_become_messages() {
        let body = json!({
            "model": "m", "instructions": "Be short.", "max_output_tokens": 5, "seed": 3,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": null}],
            "tool_choice": {"type": "function", "name": "f"},
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
            ],
        });
        let chat = to_chat(&body, &[]).unwrap();
        insta::assert_json_snapshot!(chat["messages"], @r#"
        [
          {
            "role": "system",
            "content": "Be short."
          },
          {
            "role": "user",
            "content": "hi"
          },
          {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
              {
                "id": "c1",
                "type": "function",
                "function": {
                  "name": "f",
                  "arguments": "{}"
                }
              },
              {
                "id": "c2",
                "type": "function",
                "function": {
                  "name": "f",
                  "arguments": "{}"
                }
              }
            ]
          },
          {
            "role": "tool",
            "tool_call_id": "c1",
            "content": "2"
          }
        ]
        "#);
        assert_eq!((&chat["max_tokens"], &chat["seed"]), (&json!(5), &json!(3)));
        assert_eq!(chat["tool_choice"]["function"]["name"], "f");
        assert_eq!(chat["response_format"]["type"], "json_schema");
        assert_eq!(chat["tools"][0]["function"]["name"], "f");
    }

    #[test]
    fn images_become_parts() {
        let image = json!({"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "low"});
        let body = json!({"input": [
            {"role": "user", "content": [image, {"type": "input_text", "text": "a"}]},
            {"type": "function_call_output", "call_id": "c1", "output": [image]}]});
        let messages = &to_chat(&body, &[]).unwrap()["messages"];
        let part = |at: &str| crate::api::shared::chat::images::image_part("data:image/png;base64,aGk=", at);
        let expected = json!([part("input[0].content[0].image_url"), {"type": "text", "text": "a"}]);
        assert_eq!(messages[0]["content"], expected);
        assert_eq!(messages[1]["content"], json!([part("input[1].output[0].image_url")]));
    }

    #[test]
    fn hosted_tools_are_ignored() {
        let tools =
            json!([{"type": "web_search"}, {"type": "function", "name": "f"}, {"type": "custom", "name": "patch"}]);
        let chat = to_chat(&json!({"input": "a", "tools": tools}), &[]).unwrap();
        assert_eq!(chat["tools"], json!([{"type": "function", "function": {"name": "f"}}]));
    }

    #[test]
    fn invalid_field_is_named() {
        for (body, pointer) in [
            (json!({}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": "a", "conversation": "conv_1"}), "conversation"),
            (json!({"input": "a", "background": true}), "background"),
            (json!({"input": "a", "tools": [{"name": "f"}]}), "tools[0].type"),
            (json!({"input": [{"role": "bot", "content": "a"}]}), "input[0].role"),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
                "input[0].content[0].image_url",
            ),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}),
                "input[0].content[0].file_id",
            ),
            (json!({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}), "input[0].content[0]"),
            (json!({"input": [{"type": "function_call", "name": "f"}]}), "input[0].call_id"),
            (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
            (json!({"input": "a", "max_output_tokens": 0}), "max_output_tokens"),
        ] {
            assert_eq!(to_chat(&body, &[]).unwrap_err().problem().pointer.as_deref(), Some(pointer), "{body}");
        }
    }
}
