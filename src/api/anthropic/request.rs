//! Converts the body of Anthropic's Messages to that of a chat completion.
//!
//! The converted body is parsed like that of any other chat completion, so it is a JSON value, not a struct.

use super::messages::{join_texts, push_message};
use super::tools::{convert_tool, convert_tool_choice};
use crate::api::shared::ClientNames;
use crate::api::shared::fields::{Fields, integer, invalid_value};
use crate::server::ApiError;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// Fields that are converted; all others are copied.
const CONVERTED: &[&str] = &[
    "system",
    "messages",
    "tools",
    "tool_choice",
    "stop_sequences",
    "metadata",
    "thinking",
    "output_config",
    "output_format",
    "n",
];

/// The body of `POST /v1/messages`. All fields of a chat completion are accepted too.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct MessagesBody {
    /// Name of the model, optionally followed by mods; default is the server's default model.
    model: Option<String>,
    /// Maximum tokens of the answer; default is the rest of the context.
    max_tokens: Option<u32>,
    /// The conversation: objects with `role` and `content`, which is a text or a list of content blocks.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Value>,
    /// The system prompt: a text, or a list of text blocks.
    #[schema(value_type = Option<Value>)]
    system: Option<Value>,
    /// Tools: `{name, description?, input_schema}`.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// `{type: "auto" | "any" | "none"}` or `{type: "tool", name}`.
    #[schema(value_type = Option<Object>)]
    tool_choice: Option<Value>,
    stop_sequences: Option<Vec<String>>,
    /// Answer with server-sent events.
    #[schema(default = false)]
    stream: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i32>,
    /// `{type: "enabled" | "adaptive" | "between_tools" | "disabled", budget_tokens?}`.
    #[schema(value_type = Option<Object>)]
    thinking: Option<Value>,
    /// `{user_id?}`.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Value>,
}

/// Parses the stop sequences.
pub(super) fn stop_sequences(body: &Value) -> Result<Vec<String>, ApiError> {
    let Some(list) = Fields::new(body)?.list("stop_sequences")? else { return Ok(Vec::new()) };
    let text = |text: &Value| match text.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(invalid_value("stop_sequences", "a list of strings", text)),
    };
    list.iter().map(text).collect()
}

/// Converts the body to that of a chat completion. Unlike on Anthropic's server, `max_tokens` is optional; without it
/// the answer may fill the context. Also returns the client's names of the converted fields.
pub(super) fn to_chat(body: &Value) -> Result<(Value, ClientNames), ApiError> {
    let fields = Fields::new(body)?;
    let mut chat = fields.without(CONVERTED);
    let mut names = ClientNames::default();
    let mut messages = Vec::new();
    if let Some(system) = fields.get("system") {
        let text = without_checksum(join_texts(system, "system")?);
        messages.push(json!({ "role": "system", "content": text }));
        names.add("messages[0]", "system");
    }
    let list = fields.list("messages")?.filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| {
        ApiError::invalid("messages", "`messages` must be a list with at least one {\"role\": …, \"content\": …}")
    })?;
    for (index, message) in list.iter().enumerate() {
        let (at, first) = (format!("messages[{index}]"), messages.len());
        push_message(&mut messages, message, &at)?;
        for converted in first..messages.len() {
            names.add(format!("messages[{converted}]"), &at);
        }
    }
    chat.insert("messages".into(), messages.into());
    if let Some(tools) = fields.list("tools")? {
        let mut functions = Vec::new();
        for (index, tool) in tools.iter().enumerate() {
            let at = format!("tools[{index}]");
            let Some(function) = convert_tool(tool, &at)? else { continue };
            names.add(format!("tools[{}].function", functions.len()), &at);
            functions.push(function);
        }
        chat.insert("tools".into(), functions.into());
    }
    if let Some(choice) = fields.object("tool_choice")? {
        convert_tool_choice(choice, &mut chat)?;
    }
    let stops = stop_sequences(body)?;
    if !stops.is_empty() {
        chat.insert("stop".into(), stops.into());
        names.add("stop", "stop_sequences");
    }
    if let Some(user) = fields.object("metadata")?.and_then(|metadata| metadata.get("user_id")).and_then(Value::as_str)
    {
        chat.insert("user".into(), user.into());
        names.add("user", "metadata.user_id");
    }
    convert_output_config(fields, &mut chat, &mut names)?;
    if let Some(thinking) = fields.object("thinking")? {
        let enabled = match thinking.get("type").and_then(Value::as_str) {
            Some("enabled" | "adaptive" | "between_tools") => true,
            Some("disabled") => false,
            _ => {
                let found = thinking.get("type").unwrap_or(&Value::Null);
                return Err(invalid_value(
                    "thinking.type",
                    "\"enabled\", \"adaptive\", \"between_tools\" or \"disabled\"",
                    found,
                ));
            }
        };
        chat.insert("enable_thinking".into(), enabled.into());
        if let Some(budget) = thinking.get("budget_tokens").filter(|budget| enabled && !budget.is_null()) {
            let tokens = integer(budget).filter(|tokens| (1..=i64::from(i32::MAX)).contains(tokens));
            let tokens =
                tokens.ok_or_else(|| invalid_value("thinking.budget_tokens", "an integer of 1 or more", budget))?;
            chat.insert("reasoning_budget_tokens".into(), tokens.into());
        }
    }
    Ok((Value::Object(chat), names))
}

