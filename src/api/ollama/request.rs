//! Converts the bodies of Ollama's chats and generations to that of a chat completion, whose parser validates them.
//!
//! The converted body is a JSON value, not a struct.

use super::messages::{messages, with_images};
use crate::api::shared::fields::{Fields, integer, invalid_value};
use crate::events::{TokenId, is_image_token};
use crate::server::ApiError;
use serde_json::{Map, Value, json};

/// Fields of a body that are converted or have no effect; all others are copied.
const CONVERTED: &[&str] = &[
    "model",
    "messages",
    "tools",
    "format",
    "options",
    "think",
    "keep_alive",
    "stream",
    "prompt",
    "suffix",
    "system",
    "template",
    "raw",
    "context",
    "images",
    "logprobs",
    "top_logprobs",
    "truncate",
    "shift",
];

/// Options that Ollama applies when it loads a model. They are ignored, because the server's flags determine them.
const LOAD_OPTIONS: &[&str] = &[
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "numa",
    "low_vram",
    "f16_kv",
    "logits_all",
    "vocab_only",
    "use_mmap",
    "use_mlock",
    "embedding_only",
];

/// A converted body.
#[derive(Debug, PartialEq)]
pub(super) enum OllamaRequest {
    /// The body of a chat completion, and the tokens that precede its prompt.
    Chat(Value, Vec<TokenId>),
    /// The body of a completion: `prompt` and, for infilling, `suffix` are used without a chat template.
    Raw(Value),
    /// Loads the model.
    Load,
    /// Unloads the model.
    Unload,
}

/// Returns the name of the requested model.
pub(super) fn model(fields: Fields<'_>) -> Result<Option<&str>, ApiError> {
    model_in(fields, "model")
}

/// Returns the name of the requested model in a field.
pub(super) fn model_in<'a>(fields: Fields<'a>, field: &str) -> Result<Option<&'a str>, ApiError> {
    Ok(fields.text(field)?.filter(|name| !name.is_empty()))
}

/// Converts the body of a chat; `defaults` are the server's defaults of requests.
pub(super) fn parse_chat(body: &Value, defaults: &Map<String, Value>) -> Result<OllamaRequest, ApiError> {
    let fields = Fields::new(body)?;
    let list = fields.list("messages")?.map(Vec::as_slice).unwrap_or_default();
    if list.is_empty() {
        return Ok(load_request(fields));
    }
    let mut converted = convert_common_fields(body)?;
    converted.insert("messages".into(), messages(list)?.into());
    if let Some(tools) = fields.list("tools")?.filter(|tools| !tools.is_empty()) {
        converted.insert("tools".into(), Value::Array(tools.clone()));
    }
    if fields.flag("truncate")?.unwrap_or(!defaults.contains_key("context_policy")) {
        converted.entry("context_policy").or_insert_with(|| "evict".into());
    }
    Ok(OllamaRequest::Chat(converted.into(), Vec::new()))
}

