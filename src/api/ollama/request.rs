//! Converts the bodies of Ollama's chats and generations to that of a chat completion, whose parser validates them.
//!
//! Both shapes belong to clients, so the converted body is JSON and not a type of its own.

use crate::api::shared::fields::{Fields, integer, invalid_value};
use crate::events::TokenId;
use crate::server::ApiError;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use utoipa::ToSchema;

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
];

/// Options that Ollama applies when it loads a model. Here the server's flags decide.
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

/// The body of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct OllamaChatBody {
    /// The conversation; an empty list loads the model.
    messages: Vec<OllamaMessageBody>,
    /// Tools: `{type: "function", function: {name, description?, parameters}}`.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    #[serde(flatten)]
    common: OllamaCommonFields,
}

/// The body of a generation.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct OllamaGenerateBody {
    /// The prompt; without one the model is loaded.
    prompt: Option<String>,
    /// Text after the answer, for models that were trained for infilling.
    suffix: Option<String>,
    /// The system message.
    system: Option<String>,
    /// Use the prompt without the model's chat template.
    #[schema(default = false)]
    raw: Option<bool>,
    /// `context` of the previous response.
    context: Option<Vec<TokenId>>,
    #[serde(flatten)]
    common: OllamaCommonFields,
}

/// Fields of chats and generations.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct OllamaCommonFields {
    /// Name of the model, optionally followed by mods: `model/mod`.
    model: String,
    /// `"json"`, or a JSON schema that the answer follows.
    #[schema(value_type = Option<Value>)]
    format: Option<Value>,
    /// Sampling parameters, `num_predict`, `stop`, `mods`, and all further parameters of a chat completion.
    #[schema(value_type = Option<Object>)]
    options: Option<Value>,
    /// Turn reasoning on or off, or its effort: `"low"`, `"medium"`, `"high"`.
    #[schema(value_type = Option<Value>)]
    think: Option<Value>,
    /// Answer with a stream of JSON lines.
    #[schema(default = true)]
    stream: Option<bool>,
    /// 0 in a request without messages or prompt unloads the model; otherwise without effect.
    #[schema(value_type = Option<Value>)]
    keep_alive: Option<Value>,
}

/// A message of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct OllamaMessageBody {
    /// `system`, `user`, `assistant` or `tool`.
    role: String,
    content: Option<String>,
    /// Reasoning of an assistant's message.
    thinking: Option<String>,
    /// Tool calls of an assistant's message: `{function: {name, arguments}}`.
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
    /// The tool whose result a message of the role `tool` contains.
    tool_name: Option<String>,
}

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

/// Returns the name of the requested model. The tag `latest` is Ollama's default.
pub(super) fn model(fields: Fields<'_>) -> Result<Option<&str>, ApiError> {
    let name = fields.text("model")?.filter(|name| !name.is_empty());
    Ok(name.map(|name| name.strip_suffix(":latest").unwrap_or(name)))
}

/// Converts the body of a chat.
pub(super) fn parse_chat(body: &Value) -> Result<OllamaRequest, ApiError> {
    let fields = Fields::new(body)?;
    let list = fields.list("messages")?.map(Vec::as_slice).unwrap_or_default();
    if list.is_empty() {
        return Ok(load_request(fields));
    }
    let mut converted = common(body)?;
    converted.insert("messages".into(), messages(list)?.into());
    if let Some(tools) = fields.list("tools")?.filter(|tools| !tools.is_empty()) {
        converted.insert("tools".into(), Value::Array(tools.clone()));
    }
    Ok(OllamaRequest::Chat(converted.into(), Vec::new()))
}

