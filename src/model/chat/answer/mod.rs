//! Incremental parsing of answers into reasoning, text and tool calls.
//!
//! [`AnswerParser`] accepts the text in pieces of any size and returns the deltas of each piece. The result does not
//! depend on the division into pieces. Text that only starts like a tool call stays text, unchanged. When a mod removes
//! text, the parser parses the remaining text again and returns a retraction.

mod call;
mod channel;
mod json;
mod literals;
mod member_list;
mod next_call;
mod object;
mod parser;
mod tagged;

pub use parser::AnswerParser;

pub(super) use channel::MARKERS as CHANNEL_MARKERS;

use super::syntax::AnswerSyntax;
use serde_json::{Value, json};
use std::sync::Arc;

/// The format of an answer.
#[derive(Debug, Clone)]
pub struct AnswerFormat {
    /// The model's syntax.
    pub syntax: Arc<AnswerSyntax>,
    /// The offered functions; if empty, all text stays text.
    pub tools: Vec<ToolDefinition>,
    /// True to separate reasoning from the text; false to leave it in the text with its markers.
    pub separates_reasoning: bool,
    /// True if the prompt ends inside reasoning.
    pub thinking: bool,
    /// True if the answer may have only one call; further calls are dropped.
    pub single: bool,
}

impl AnswerFormat {
    /// Returns the fields that a recording stores in addition to the client's tools.
    #[must_use]
    pub fn to_recording(&self) -> Value {
        json!({ "separates_reasoning": self.separates_reasoning, "thinking": self.thinking, "single": self.single })
    }

    /// Restores the format of a recorded run's answer from the model's chat template, the tools as the client sent them
    /// in any protocol, and the data from [`Self::to_recording`].
    #[must_use]
    pub fn from_recording(template: &str, tools: Option<&Value>, recorded: &Value) -> Self {
        let tools = tools.and_then(Value::as_array).into_iter().flatten().filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let parameters = function.get("parameters").or_else(|| function.get("input_schema"));
            Some(ToolDefinition {
                name: function["name"].as_str()?.to_owned(),
                parameters: parameters.cloned().unwrap_or_else(|| json!({})),
                strict: function["strict"] == true,
            })
        });
        let plain = Self::plain(template);
        let flag = |name: &str, default: bool| recorded[name].as_bool().unwrap_or(default);
        // Older recordings call the field `thoughts`.
        let separates_reasoning = flag("thoughts", plain.separates_reasoning);
        Self {
            tools: tools.collect(),
            separates_reasoning: flag("separates_reasoning", separates_reasoning),
            thinking: flag("thinking", plain.thinking),
            single: flag("single", plain.single),
            ..plain
        }
    }
}

/// An offered function.
#[derive(Debug, Clone)]
pub struct ToolDefinition {
    /// Name of the function.
    pub name: String,
    /// JSON Schema of its arguments.
    pub parameters: Value,
    /// True if the arguments must follow the schema.
    pub strict: bool,
}

/// A parsed answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AnswerMessage {
    /// The reasoning.
    pub reasoning: String,
    /// The text.
    pub content: String,
    /// The tool calls.
    pub calls: Vec<ToolCall>,
}

/// A tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the function.
    pub name: String,
    /// The arguments: a JSON object as the model wrote it, or the start of one if a limit ended the answer.
    pub arguments: String,
    /// True if the arguments are complete.
    pub complete: bool,
}

/// The effect of a piece of text on the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerDelta {
    /// Appends to the reasoning.
    Reasoning(String),
    /// Appends to the text.
    Content(String),
    /// Starts a call of this function.
    Call(String),
    /// Appends to the arguments of the last call.
    Arguments(String),
    /// Completes the last call.
    CallEnd,
    /// Retracts earlier output.
    Retract(Retraction),
}

/// The amount of output to retract from the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retraction {
    /// Number of characters of the reasoning.
    pub reasoning: usize,
    /// Number of characters of the text.
    pub content: usize,
    /// Number of calls.
    pub calls: usize,
}

/// The end of the answer.
#[derive(Debug, Clone, Copy)]
struct EndOfAnswer {
    /// True if a limit ended it.
    cut: bool,
}

