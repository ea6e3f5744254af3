//! Reads an answer while it is written: thoughts, text and tool calls.
//!
//! [`AnswerParser`] takes the text in whatever pieces it comes and says what each added. However it was cut, the outcome is
//! the same. Nothing is lost: what begins like a tool call and turns out to be none is text, exactly as it was
//! written. When a mod takes text back, the parser reads what is left again and says what that voids.

mod call;
mod channel;
mod json;
mod literals;
mod loose;
mod object;
mod parser;
mod tagged;

pub use parser::AnswerParser;

pub(super) use channel::MARKERS as CHANNEL_MARKERS;

use super::format::AnswerSyntax;
use serde_json::{Value, json};
use std::sync::Arc;

/// How an answer is to be read.
#[derive(Debug, Clone)]
pub struct AnswerFormat {
    /// How the model writes.
    pub format: Arc<AnswerSyntax>,
    /// The functions that were offered; without any, nothing is a tool call.
    pub tools: Vec<ToolDefinition>,
    /// Whether thoughts are told from the text; else they stay in it, with their markers.
    pub thoughts: bool,
    /// Whether the prompt ended within a thought.
    pub thinking: bool,
    /// Whether only the first call counts.
    pub single: bool,
}

impl AnswerFormat {
    /// What continues a plain prompt, of a model with this chat template: no tools are offered.
    #[must_use]
    pub fn plain(template: &str) -> Self {
        Self {
            format: super::derive::of_source(template),
            tools: Vec::new(),
            thoughts: true,
            thinking: false,
            single: false,
        }
    }

    /// What a recording keeps of it, besides the tools as they were sent.
    #[must_use]
    pub fn recorded(&self) -> Value {
        json!({ "thoughts": self.thoughts, "thinking": self.thinking, "single": self.single })
    }

    /// The reading of a recorded run's answer: of a model with this chat template, with the tools as they were sent in any
    /// dialect, and what [`Self::recorded`] kept.
    #[must_use]
    pub fn of_recording(template: &str, tools: Option<&Value>, recorded: &Value) -> Self {
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
        let said = |name: &str, usual: bool| recorded[name].as_bool().unwrap_or(usual);
        Self {
            tools: tools.collect(),
            thoughts: said("thoughts", plain.thoughts),
            thinking: said("thinking", plain.thinking),
            single: said("single", plain.single),
            ..plain
        }
    }
}

/// A function that was offered.
#[derive(Debug, Clone)]
pub struct ToolDefinition {
    /// Its name.
    pub name: String,
    /// JSON Schema of its arguments.
    pub parameters: Value,
    /// Whether its arguments must follow the schema.
    pub strict: bool,
}

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AnswerMessage {
    /// The thoughts.
    pub reasoning: String,
    /// The text.
    pub content: String,
    /// The calls.
    pub calls: Vec<ToolCall>,
}

/// A tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The function's name.
    pub name: String,
    /// The arguments, a JSON object as it was written; the beginning of one when the answer was cut off in it.
    pub arguments: String,
    /// Whether the arguments are complete.
    pub complete: bool,
}

/// What a piece of text added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerDelta {
    /// To the thoughts.
    Reasoning(String),
    /// To the text.
    Content(String),
    /// A call of this function.
    Call(String),
    /// To the arguments of the last call.
    Arguments(String),
    /// The last call is complete.
    Called,
    /// Something said before is void.
    Retract(Retraction),
}

/// How much of the end is void.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retraction {
    /// Characters of the thoughts.
    pub reasoning: usize,
    /// Characters of the text.
    pub content: usize,
    /// Calls.
    pub calls: usize,
}

/// The answer is over.
#[derive(Debug, Clone, Copy)]
struct Over {
    /// It ran into a limit.
    cut: bool,
}

fn say_reasoning(pieces: &mut Vec<AnswerDelta>, message: &mut AnswerMessage, text: &str) {
    if !text.is_empty() {
        message.reasoning.push_str(text);
        match pieces.last_mut() {
            Some(AnswerDelta::Reasoning(last)) => last.push_str(text),
            _ => pieces.push(AnswerDelta::Reasoning(text.to_owned())),
        }
    }
}

