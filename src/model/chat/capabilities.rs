//! Detection of a template's capabilities by rendering probes, because templates do not declare them.

use super::RenderOptions;
use super::renderer::JinjaRenderer;
use chrono::DateTime;
use serde_json::{Map, Value, json};

/// A word that no template contains.
const PROBE: &str = "probe_7f3a";

/// The capabilities of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DetectedCapabilities {
    /// True if it describes tools.
    pub(super) tools: bool,
    /// True if it supports a system message.
    pub(super) system: bool,
    /// True if it expects the arguments of a call as JSON text instead of an object.
    pub(super) arguments_as_text: bool,
}

impl DetectedCapabilities {
    /// Renders small conversations and examines the output.
    pub(super) fn detect(template: &JinjaRenderer, source: &str) -> Self {
        let render = |messages: Value, tools: Option<Value>| {
            let list = messages.as_array().cloned().unwrap_or_default();
            template.text(&list, &probe_options(tools)).ok()
        };
        let user = json!({ "role": "user", "content": "a" });
        let tool = json!([{ "type": "function", "function": { "name": PROBE, "description": "b",
            "parameters": { "type": "object", "properties": { "c": { "type": "string", "description": "d" } },
                            "required": ["c"] } } }]);
        let tools = match render(json!([user]), Some(tool.clone())) {
            Some(text) => text.contains(PROBE),
            None => source.contains("tools"),
        };
        let system = render(json!([{ "role": "system", "content": PROBE }, user]), None);
        let shows_arguments = |arguments: Value| {
            let call = json!({ "id": "abcdefghi", "type": "function",
                               "function": { "name": "f", "arguments": arguments } });
            let assistant = json!({ "role": "assistant", "content": "", "tool_calls": [call] });
            let result = json!({ "role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "e" });
            let text = render(json!([user, assistant, result, user]), Some(tool.clone()));
            text.is_some_and(|text| text.contains(&format!("\"{PROBE}\"")))
        };
        let object = shows_arguments(json!({ PROBE: 1 }));
        let arguments_as_text = !object && shows_arguments(format!("{{\"{PROBE}\": 1}}").into());
        let system = system.is_some_and(|text| text.contains(PROBE));
        Self { tools, system, arguments_as_text }
    }
}

/// Returns true if a template shows the content of a message only if it is a list of parts.
pub(super) fn needs_typed_content(template: &JinjaRenderer) -> bool {
    let shows = |content: Value| {
        let messages = [json!({ "role": "user", "content": content })];
        template.text(&messages, &probe_options(None)).is_ok_and(|text| text.contains(PROBE))
    };
    !shows(PROBE.into()) && shows(json!([{ "type": "text", "text": PROBE }]))
}

fn probe_options(tools: Option<Value>) -> RenderOptions {
    RenderOptions {
        tools,
        add_generation_prompt: true,
        continue_final: false,
        variables: Map::new(),
        now: DateTime::UNIX_EPOCH,
    }
}
