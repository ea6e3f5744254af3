//! Optional calls (`auto`): the texts that trigger the grammar, and the grammar after the trigger.

use super::FIELD;
use super::calls::call_marker;
use super::definitions::embedded;
use super::grammar::{GrammarWriter, REPEATED, SPACE, control};
use crate::model::chat::answer::ToolDefinition;
use crate::model::chat::syntax::{CallShape, ReasoningMarkers};
use crate::model::grammar::Trigger;
use serde_json::{Value, json};

/// Text between objects without a marker.
const BETWEEN: &str = "(/[ \\n]{1,3}/ | /[ \\n]{0,2}[;,][ \\n]{0,2}/)?";

impl GrammarWriter<'_> {
    /// Adds rules for the text of optional calls after the trigger, and returns the expression for it.
    pub(super) fn add_lazy_calls(&mut self, tools: &[ToolDefinition], several: bool) -> String {
        let form = self.answer_format.syntax.calls[0].clone();
        let call = |grammar: &mut Self, (index, tool): (usize, &ToolDefinition)| {
            let rule = format!("call_{index}");
            grammar.begin_schema(FIELD, Some(&tool.name));
            let body = match form.shape {
                CallShape::Channel => grammar.add_channel_call(&rule, tool),
                _ => object_call(tool, &form.shape),
            };
            grammar.add_rule(&rule, &body);
            rule
        };
        match form.shape {
            CallShape::Json(_) if form.is_bare() => {
                let calls: Vec<String> = tools.iter().enumerate().map(|tool| call(self, tool)).collect();
                self.add_rule("call", &calls.join(" | "));
                let more = if several { format!(" ({BETWEEN} call){REPEATED}") } else { String::new() };
                format!("{SPACE} call{more} {SPACE}")
            }
            CallShape::Channel => {
                let calls: Vec<String> = tools.iter().enumerate().map(|tool| call(self, tool)).collect();
                calls.join(" | ")
            }
            _ => self.add_calls(tools, several, false),
        }
    }

    /// Adds a rule for the arguments of a call in a channel, and returns the expression for the text after
    /// `to=functions.`.
    fn add_channel_call(&mut self, rule: &str, tool: &ToolDefinition) -> String {
        let arguments = format!("{rule}_arguments");
        self.add_rule(&arguments, &format!("%json {}", tool.parameters));
        let (channel, message) = (self.literal("<|channel|>"), self.literal("<|message|>"));
        let (constrain, name) = (self.literal("<|constrain|>"), Value::from(tool.name.as_str()));
        format!("{name} ({channel} \"commentary\")? \" \"? {constrain}? \"json\"? {message} {arguments}")
    }

    /// Returns the trigger for a block of calls or a bare call.
    pub(super) fn trigger(&self, tools: &[ToolDefinition]) -> Trigger {
        let syntax = &self.answer_format.syntax;
        if syntax.is_channels() {
            let texts = ["<|channel|>commentary to=functions.", "<|start|>assistant to=functions."];
            return Trigger { texts: texts.map(str::to_owned).into(), ..Trigger::default() };
        }
        let form = &syntax.calls[0];
        if !form.is_bare() {
            return self.marker_trigger(&call_marker(form).0);
        }
        let names = tools.iter().map(|tool| tool.name.as_str());
        let openings: Vec<String> = match &form.shape {
            CallShape::Named { middle } => {
                names.map(|name| format!("{name}{}{{", middle.texts().collect::<String>())).collect()
            }
            _ => names
                .flat_map(|name| {
                    ["{", "{\"type\":\"function\","].map(|before| format!("{before}\"name\":{}", Value::from(name)))
                })
                .collect(),
        };
        let marked = syntax.calls.iter().find(|form| !form.is_bare());
        let block = marked.map(|form| self.marker_trigger(&call_marker(form).0));
        Trigger { openings, ..block.unwrap_or_else(|| self.outside_reasoning(Trigger::default())) }
    }

    /// Returns the trigger for the marker before calls, a token or a text.
    fn marker_trigger(&self, text: &str) -> Trigger {
        self.outside_reasoning(match control(text, self.vocabulary) {
            Some(token) => Trigger::token(token),
            None => Trigger::text(text),
        })
    }

    /// Returns a trigger that does not count within reasoning, where a model may mention a marker of calls.
    fn outside_reasoning(&self, trigger: Trigger) -> Trigger {
        let ReasoningMarkers { open, close } = self.answer_format.syntax.reasoning_markers.clone();
        Trigger {
            reasoning_start_marker: open,
            reasoning_end_marker: close,
            starts_in_reasoning: self.answer_format.thinking,
            ..trigger
        }
    }
}

/// Returns a grammar for a call as one object, with any whitespace.
fn object_call(tool: &ToolDefinition, shape: &CallShape) -> String {
    let CallShape::Json(keys) = shape else { return String::new() };
    let (name, arguments) = (keys.name.as_deref().unwrap_or("name"), keys.arguments.as_str());
    let mut schema = json!({
        "type": "object",
        "properties": {
            "type": { "const": "function" },
            name: { "const": tool.name },
            arguments: { "$ref": "#/$defs/arguments" },
        },
        "required": [name, arguments],
        "additionalProperties": false,
        "$defs": { "arguments": embedded(&tool.parameters, "#/$defs/arguments") },
        "x-guidance": tool.parameters["x-guidance"],
    });
    if let Some(options) = schema["x-guidance"].as_object_mut() {
        options.insert("whitespace_pattern".into(), "[ \\n\\r\\t]{1,20}".into());
    }
    format!("%json {schema}")
}
