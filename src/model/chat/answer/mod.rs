//! Incremental parsing of answers into reasoning, text and tool calls.
//!
//! [`AnswerParser`] accepts the text in pieces of any size and returns the deltas of each piece. The result does not
//! depend on the division into pieces. Text that only starts like a tool call stays text, unchanged. When a mod removes
//! text, the parser parses the remaining text again and returns a retraction.

mod call;
pub(super) mod channel;
mod json;
mod literals;
mod member_list;
mod next_call;
mod object;
mod output;
mod parser;
mod tagged;

pub use parser::AnswerParser;

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

/// The state of the text so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TextEnd {
    /// More text may follow.
    More,
    /// The answer is complete.
    Complete,
    /// A limit ended the answer, perhaps within a call.
    Cut,
}

impl TextEnd {
    /// Returns true if no text follows.
    fn is_final(self) -> bool {
        self != Self::More
    }
}

/// Returns the length of the start of the text that cannot be part of an incomplete marker at its end.
fn len_before_partial_marker<'m>(text: &str, markers: impl IntoIterator<Item = &'m str>) -> usize {
    let partial = |marker: &str| {
        (1..marker.len()).rev().find(|&len| marker.is_char_boundary(len) && text.ends_with(&marker[..len])).unwrap_or(0)
    };
    text.len() - markers.into_iter().map(partial).max().unwrap_or(0)
}

#[cfg(test)]
mod tests;
