//! Grammar for required tool calls, in the format of the model's template.

use super::FIELD;
use super::grammar::{GrammarWriter, REPEATED};
use super::members::{MemberFormat, Members};
use crate::model::chat::answer::ToolDefinition;
use crate::model::chat::pattern::{Pattern, PatternPart, Placeholder};
use crate::model::chat::syntax::{CallForm, CallShape};
use crate::model::grammar::MAX_SOURCE_BYTES;
use serde_json::Value;

impl GrammarWriter<'_> {
    /// Adds rules for the calls; returns the expression for one or several of them. `with_marker` is true if the
    /// grammar includes the marker before the calls.
    pub(super) fn add_calls(&mut self, tools: &[ToolDefinition], several: bool, with_marker: bool) -> String {
        let form = self.answer_format.syntax.calls[0].clone();
        let (_, rest) = call_marker(&form);
        let (mut calls, mut first) = (Vec::new(), Vec::new());
        for (index, tool) in tools.iter().enumerate() {
            if self.is_full() {
                break;
            }
            self.begin_schema(FIELD, Some(&tool.name));
            let (call, body) = (format!("call_{index}"), format!("body_{index}"));
            let shape = self.add_shape(&call, tool, &form.shape);
            let after = self.pattern(form.after.parts(), &tool.name);
            self.add_rule(&body, &format!("{shape} {after}"));
            let before = self.pattern(form.before.parts(), &tool.name);
            self.add_rule(&call, &format!("{before} {body}"));
            if !with_marker && form.open.is_blank() {
                let rest = self.pattern(rest, &tool.name);
                self.add_rule(&format!("first_{index}"), &format!("{rest} {body}"));
                first.push(format!("first_{index}"));
            }
            calls.push(call);
        }
        self.add_rule("call", &calls.join(" | "));
        let mut one = "call".to_owned();
        if !first.is_empty() {
            self.add_rule("first", &first.join(" | "));
            "first".clone_into(&mut one);
        }
        let open = self.pattern(
            if with_marker {
                form.open.parts()
            } else if form.open.is_blank() {
                &[]
            } else {
                rest
            },
            "",
        );
        let close = self.pattern(form.close.parts(), "");
        let separator = self.pattern(form.separator.parts(), "");
        let more = if several { format!("({separator} call){REPEATED}") } else { String::new() };
        let (left, right) = if form.list { ("\"[\"", "\"]\"") } else { ("", "") };
        self.add_rule("calls", &format!("{open} {left} {one} {more} {right} {close}"));
        "calls".into()
    }

    /// Adds rules for the name and the arguments of a call, and returns the expression for them.
    fn add_shape(&mut self, rule: &str, tool: &ToolDefinition, shape: &CallShape) -> String {
        let named = |rest: &Pattern| [&[PatternPart::Placeholder(Placeholder::Name)], rest.parts()].concat();
        let name = Value::from(tool.name.as_str());
        let json = format!("%json {}", tool.parameters);
        let format = match shape {
            CallShape::Tagged(tags) => Some(MemberFormat::Elements(tags)),
            CallShape::Braces { quote } => Some(MemberFormat::Braces(quote)),
            CallShape::Python => Some(MemberFormat::Python),
            _ => None,
        };
        // The compiler rejects longer grammars.
        if let Some(format) = format.filter(|_| json.len() <= MAX_SOURCE_BYTES) {
            let members = Members { root: &tool.parameters, strict: tool.strict, format };
            let members = self.add_members(rule, &tool.parameters, members, 0);
            return match format {
                MemberFormat::Elements(tags) => {
                    format!("{} {members}", self.pattern(&named(&tags.after_name), &tool.name))
                }
                MemberFormat::Braces(_) => format!("{name} \"{{\" {members} \"}}\""),
                MemberFormat::Python => format!("{name} \"(\" {members} \")\""),
            };
        }
        let arguments = format!("{rule}_arguments");
        self.add_rule(&arguments, &json);
        match shape {
            CallShape::Json(keys) => {
                let head = self.pattern(keys.head.parts(), &tool.name);
                let tail = self.pattern(keys.tail.parts(), &tool.name);
                format!("{head} {arguments} {tail}")
            }
            CallShape::Named { middle } => {
                let name = self.pattern(&named(middle), &tool.name);
                format!("{name} {arguments}")
            }
            CallShape::Channel => {
                let (channel, message) = (self.literal("<|channel|>"), self.literal("<|message|>"));
                let constrain = self.literal("<|constrain|>");
                let to = Value::from(format!("commentary to=functions.{} ", tool.name));
                format!("{channel} {to} {constrain} \"json\" {message} {arguments}")
            }
            _ => {
                let head = Value::from(format!("{{\"name\": {name}, \"parameters\": "));
                format!("{head} {arguments} \"}}\"")
            }
        }
    }

    /// Returns the expression for a pattern in a call of the function `name`, with as few literals as possible.
    pub(super) fn pattern(&self, parts: &[PatternPart], name: &str) -> String {
        let mut written: Vec<String> = Vec::new();
        let mut text = String::new();
        for part in parts {
            let word = match part {
                PatternPart::Text(part) | PatternPart::Space(part) => {
                    text.push_str(part);
                    continue;
                }
                PatternPart::Placeholder(Placeholder::Name) => {
                    text.push_str(name);
                    continue;
                }
                PatternPart::Placeholder(Placeholder::Index) => "/[0-9]{1,2}/",
                PatternPart::Placeholder(Placeholder::Id | Placeholder::TypeName | Placeholder::Key) => {
                    "/[0-9A-Za-z]{9}/"
                }
            };
            written.extend([self.literal(&std::mem::take(&mut text)), word.to_owned()]);
        }
        written.push(self.literal(&text));
        written.join(" ")
    }
}

/// Returns the marker before calls, and the rest of its pattern.
pub(super) fn call_marker(form: &CallForm) -> (String, &[PatternPart]) {
    let pattern: &Pattern = if form.open.is_blank() { &form.before } else { &form.open };
    let parts = pattern.parts();
    let begin = parts.iter().position(|part| !matches!(part, PatternPart::Space(_))).unwrap_or(parts.len());
    let placeholder = parts.iter().position(|part| matches!(part, PatternPart::Placeholder(_))).unwrap_or(parts.len());
    let mut end = placeholder.max(begin);
    while end > begin && matches!(parts[end - 1], PatternPart::Space(_)) {
        end -= 1;
    }
    let text = parts[begin..end].iter().map(|part| match part {
        PatternPart::Text(text) | PatternPart::Space(text) => text.as_str(),
        PatternPart::Placeholder(_) => "",
    });
    (text.collect(), &parts[end..])
}