/// Replaces the checksum in the billing header of Claude Code with a constant, as llama-server does: it changes with each
/// request, and no tokens after it could be taken from the KV cache.
fn without_checksum(mut system: String) -> String {
    const HEADER: &str = "x-anthropic-billing-header:";
    const CHECKSUM: &str = "cch=";
    let header = system.lines().next().filter(|line| line.starts_with(HEADER)).unwrap_or_default();
    if let Some(at) = header.find(CHECKSUM) {
        let start = at + CHECKSUM.len();
        let end = header[start..].find(';').map_or(header.len(), |length| start + length);
        system.replace_range(start..end, "fffff");
    }
    system
}

/// Converts `output_config`: the answer's format and the reasoning effort.
fn convert_output_config(
    fields: Fields<'_>,
    chat: &mut Map<String, Value>,
    names: &mut ClientNames,
) -> Result<(), ApiError> {
    let config = fields.object("output_config")?;
    let member = |name: &str| config.and_then(|config| config.get(name)).filter(|value| !value.is_null());
    if let Some(effort) = member("effort") {
        let level = effort
            .as_str()
            .ok_or_else(|| invalid_value("output_config.effort", "a level such as \"low\" or \"high\"", effort))?;
        chat.insert("reasoning_effort".into(), level.into());
        names.add("reasoning_effort", "output_config.effort");
    }
    // Clients of the beta API send the format at the top level.
    let (at, format) = match (member("format"), fields.get("output_format")) {
        (Some(format), _) => ("output_config.format", format),
        (None, Some(format)) => ("output_format", format),
        (None, None) => return Ok(()),
    };
    if format["type"] != "json_schema" {
        return Err(invalid_value(&format!("{at}.type"), "\"json_schema\"", &format["type"]));
    }
    if !format["schema"].is_object() {
        return Err(invalid_value(&format!("{at}.schema"), "a JSON schema object", &format["schema"]));
    }
    let response_format = json!({ "type": "json_schema", "json_schema": { "name": "output", "schema": format["schema"], "strict": true } });
    chat.insert("response_format".into(), response_format);
    for name in ["response_format", "response_format.json_schema"] {
        names.add(name, at);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::server::ApiError;
    use serde_json::{Value, json};

    fn to_chat(body: &Value) -> Result<Value, ApiError> {
        super::to_chat(body).map(|(chat, _)| chat)
    }

    #[test]
    fn content_blocks_become_messages() {
        let body = json!({
            "model": "m", "max_tokens": 5, "top_k": 3, "stop_sequences": ["X"], "metadata": {"user_id": "u"},
            "system": [{"type": "text", "text": "Be short."}],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "So?"}]},
            ],
        });
        insta::assert_json_snapshot!(to_chat(&body).unwrap(), @r#"
        {
          "model": "m",
          "max_tokens": 5,
          "top_k": 3,
          "messages": [
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
                  "id": "t1",
                  "type": "function",
                  "function": {
                    "name": "f",
                    "arguments": {
                      "a": 1
                    }
                  }
                }
              ]
            },
            {
              "role": "tool",
              "tool_call_id": "t1",
              "content": "2"
            },
            {
              "role": "user",
              "content": "So?"
            }
          ],
          "tools": [
            {
              "type": "function",
              "function": {
                "name": "f",
                "parameters": {
                  "type": "object"
                },
                "description": "d"
              }
            }
          ],
          "tool_choice": {
            "type": "function",
            "function": {
              "name": "f"
            }
          },
          "parallel_tool_calls": false,
          "stop": [
            "X"
          ],
          "user": "u"
        }
        "#);
    }

    #[test]
    fn only_the_checksum_of_the_billing_header_is_replaced() {
        let header =
            |checksum: &str| format!("x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={checksum}");
        let blocks = |text: String| json!([{"type": "text", "text": text}, {"type": "text", "text": "Use cch=1;"}]);
        for (system, expected) in [
            (blocks(header("a5145;")), header("fffff;\nUse cch=1;")),
            (header("1c8b4;You are cch=2;").into(), header("fffff;You are cch=2;")),
            (header("1c8b4").into(), header("fffff")),
            ("Use cch=1;".into(), "Use cch=1;".to_owned()),
            ("a\nx-anthropic-billing-header: cch=1;".into(), "a\nx-anthropic-billing-header: cch=1;".to_owned()),
            ("x-anthropic-billing-header: a\ncch=1;".into(), "x-anthropic-billing-header: a\ncch=1;".to_owned()),
        ] {
            let chat = to_chat(&json!({"system": system, "messages": [{"role": "user", "content": "hi"}]})).unwrap();
            assert_eq!(chat["messages"][0]["content"], expected);
        }
    }

    #[test]
    fn output_format_and_system_messages_are_converted() {
        let body = json!({
            "max_tokens": 5, "tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": {}}],
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            "messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": [{"type": "text", "text": "Now."}]}],
        });
        let chat = to_chat(&body).unwrap();
        assert_eq!(chat["reasoning_effort"], "low");
        assert_eq!(chat["tools"].as_array().unwrap().len(), 1, "hosted tools are ignored");
        assert_eq!(chat["response_format"]["json_schema"]["schema"], json!({"type": "object"}));
        assert_eq!(chat["messages"][1], json!({"role": "system", "content": "Now."}));
        assert_eq!(chat.get("output_config"), None);
    }

    #[test]
    fn images_become_parts() {
        let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}});
        let result = json!({"type": "tool_result", "tool_use_id": "t", "is_error": true, "content": [image]});
        let body = json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, image]}, {"role": "user", "content": [result]}]});
        let part = |at: &str| crate::api::shared::chat::images::base64_part("aGk=", at);
        let messages = &to_chat(&body).unwrap()["messages"];
        let expected = json!([{"type": "text", "text": "a"}, part("messages[0].content[1].source.data")]);
        assert_eq!(messages[0]["content"], expected);
        let expected =
            json!([{"type": "text", "text": "Error: "}, part("messages[1].content[0].content[0].source.data")]);
        assert_eq!(messages[1]["content"], expected);
    }

    #[test]
    fn invalid_block_is_named() {
        let message = |content: Value| json!({"max_tokens": 1, "messages": [{"role": "user", "content": content}]});
        for (body, pointer) in [
            (json!({"messages": []}), "messages"),
            (json!({"max_tokens": 1, "messages": [{"role": "tool", "content": "a"}]}), "messages[0].role"),
            (json!({"max_tokens": 1, "messages": [{"role": "system", "content": 5}]}), "messages[0].content"),
            (
                json!({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "output_format": {"type": "json"}}),
                "output_format.type",
            ),
            (
                json!({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}],
                    "output_config": {"format": {"type": "json_schema"}}}),
                "output_config.format.schema",
            ),
            (message(json!(5)), "messages[0].content"),
            (message(json!([{"type": "image"}])), "messages[0].content[0].source.type"),
            (message(json!([{"type": "image", "source": {"type": "base64"}}])), "messages[0].content[0].source.data"),
            (message(json!([{"type": "document"}])), "messages[0].content[0].type"),
            (message(json!([{"type": "text"}])), "messages[0].content[0].text"),
            (message(json!([{"type": "tool_result"}])), "messages[0].content[0].tool_use_id"),
        ] {
            assert_eq!(to_chat(&body).unwrap_err().problem().pointer.as_deref(), Some(pointer), "{body}");
        }
    }
}
