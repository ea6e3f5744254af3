//! Converts the body of OpenAI's Responses to that of a chat completion.
//!
//! The converted body is parsed like that of any other chat completion, so it is a JSON value, not a struct.

use super::items::push_item;
use crate::api::shared::ClientNames;
use crate::api::shared::fields::{Fields, invalid_value};
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
    "include",
    "top_logprobs",
    "truncation",
    "previous_response_id",
    "store",
    "n",
    "messages",
];

/// The value of `include` that requests log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

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
    /// A text, or a list of items: messages, function calls and their outputs, reasoning, and references to items of
    /// stored responses: `{type: "item_reference", id}`.
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
    /// Further output: `message.output_text.logprobs`. Other values have no effect.
    include: Option<Vec<String>>,
    /// Alternatives of each token in the log-probabilities.
    #[schema(minimum = 0, maximum = 1000)]
    top_logprobs: Option<u32>,
    /// `auto` drops the oldest turns if the context is full, like `"context_policy": "evict"`; `disabled` uses
    /// the policy of the server.
    #[schema(default = "disabled")]
    truncation: Option<String>,
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

/// Converts the body to that of a chat completion, with the items of an `earlier` conversation before those of its
/// `input`, which have no references. Also returns the client's names of the converted fields.
pub(super) fn to_chat(body: &Value, earlier: &[Value], input: &[Value]) -> Result<(Value, ClientNames), ApiError> {
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
    let mut names = ClientNames::default();
    names.add("messages", "input");
    let mut messages = Vec::new();
    if let Some(instructions) = fields.text("instructions")? {
        messages.push(json!({ "role": "system", "content": instructions }));
        names.add("messages[0]", "instructions");
    }
    let earlier = earlier.iter().map(|item| (item, "previous_response_id".to_owned()));
    let input = input.iter().enumerate().map(|(index, item)| (item, format!("input[{index}]")));
    for (item, at) in earlier.chain(input) {
        let first = messages.len();
        push_item(&mut messages, item, &at)?;
        // An item that extends the message of an earlier one adds none.
        for converted in first..messages.len() {
            names.add(format!("messages[{converted}]"), &at);
        }
    }
    chat.insert("messages".into(), messages.into());
    if let Some(tools) = fields.list("tools")? {
        let mut functions = Vec::new();
        for (index, tool) in tools.iter().enumerate() {
            let (at, converted_at) = (format!("tools[{index}]"), format!("tools[{}]", functions.len()));
            let Some(function) = convert_tool(tool, &at)? else { continue };
            if !tool["function"].is_object() {
                names.add(format!("{converted_at}.function"), &at);
            }
            names.add(converted_at, at);
            functions.push(function);
        }
        chat.insert("tools".into(), functions.into());
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
        for name in ["response_format", "response_format.json_schema"] {
            names.add(name, "text.format");
        }
    }
    if let Some(limit) = fields.get("max_output_tokens") {
        fields.integer("max_output_tokens", 1..=i64::from(i32::MAX))?;
        chat.insert("max_tokens".into(), limit.clone());
        names.add("max_tokens", "max_output_tokens");
    }
    if let Some(effort) = fields.object("reasoning")?.and_then(|reasoning| reasoning.get("effort")) {
        chat.insert("reasoning_effort".into(), effort.clone());
        names.add("reasoning_effort", "reasoning.effort");
    }
    insert_logprobs(fields, &mut chat)?;
    match fields.text("truncation")? {
        Some("auto") if fields.get("context_policy").is_none() => {
            chat.insert("context_policy".into(), "evict".into());
        }
        None | Some("auto" | "disabled") => {}
        Some(other) => return Err(invalid_value("truncation", "\"auto\" or \"disabled\"", &other.into())),
    }
    Ok((Value::Object(chat), names))
}

