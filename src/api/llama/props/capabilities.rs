//! Features of a model's chat template.

use crate::model::chat::{ChatTemplate, RenderOptions};
use crate::server::App;
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

/// Features of a chat template.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TemplateCapabilities {
    supports_string_content: bool,
    supports_typed_content: bool,
    supports_tools: bool,
    supports_tool_calls: bool,
    supports_parallel_tool_calls: bool,
    supports_system_role: bool,
    supports_preserve_reasoning: bool,
    supports_reasoning_effort: bool,
    supports_object_arguments: bool,
}

/// Returns the features of a chat template, determined by rendering test messages.
pub(super) fn template_capabilities(template: &ChatTemplate, app: &App) -> TemplateCapabilities {
    // Templates expect messages in the format of OpenAI's chat completions.
    const MARK: &str = "qzmarkzq";
    const OTHER: &str = "qzotherzq";
    let options = |tools: Value, variables: Value| RenderOptions {
        tools: (!tools.is_null()).then_some(tools),
        add_generation_prompt: true,
        continue_final: false,
        variables: variables.as_object().cloned().unwrap_or_default(),
        now: app.now(),
    };
    let plain = || options(Value::Null, Value::Null);
    let text =
        |messages: Value, options: &RenderOptions| template.render(&messages, options).map(|rendered| rendered.text);
    let shows = |messages: Value, options: &RenderOptions, mark: &str| {
        text(messages, options).is_ok_and(|text| text.contains(mark))
    };
    let user = || json!({ "role": "user", "content": "hello" });
    let call = |name: &str| {
        json!({ "id": "call_1", "type": "function",
                                    "function": { "name": name, "arguments": { "key": "value" } } })
    };
    let calls = |calls: Value| json!([user(), { "role": "assistant", "content": "", "tool_calls": calls }, user()]);
    let both = text(calls(json!([call(MARK), call(OTHER)])), &plain());
    let effort =
        |effort: &str| text(json!([user()]), &options(Value::Null, json!({ "reasoning_effort": effort }))).ok();
    TemplateCapabilities {
        supports_string_content: shows(json!([{ "role": "user", "content": MARK }]), &plain(), MARK),
        supports_typed_content: shows(
            json!([{ "role": "user", "content": [{ "type": "text", "text": MARK }] }]),
            &plain(),
            MARK,
        ),
        supports_tools: template.supports_tools(),
        supports_tool_calls: shows(calls(json!([call(MARK)])), &plain(), MARK),
        supports_parallel_tool_calls: both.is_ok_and(|text| text.contains(MARK) && text.contains(OTHER)),
        supports_system_role: shows(json!([{ "role": "system", "content": MARK }, user()]), &plain(), MARK),
        supports_preserve_reasoning: shows(
            json!([user(), { "role": "assistant", "content": "hi", "reasoning_content": MARK }, user()]),
            &plain(),
            MARK,
        ),
        supports_reasoning_effort: effort("low") != effort("high"),
        supports_object_arguments: shows(calls(json!([call(MARK)])), &plain(), "value"),
    }
}
