//! The output of the parsers: the message, and its changes.

use super::{AnswerDelta, AnswerMessage, Retraction, ToolCall};
use serde_json::Value;
use std::fmt::Display;

/// A message, and its changes that were not taken yet.
#[derive(Debug, Default)]
pub(super) struct AnswerOutput {
    pub(super) message: AnswerMessage,
    /// Number of calls, each introduced by a marker, that could not be parsed and became text.
    pub(super) malformed_calls: usize,
    deltas: Vec<AnswerDelta>,
}

impl AnswerOutput {
    /// Removes and returns the changes.
    pub(super) fn take_deltas(&mut self) -> Vec<AnswerDelta> {
        std::mem::take(&mut self.deltas)
    }

    /// Appends to the reasoning.
    pub(super) fn push_reasoning(&mut self, text: &str) {
        if !text.is_empty() {
            self.message.reasoning.push_str(text);
            match self.deltas.last_mut() {
                Some(AnswerDelta::Reasoning(last)) => last.push_str(text),
                _ => self.deltas.push(AnswerDelta::Reasoning(text.to_owned())),
            }
        }
    }

    /// Appends to the text.
    pub(super) fn push_content(&mut self, text: &str) {
        if !text.is_empty() {
            self.message.content.push_str(text);
            match self.deltas.last_mut() {
                Some(AnswerDelta::Content(last)) => last.push_str(text),
                _ => self.deltas.push(AnswerDelta::Content(text.to_owned())),
            }
        }
    }

    /// Begins a call of this function.
    pub(super) fn begin_call(&mut self, name: &str) {
        self.message.calls.push(ToolCall { name: name.to_owned(), arguments: String::new(), complete: false });
        self.deltas.push(AnswerDelta::Call(name.to_owned()));
    }

    /// Appends to the arguments of the last call.
    pub(super) fn push_arguments(&mut self, text: &str) {
        if let Some(call) = self.message.calls.last_mut().filter(|_| !text.is_empty()) {
            call.arguments.push_str(text);
            match self.deltas.last_mut() {
                Some(AnswerDelta::Arguments(last)) => last.push_str(text),
                _ => self.deltas.push(AnswerDelta::Arguments(text.to_owned())),
            }
        }
    }

    /// Appends a member to the arguments of the last call; `count` members precede it.
    pub(super) fn push_member(&mut self, count: usize, key: &str, value: impl Display) {
        let before = if count == 0 { "{" } else { ", " };
        self.push_arguments(&format!("{before}{}: {value}", Value::from(key)));
    }

    /// Completes the last call, whose arguments have this number of members.
    pub(super) fn end_members(&mut self, count: usize) {
        self.push_arguments(if count == 0 { "{}" } else { "}" });
        self.end_call();
    }

    /// Completes the last call.
    pub(super) fn end_call(&mut self) {
        if let Some(call) = self.message.calls.last_mut() {
            call.complete = true;
            self.deltas.push(AnswerDelta::CallEnd);
        }
    }

    /// Removes the last call.
    pub(super) fn retract_call(&mut self) {
        self.message.calls.pop();
        self.deltas.push(AnswerDelta::Retract(Retraction { calls: 1, ..Retraction::default() }));
    }
}

/// Returns the deltas that change `old` into `new`.
pub(super) fn difference(old: &AnswerMessage, new: &AnswerMessage) -> Vec<AnswerDelta> {
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
