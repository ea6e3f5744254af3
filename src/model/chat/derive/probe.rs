//! Known messages that a template renders for the derivation.

use crate::model::chat::RenderOptions;
use crate::model::chat::answer::ToolDefinition;
use crate::model::chat::renderer::JinjaRenderer;
use chrono::DateTime;
use serde_json::{Map, Value, json};
use std::cell::Cell;

/// The user's message; a word that no template contains, like the two below.
pub(super) const USER: &str = "QuserQ7";
/// The text of the answer.
pub(super) const CONTENT: &str = "QcontentQ7";
/// The reasoning before the answer.
pub(super) const REASONING: &str = "QreasoningQ7";

/// Maximum length of a rendering.
const MAX_TEXT: usize = 1 << 18;
/// Maximum renderings of one template.
const MAX_RENDERINGS: u32 = 60;
/// Number of renderings that a failed one counts as.
const COST_OF_FAILURE: u32 = 3;

/// A call with known name, id and arguments.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct KnownCall {
    pub(super) name: &'static str,
    pub(super) id: &'static str,
    pub(super) arguments: Value,
}

/// Names of the two compared functions.
pub(super) const NAMES: [&str; 2] = ["zaphod_x1", "marvin_q22"];
/// Ids of the two calls.
pub(super) const IDS: [&str; 2] = ["q7Zk2mP4x", "B3tR8wLd1"];
/// Keys of the arguments of the two calls.
pub(super) const KEYS: [&str; 2] = ["kexa", "wobby"];
/// Values of these keys.
pub(super) const VALUES: [&str; 2] = ["trillian", "fordprefect"];

/// Returns the first or the second call with its own argument.
pub(super) fn call(index: usize) -> KnownCall {
    with_arguments(index, json!({ KEYS[index]: VALUES[index] }))
}

/// Returns the first or the second call with other arguments.
pub(super) fn with_arguments(index: usize, arguments: Value) -> KnownCall {
    KnownCall { name: NAMES[index], id: IDS[index], arguments }
}

/// Returns arguments of each type.
pub(super) fn typed_arguments() -> Value {
    json!({ KEYS[0]: VALUES[0], "amount": 7421, "flag": true, "nested": { "inner": "deep" }, "rows": ["left", "right"] })
}

fn parameters() -> Value {
    json!({
        "type": "object",
        "properties": {
            KEYS[0]: { "type": "string", "description": "a" },
            KEYS[1]: { "type": "string", "description": "b" },
            "amount": { "type": "integer", "description": "c" },
            "flag": { "type": "boolean", "description": "d" },
            "nested": { "type": "object", "description": "e", "required": [], "additionalProperties": { "type": "string" },
                        "properties": { "inner": { "type": "string", "description": "f" } } },
            "rows": { "type": "array", "description": "g", "items": { "type": "string" } },
        },
        "required": [],
        "additionalProperties": false,
    })
}

/// Returns the called functions.
pub(super) fn tools() -> Vec<ToolDefinition> {
    NAMES
        .iter()
        .map(|name| ToolDefinition { name: (*name).to_owned(), parameters: parameters(), strict: false })
        .collect()
}

/// A renderer of conversations with one user message and one answer.
pub(super) struct Probe<'a> {
    template: &'a JinjaRenderer,
    /// True if the template expects the arguments of a call as JSON text.
    arguments_as_text: bool,
    tools: Value,
    renderings: Cell<u32>,
    /// True if the template requires null as the content of a message without text.
    null_content: Cell<bool>,
}

impl<'a> Probe<'a> {
    pub(super) fn new(template: &'a JinjaRenderer, arguments_as_text: bool) -> Self {
        let tools = NAMES.map(|name| {
            json!({ "type": "function", "function": { "name": name, "description": "h", "parameters": parameters() } })
        });
        Self {
            template,
            arguments_as_text,
            tools: tools.to_vec().into(),
            renderings: Cell::new(0),
            null_content: Cell::new(false),
        }
    }

    /// Renders the user's message and this message, and returns the text after the user's message; without a message,
    /// the start of an answer.
    pub(super) fn after_user(&self, message: Option<Value>) -> Option<String> {
        if self.renderings.replace(self.renderings.get() + 1) >= MAX_RENDERINGS {
            return None;
        }
        let mut variables = Map::new();
        if message.is_some() {
            variables.extend([("enable_thinking".to_owned(), true.into()), ("thinking".to_owned(), true.into())]);
        }
        let options = RenderOptions {
            tools: Some(self.tools.clone()),
            add_generation_prompt: message.is_none(),
            continue_final: false,
            variables,
            now: DateTime::UNIX_EPOCH,
        };
        let user = json!({ "role": "user", "content": USER });
        let messages: Vec<Value> = std::iter::once(user).chain(message).collect();
        let text = self.template.text(&messages, &options).ok().filter(|text| text.len() <= MAX_TEXT);
        if text.is_none() {
            // A template that uses all its fuel is rendered only a few more times.
            self.renderings.set(self.renderings.get() + COST_OF_FAILURE);
        }
        let text = text?;
        let at = text.rfind(USER)?;
        Some(text[at + USER.len()..].to_owned())
    }

    /// Renders an answer with this text, reasoning and calls.
    pub(super) fn answer(&self, content: &str, reasoning_field: Option<&str>, calls: &[KnownCall]) -> Option<String> {
        let content = if content.is_empty() && self.null_content.get() { Value::Null } else { content.into() };
        let mut message = json!({ "role": "assistant", "content": content });
        if let Some(field) = reasoning_field {
            message[field] = REASONING.into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.iter().map(|call| self.call_json(call)).collect();
        }
        self.after_user(Some(message))
    }

    /// Renders calls; a template may require null for missing text.
    pub(super) fn calls(&self, calls: &[KnownCall]) -> Option<String> {
        let has_calls = |text: &String| calls.iter().all(|call| text.contains(call.name));
        let first = self.answer("", None, calls).filter(has_calls);
        if first.is_some() || self.null_content.get() {
            return first;
        }
        self.null_content.set(true);
        let second = self.answer("", None, calls).filter(has_calls);
        self.null_content.set(second.is_some());
        second
    }

    fn call_json(&self, call: &KnownCall) -> Value {
        let arguments = if self.arguments_as_text { call.arguments.to_string().into() } else { call.arguments.clone() };
        json!({ "id": call.id, "type": "function", "function": { "name": call.name, "arguments": arguments } })
    }
}