/// Converts the body of a generation.
pub(super) fn parse_generate(body: &Value) -> Result<OllamaRequest, ApiError> {
    let fields = Fields::new(body)?;
    if fields.text("template")?.is_some_and(|template| !template.is_empty()) {
        let detail = "`template` must be absent: prompts use the model's chat template; send the whole prompt with \"raw\": true to use another one";
        return Err(ApiError::invalid("template", detail));
    }
    let prompt = fields.text("prompt")?.unwrap_or_default();
    let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
    if prompt.is_empty() && suffix.is_none() {
        return Ok(load_request(fields));
    }
    let mut converted = convert_common_fields(body)?;
    let content = with_images(prompt.into(), fields.get("images"), "images")?;
    let system = fields.text("system")?.filter(|system| !system.is_empty());
    let token = |value: &Value| {
        let token = integer(value).and_then(|token| TokenId::try_from(token).ok());
        let token = token.filter(|&token| token >= 0 || is_image_token(token));
        token.ok_or_else(|| invalid_value("context", "the list of token ids of an earlier response", value))
    };
    let context: Vec<TokenId> = fields.list("context")?.into_iter().flatten().map(token).collect::<Result<_, _>>()?;
    let is_raw = fields.flag("raw")?.unwrap_or(false);
    let of_template = [("system", system.is_some()), ("context", !context.is_empty())];
    if is_raw && let Some((field, _)) = of_template.into_iter().find(|(_, is_present)| *is_present) {
        let detail = format!("`{field}` must be absent with \"raw\": true; send the whole prompt in `prompt`");
        return Err(ApiError::invalid(field, detail));
    }
    if is_raw || suffix.is_some() {
        if content.is_array() {
            let detail = "`images` require the model's chat template; omit `raw` and `suffix`, or send no images";
            return Err(ApiError::invalid("images", detail));
        }
        converted.insert("prompt".into(), prompt.into());
        converted.extend(suffix.map(|suffix| ("suffix".to_owned(), suffix.into())));
        return Ok(OllamaRequest::Raw(converted.into()));
    }
    let system = system.map(|system| json!({ "role": "system", "content": system }));
    let messages: Vec<Value> = system.into_iter().chain([json!({ "role": "user", "content": content })]).collect();
    converted.insert("messages".into(), messages.into());
    Ok(OllamaRequest::Chat(converted.into(), context))
}

/// Returns the request of a body without messages or prompt.
fn load_request(fields: Fields<'_>) -> OllamaRequest {
    let is_zero = match fields.get("keep_alive") {
        Some(Value::Number(number)) => number.as_f64() == Some(0.0),
        Some(Value::String(text)) => text.trim_end_matches(|unit: char| unit.is_ascii_alphabetic()) == "0",
        _ => false,
    };
    if is_zero { OllamaRequest::Unload } else { OllamaRequest::Load }
}