fn emit_reasoning(deltas: &mut Vec<AnswerDelta>, message: &mut AnswerMessage, text: &str) {
    if !text.is_empty() {
        message.reasoning.push_str(text);
        match deltas.last_mut() {
            Some(AnswerDelta::Reasoning(last)) => last.push_str(text),
            _ => deltas.push(AnswerDelta::Reasoning(text.to_owned())),
        }
    }
}

fn emit_content(deltas: &mut Vec<AnswerDelta>, message: &mut AnswerMessage, text: &str) {
    if !text.is_empty() {
        message.content.push_str(text);
        match deltas.last_mut() {
            Some(AnswerDelta::Content(last)) => last.push_str(text),
            _ => deltas.push(AnswerDelta::Content(text.to_owned())),
        }
    }
}

fn emit_call(deltas: &mut Vec<AnswerDelta>, message: &mut AnswerMessage, name: &str) {
    message.calls.push(ToolCall { name: name.to_owned(), arguments: String::new(), complete: false });
    deltas.push(AnswerDelta::Call(name.to_owned()));
}

fn emit_arguments(deltas: &mut Vec<AnswerDelta>, message: &mut AnswerMessage, text: &str) {
    if let Some(call) = message.calls.last_mut().filter(|_| !text.is_empty()) {
        call.arguments.push_str(text);
        match deltas.last_mut() {
            Some(AnswerDelta::Arguments(last)) => last.push_str(text),
            _ => deltas.push(AnswerDelta::Arguments(text.to_owned())),
        }
    }
}

fn emit_call_end(deltas: &mut Vec<AnswerDelta>, message: &mut AnswerMessage) {
    if let Some(call) = message.calls.last_mut() {
        call.complete = true;
        deltas.push(AnswerDelta::CallEnd);
    }
}

fn retract_calls(deltas: &mut Vec<AnswerDelta>, message: &mut AnswerMessage, count: usize) {
    if count > 0 {
        message.calls.truncate(message.calls.len().saturating_sub(count));
        deltas.push(AnswerDelta::Retract(Retraction { calls: count, ..Retraction::default() }));
    }
}

/// Returns the deltas that change `old` into `new`.
fn difference(old: &AnswerMessage, new: &AnswerMessage) -> Vec<AnswerDelta> {
    let reasoning = common_prefix(&old.reasoning, &new.reasoning);
    let content = common_prefix(&old.content, &new.content);
    let calls = old.calls.iter().zip(&new.calls).take_while(|(a, b)| a == b).count();
    let retraction = Retraction {
        reasoning: old.reasoning[reasoning..].chars().count(),
        content: old.content[content..].chars().count(),
        calls: old.calls.len() - calls,
    };
    let mut deltas = Vec::new();
    if retraction != Retraction::default() {
        deltas.push(AnswerDelta::Retract(retraction));
    }
    if reasoning < new.reasoning.len() {
        deltas.push(AnswerDelta::Reasoning(new.reasoning[reasoning..].to_owned()));
    }
    if content < new.content.len() {
        deltas.push(AnswerDelta::Content(new.content[content..].to_owned()));
    }
    for call in &new.calls[calls..] {
        deltas.push(AnswerDelta::Call(call.name.clone()));
        if !call.arguments.is_empty() {
            deltas.push(AnswerDelta::Arguments(call.arguments.clone()));
        }
        if call.complete {
            deltas.push(AnswerDelta::CallEnd);
        }
    }
    deltas
}

fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b).map_or(a.len().min(b.len()), |((at, _), _)| at)
}

/// The result of comparing the start of a text with a literal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    Whole,
    /// The text is a prefix of the literal and may become it.
    Partial,
    No,
}

fn match_literal(text: &str, literal: &str) -> Match {
    if text.starts_with(literal) {
        Match::Whole
    } else if literal.starts_with(text) {
        Match::Partial
    } else {
        Match::No
    }
}

/// Returns the length of the start of the text that cannot be part of an incomplete marker at its end.
fn len_before_partial_marker(text: &str, markers: &[&str]) -> usize {
    let partial = |marker: &&str| {
        (1..marker.len()).rev().find(|&len| marker.is_char_boundary(len) && text.ends_with(&marker[..len])).unwrap_or(0)
    };
    text.len() - markers.iter().map(partial).max().unwrap_or(0)
}

#[cfg(test)]
mod tests;