/// Requests log-probabilities if `include` lists them or `top_logprobs` is above 0.
fn insert_logprobs(fields: Fields<'_>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let top = fields.get("top_logprobs");
    let is_included = fields.list("include")?.is_some_and(|list| list.iter().any(|name| name == LOGPROBS));
    if is_included || top.is_some_and(|top| *top != 0) {
        chat.insert("logprobs".into(), true.into());
        chat.insert("top_logprobs".into(), top.cloned().unwrap_or_else(|| 0.into()));
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::{Fields, input};
    use crate::server::ApiError;
    use serde_json::{Value, json};

    fn to_chat(body: &Value) -> Result<Value, ApiError> {
        super::to_chat(body, &[], &input(Fields::new(body)?)?).map(|(chat, _)| chat)
    }

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
        let chat = to_chat(&body).unwrap();
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
    fn messages_are_named_like_their_items() {
        let earlier = [json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": "b"})];
        let call = json!({"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"});
        let input = [call, json!({"role": "user", "content": "c"})];
        let (chat, names) = super::to_chat(&json!({"instructions": "Be short."}), &earlier, &input).unwrap();
        assert_eq!(chat["messages"].as_array().unwrap().len(), 4, "the call extends the earlier answer");
        for (name, expected) in [
            ("messages", "input"),
            ("messages[0].role", "instructions.role"),
            ("messages[1].content", "previous_response_id.content"),
            ("messages[2].tool_calls", "previous_response_id.tool_calls"),
            ("messages[3].content", "input[1].content"),
        ] {
            assert_eq!(names.restore(ApiError::invalid(name, "")).pointer(), Some(expected));
        }
    }

    #[test]
    fn images_become_parts() {
        let image = json!({"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "low"});
        let body = json!({"input": [
            {"role": "user", "content": [image, {"type": "input_text", "text": "a"}]},
            {"type": "function_call_output", "call_id": "c1", "output": [image]}]});
        let messages = &to_chat(&body).unwrap()["messages"];
        let part = |at: &str| crate::api::shared::chat::images::image_part("data:image/png;base64,aGk=", at);
        let expected = json!([part("input[0].content[0].image_url"), {"type": "text", "text": "a"}]);
        assert_eq!(messages[0]["content"], expected);
        assert_eq!(messages[1]["content"], json!([part("input[1].output[0].image_url")]));
    }

    #[test]
    fn logprobs_and_truncation_are_converted() {
        let chat = |mut fields: Value| {
            fields["input"] = "a".into();
            let chat = to_chat(&fields).unwrap();
            json!([chat["logprobs"], chat["top_logprobs"], chat["context_policy"]])
        };
        let include = json!(["reasoning.encrypted_content", "message.output_text.logprobs"]);
        for (fields, expected) in [
            (json!({"include": include}), json!([true, 0, null])),
            (json!({"include": include, "top_logprobs": 2}), json!([true, 2, null])),
            (json!({"top_logprobs": 2}), json!([true, 2, null])),
            (json!({"top_logprobs": 0, "truncation": "disabled"}), json!([null, null, null])),
            (json!({"truncation": "auto"}), json!([null, null, "evict"])),
            (json!({"truncation": "auto", "context_policy": "shift"}), json!([null, null, "shift"])),
        ] {
            assert_eq!(chat(fields.clone()), expected, "{fields}");
        }
    }

    #[test]
    fn hosted_tools_are_ignored() {
        let tools =
            json!([{"type": "web_search"}, {"type": "function", "name": "f"}, {"type": "custom", "name": "patch"}]);
        let chat = to_chat(&json!({"input": "a", "tools": tools})).unwrap();
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
            (json!({"input": [{"type": "computer_call", "id": "x"}]}), "input[0].type"),
            (json!({"input": "a", "include": "x"}), "include"),
            (json!({"input": "a", "truncation": "some"}), "truncation"),
            (json!({"input": "a", "max_output_tokens": 0}), "max_output_tokens"),
        ] {
            assert_eq!(to_chat(&body).unwrap_err().problem().pointer.as_deref(), Some(pointer), "{body}");
        }
    }
}