/// Converts the fields that chats and generations share.
fn convert_common_fields(body: &Value) -> Result<Map<String, Value>, ApiError> {
    let fields = Fields::new(body)?;
    let options = fields.object("options")?;
    let mut converted: Map<String, Value> = Map::new();
    for (name, value) in options.into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        match name.as_str() {
            "num_predict" => {
                let tokens = integer(value).filter(|tokens| (-2..=i64::from(i32::MAX)).contains(tokens));
                let tokens = tokens.ok_or_else(|| {
                    invalid_value("options.num_predict", "an integer of 0 or more, or -1 or -2 for no limit", value)
                })?;
                converted.insert("max_tokens".into(), tokens.max(-1).into());
            }
            "num_keep" => {
                converted.insert("n_keep".into(), value.clone());
            }
            name if LOAD_OPTIONS.contains(&name) => {}
            _ => {
                converted.insert(name.clone(), value.clone());
            }
        }
    }
    let copied = body.as_object().into_iter().flatten().filter(|(name, _)| !CONVERTED.contains(&name.as_str()));
    converted.extend(copied.map(|(name, value)| (name.clone(), value.clone())));
    converted.extend(model(fields)?.map(|model| ("model".to_owned(), model.into())));
    converted.insert("stream".into(), fields.flag("stream")?.unwrap_or(true).into());
    if fields.flag("logprobs")?.unwrap_or(false) {
        converted.insert("logprobs".into(), true.into());
        converted.insert("top_logprobs".into(), fields.get("top_logprobs").cloned().unwrap_or_else(|| 0.into()));
    }
    match fields.get("format") {
        None | Some(Value::Null) => {}
        Some(Value::String(name)) if name.is_empty() => {}
        Some(Value::String(name)) if name == "json" => {
            converted.insert("response_format".into(), json!({ "type": "json_object" }));
        }
        Some(schema @ Value::Object(_)) => {
            let schema = json!({ "name": "output", "schema": schema });
            converted.insert("response_format".into(), json!({ "type": "json_schema", "json_schema": schema }));
        }
        Some(other) => return Err(invalid_value("format", "\"json\" or a JSON schema object", other)),
    }
    match fields.get("think") {
        None | Some(Value::Null) => {}
        Some(Value::Bool(enabled)) => {
            converted.insert("enable_thinking".into(), (*enabled).into());
        }
        Some(Value::String(effort)) if matches!(effort.as_str(), "low" | "medium" | "high" | "max") => {
            // Templates know no higher effort.
            let effort = if effort == "max" { "high" } else { effort };
            converted.insert("enable_thinking".into(), true.into());
            converted.insert("reasoning_effort".into(), effort.into());
        }
        Some(other) => {
            return Err(invalid_value("think", "true, false, \"low\", \"medium\", \"high\" or \"max\"", other));
        }
    }
    Ok(converted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: &Value) -> Value {
        match parse_chat(body, &Map::new()).unwrap() {
            OllamaRequest::Chat(chat, context) if context.is_empty() => chat,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn chat_becomes_a_chat_completion() {
        let body = json!({
            "model": "demo/log-top:latest", "think": "low", "format": {"type": "object"}, "keep_alive": "5m",
            "logprobs": true, "top_logprobs": 3, "shift": true,
            "options": {"num_predict": -2, "temperature": 0.5, "num_ctx": 512, "stop": ["x"], "num_keep": 4,
                "top_k": null, "mods": ["log-top"]},
            "messages": [
                {"role": "user", "content": "a", "images": []},
                {"role": "assistant", "thinking": "hm", "tool_calls": [
                    {"function": {"name": "one", "arguments": {"n": 1}}}, {"function": {"name": "two", "arguments": {}}}]},
                {"role": "tool", "tool_name": "two", "content": "2"},
                {"role": "tool", "content": "1"}
            ]
        });
        insta::assert_json_snapshot!(chat(&body), @r#"
        {
          "max_tokens": -1,
          "temperature": 0.5,
          "stop": [
            "x"
          ],
          "n_keep": 4,
          "mods": [
            "log-top"
          ],
          "model": "demo/log-top:latest",
          "stream": true,
          "logprobs": true,
          "top_logprobs": 3,
          "response_format": {
            "type": "json_schema",
            "json_schema": {
              "name": "output",
              "schema": {
                "type": "object"
              }
            }
          },
          "enable_thinking": true,
          "reasoning_effort": "low",
          "messages": [
            {
              "role": "user",
              "content": "a"
            },
            {
              "role": "assistant",
              "reasoning_content": "hm",
              "content": "",
              "tool_calls": [
                {
                  "id": "call_1_0",
                  "type": "function",
                  "function": {
                    "name": "one",
                    "arguments": {
                      "n": 1
                    }
                  }
                },
                {
                  "id": "call_1_1",
                  "type": "function",
                  "function": {
                    "name": "two",
                    "arguments": {}
                  }
                }
              ]
            },
            {
              "role": "tool",
              "name": "two",
              "content": "2",
              "tool_call_id": "call_1_1"
            },
            {
              "role": "tool",
              "content": "1",
              "tool_call_id": "call_1_0"
            }
          ],
          "context_policy": "evict"
        }
        "#);
    }

    #[test]
    fn old_messages_are_dropped_unless_another_policy_is_set() {
        let shift = Map::from_iter([("context_policy".to_owned(), json!("shift"))]);
        for (body, expected, with_server_policy) in [
            (json!({}), json!("evict"), Value::Null),
            (json!({"truncate": true}), json!("evict"), json!("evict")),
            (json!({"truncate": false}), Value::Null, Value::Null),
            (json!({"options": {"context_policy": "stop"}}), json!("stop"), json!("stop")),
        ] {
            let mut body = body;
            body["messages"] = json!([{"role": "user", "content": "a"}]);
            for (defaults, expected) in [(&Map::new(), expected), (&shift, with_server_policy)] {
                let Ok(OllamaRequest::Chat(chat, _)) = parse_chat(&body, defaults) else { panic!("{body}") };
                assert_eq!(chat["context_policy"], expected, "{body}, {defaults:?}");
            }
        }
    }

    #[test]
    fn maximum_effort_is_high() {
        let chat = chat(&json!({"messages": [{"role": "user"}], "think": "max", "top_logprobs": 2}));
        assert_eq!((&chat["enable_thinking"], &chat["reasoning_effort"]), (&json!(true), &json!("high")));
        assert_eq!((&chat["logprobs"], &chat["top_logprobs"]), (&Value::Null, &Value::Null));
    }

    #[test]
    fn generation_becomes_a_chat_or_a_completion() {
        let parsed =
            parse_generate(&json!({"prompt": "a", "system": "s", "context": [1, 2], "stream": false})).unwrap();
        let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]);
        assert_eq!(parsed, OllamaRequest::Chat(json!({"stream": false, "messages": messages}), vec![1, 2]));
        let parsed = parse_generate(&json!({"prompt": "a", "raw": true, "format": "json"})).unwrap();
        let format = json!({"type": "json_object"});
        let expected = json!({"stream": true, "response_format": format, "prompt": "a"});
        assert_eq!(parsed, OllamaRequest::Raw(expected));
        let parsed = parse_generate(&json!({"prompt": "a", "suffix": "b"})).unwrap();
        assert_eq!(parsed, OllamaRequest::Raw(json!({"stream": true, "prompt": "a", "suffix": "b"})));
    }

    #[test]
    fn request_without_prompt_loads_or_unloads() {
        for (body, expected) in [
            (json!({}), OllamaRequest::Load),
            (json!({"prompt": "", "keep_alive": "5m"}), OllamaRequest::Load),
            (json!({"keep_alive": 0}), OllamaRequest::Unload),
            (json!({"keep_alive": "0s"}), OllamaRequest::Unload),
            (json!({"keep_alive": -1}), OllamaRequest::Load),
        ] {
            assert_eq!(parse_generate(&body).unwrap(), expected, "{body}");
            assert_eq!(parse_chat(&body, &Map::new()).unwrap(), expected, "{body}");
        }
    }

    #[test]
    fn invalid_fields_are_named() {
        let message = |message: Value| json!({"messages": [message]});
        for (body, pointer) in [
            (json!({"messages": 5}), "messages"),
            (message(json!(5)), "messages[0]"),
            (message(json!({"role": "user", "content": "a", "images": "aGk="})), "messages[0].images"),
            (message(json!({"role": "user", "content": "a", "images": [5]})), "messages[0].images[0]"),
            (
                message(json!({"role": "assistant", "tool_calls": [{"name": "x"}]})),
                "messages[0].tool_calls[0].function.name",
            ),
            (json!({"messages": [{"role": "user"}], "format": "xml"}), "format"),
            (json!({"messages": [{"role": "user"}], "think": "much"}), "think"),
            (json!({"messages": [{"role": "user"}], "options": {"num_predict": -3}}), "options.num_predict"),
            (json!({"messages": [{"role": "user"}], "options": 5}), "options"),
            (json!({"messages": [{"role": "user"}], "truncate": "no"}), "truncate"),
            (json!({"messages": [{"role": "user"}], "logprobs": 5}), "logprobs"),
        ] {
            assert_eq!(
                parse_chat(&body, &Map::new()).unwrap_err().problem().pointer.as_deref(),
                Some(pointer),
                "{body}"
            );
        }
        for (body, pointer) in [
            (json!({"prompt": "a", "images": 5}), "images"),
            (json!({"prompt": "a", "raw": true, "images": ["aGk="]}), "images"),
            (json!({"prompt": "a", "raw": true, "system": "s", "context": []}), "system"),
            (json!({"prompt": "a", "raw": true, "system": "", "context": [1]}), "context"),
            (json!({"prompt": "a", "template": "{{ .Prompt }}"}), "template"),
            (json!({"prompt": "a", "context": [-1]}), "context"),
        ] {
            assert_eq!(parse_generate(&body).unwrap_err().problem().pointer.as_deref(), Some(pointer), "{body}");
        }
    }
}