fn say_content(pieces: &mut Vec<AnswerDelta>, message: &mut AnswerMessage, text: &str) {
    if !text.is_empty() {
        message.content.push_str(text);
        match pieces.last_mut() {
            Some(AnswerDelta::Content(last)) => last.push_str(text),
            _ => pieces.push(AnswerDelta::Content(text.to_owned())),
        }
    }
}

fn say_call(pieces: &mut Vec<AnswerDelta>, message: &mut AnswerMessage, name: &str) {
    message.calls.push(ToolCall { name: name.to_owned(), arguments: String::new(), complete: false });
    pieces.push(AnswerDelta::Call(name.to_owned()));
}

fn say_arguments(pieces: &mut Vec<AnswerDelta>, message: &mut AnswerMessage, text: &str) {
    if let Some(call) = message.calls.last_mut().filter(|_| !text.is_empty()) {
        call.arguments.push_str(text);
        match pieces.last_mut() {
            Some(AnswerDelta::Arguments(last)) => last.push_str(text),
            _ => pieces.push(AnswerDelta::Arguments(text.to_owned())),
        }
    }
}

fn say_called(pieces: &mut Vec<AnswerDelta>, message: &mut AnswerMessage) {
    if let Some(call) = message.calls.last_mut() {
        call.complete = true;
        pieces.push(AnswerDelta::Called);
    }
}

fn void_calls(pieces: &mut Vec<AnswerDelta>, message: &mut AnswerMessage, count: usize) {
    if count > 0 {
        message.calls.truncate(message.calls.len().saturating_sub(count));
        pieces.push(AnswerDelta::Retract(Retraction { calls: count, ..Retraction::default() }));
    }
}

/// What makes `new` of `old`.
fn difference(old: &AnswerMessage, new: &AnswerMessage) -> Vec<AnswerDelta> {
    let reasoning = common_prefix(&old.reasoning, &new.reasoning);
    let content = common_prefix(&old.content, &new.content);
    let calls = old.calls.iter().zip(&new.calls).take_while(|(a, b)| a == b).count();
    let retraction = Retraction {
        reasoning: old.reasoning[reasoning..].chars().count(),
        content: old.content[content..].chars().count(),
        calls: old.calls.len() - calls,
    };
    let mut pieces = Vec::new();
    if retraction != Retraction::default() {
        pieces.push(AnswerDelta::Retract(retraction));
    }
    if reasoning < new.reasoning.len() {
        pieces.push(AnswerDelta::Reasoning(new.reasoning[reasoning..].to_owned()));
    }
    if content < new.content.len() {
        pieces.push(AnswerDelta::Content(new.content[content..].to_owned()));
    }
    for call in &new.calls[calls..] {
        pieces.push(AnswerDelta::Call(call.name.clone()));
        if !call.arguments.is_empty() {
            pieces.push(AnswerDelta::Arguments(call.arguments.clone()));
        }
        if call.complete {
            pieces.push(AnswerDelta::Called);
        }
    }
    pieces
}

fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b).map_or(a.len().min(b.len()), |((at, _), _)| at)
}

/// Whether a text begins with a literal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    Whole,
    /// The text is a beginning of the literal, which may still come.
    Begun,
    No,
}

fn literal(text: &str, literal: &str) -> Match {
    if text.starts_with(literal) {
        Match::Whole
    } else if literal.starts_with(text) {
        Match::Begun
    } else {
        Match::No
    }
}

/// Returns the length of the text that cannot become part of a marker.
fn safe(text: &str, markers: &[&str]) -> usize {
    let partial = |marker: &&str| {
        (1..marker.len()).rev().find(|&len| marker.is_char_boundary(len) && text.ends_with(&marker[..len])).unwrap_or(0)
    };
    text.len() - markers.iter().map(partial).max().unwrap_or(0)
}

#[cfg(test)]
mod tests;