/// Converts the body of a generation.
pub(super) fn parse_generate(body: &Value) -> Result<OllamaRequest, ApiError> {
    let fields = Fields::new(body)?;
    refuse_images(fields.get("images"), "images")?;
    if fields.text("template")?.is_some_and(|template| !template.is_empty()) {
        let detail = "`template` must be absent: prompts use the model's chat template; send the whole prompt with \"raw\": true to use another one";
        return Err(ApiError::invalid("template", detail));
    }
    let prompt = fields.text("prompt")?.unwrap_or_default();
    let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
    if prompt.is_empty() && suffix.is_none() {
        return Ok(load_request(fields));
    }
    let mut converted = common(body)?;
    if fields.flag("raw")?.unwrap_or(false) || suffix.is_some() {
        converted.insert("prompt".into(), prompt.into());
        converted.extend(suffix.map(|suffix| ("suffix".to_owned(), suffix.into())));
        return Ok(OllamaRequest::Raw(converted.into()));
    }
    let system = fields.text("system")?.filter(|system| !system.is_empty());
    let system = system.map(|system| json!({ "role": "system", "content": system }));
    let messages: Vec<Value> = system.into_iter().chain([json!({ "role": "user", "content": prompt })]).collect();
    converted.insert("messages".into(), messages.into());
    let token = |value: &Value| {
        let token = integer(value).and_then(|token| TokenId::try_from(token).ok()).filter(|token| *token >= 0);
        token.ok_or_else(|| invalid_value("context", "the list of token ids of an earlier response", value))
    };
    let context = fields.list("context")?.into_iter().flatten().map(token).collect::<Result<_, _>>()?;
    Ok(OllamaRequest::Chat(converted.into(), context))
}

/// Returns the request that a body without messages or prompt makes.
fn load_request(fields: Fields<'_>) -> OllamaRequest {
    let is_zero = match fields.get("keep_alive") {
        Some(Value::Number(number)) => number.as_f64() == Some(0.0),
        Some(Value::String(text)) => text.trim_end_matches(|unit: char| unit.is_ascii_alphabetic()) == "0",
        _ => false,
    };
    if is_zero { OllamaRequest::Unload } else { OllamaRequest::Load }
}

/// Converts the fields that chats and generations share.
fn common(body: &Value) -> Result<Map<String, Value>, ApiError> {
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
        Some(other) => return Err(invalid_value("format", "\"json\" or a JSON schema, an object", other)),
    }
    match fields.get("think") {
        None | Some(Value::Null) => {}
        Some(Value::Bool(enabled)) => {
            converted.insert("enable_thinking".into(), (*enabled).into());
        }
        Some(Value::String(effort)) if matches!(effort.as_str(), "low" | "medium" | "high") => {
            converted.insert("enable_thinking".into(), true.into());
            converted.insert("reasoning_effort".into(), effort.as_str().into());
        }
        Some(other) => return Err(invalid_value("think", "true, false, \"low\", \"medium\" or \"high\"", other)),
    }
    Ok(converted)
}

fn refuse_images(images: Option<&Value>, at: &str) -> Result<(), ApiError> {
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
fn messages(list: &[Value]) -> Result<Vec<Value>, ApiError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: &Value) -> Value {
        match parse_chat(body).unwrap() {
            OllamaRequest::Chat(chat, context) if context.is_empty() => chat,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn chat_becomes_a_chat_completion() {
        let body = json!({
            "model": "demo/log-top:latest", "think": "low", "format": {"type": "object"}, "keep_alive": "5m",
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
          "model": "demo/log-top",
          "stream": true,
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
          ]
        }
        "#);
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
            assert_eq!(parse_chat(&body).unwrap(), expected, "{body}");
        }
    }

    #[test]
    fn invalid_fields_are_named() {
        let message = |message: Value| json!({"messages": [message]});
        for (body, pointer) in [
            (json!({"messages": 5}), "messages"),
            (message(json!(5)), "messages[0]"),
            (message(json!({"role": "user", "content": "a", "images": ["aGk="]})), "messages[0].images"),
            (
                message(json!({"role": "assistant", "tool_calls": [{"name": "x"}]})),
                "messages[0].tool_calls[0].function.name",
            ),
            (json!({"messages": [{"role": "user"}], "format": "xml"}), "format"),
            (json!({"messages": [{"role": "user"}], "think": "much"}), "think"),
            (json!({"messages": [{"role": "user"}], "options": {"num_predict": -3}}), "options.num_predict"),
            (json!({"messages": [{"role": "user"}], "options": 5}), "options"),
        ] {
            assert_eq!(parse_chat(&body).unwrap_err().problem().pointer.as_deref(), Some(pointer), "{body}");
        }
        for (body, pointer) in [
            (json!({"prompt": "a", "images": ["aGk="]}), "images"),
            (json!({"prompt": "a", "template": "{{ .Prompt }}"}), "template"),
            (json!({"prompt": "a", "context": [-1]}), "context"),
        ] {
            assert_eq!(parse_generate(&body).unwrap_err().problem().pointer.as_deref(), Some(pointer), "{body}");
        }
    }
}
