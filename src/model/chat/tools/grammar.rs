//! A writer of Lark grammars: rules for texts that may contain control tokens, and for the text before calls.

use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::model::chat::answer::AnswerFormat;
use crate::model::chat::syntax::ReasoningMarkers;
use crate::model::grammar::{Constraint, GrammarError, GrammarSource, MAX_SOURCE_BYTES, SchemaLines, schema};
use serde_json::Value;
use std::fmt::Write;

/// An optional space or line break.
pub(super) const SPACE: &str = "/[ \\n]/?";

/// Repetition of up to 31 more calls in one answer, because some models never stop calling.
pub(super) const REPEATED: &str = "{0,31}";

pub(super) struct GrammarWriter<'a> {
    pub(super) answer_format: &'a AnswerFormat,
    pub(super) vocabulary: &'a Vocabulary,
    rules: String,
    /// Number of the next rule's line.
    line: usize,
    schemas: Vec<SchemaLines>,
    /// The reason why a schema is rejected.
    error: Option<String>,
}

impl<'a> GrammarWriter<'a> {
    pub(super) fn new(answer_format: &'a AnswerFormat, vocabulary: &'a Vocabulary) -> Self {
        Self { answer_format, vocabulary, rules: String::new(), line: 2, schemas: Vec::new(), error: None }
    }

    /// Sets the schema that the next rules are made from, for error messages.
    pub(super) fn begin_schema(&mut self, field: &str, function: Option<&str>) {
        let (field, function) = (field.to_owned(), function.map(str::to_owned));
        self.schemas.push(SchemaLines { first_line: self.line, field, function });
    }

    /// Rejects the schema that the rules are made from, unless the grammar is rejected or too long already.
    pub(super) fn reject(&mut self, reason: &str) {
        if self.is_full() {
            return;
        }
        let function = self.schemas.last().and_then(|schema| schema.function.as_deref()).unwrap_or_default();
        self.error = Some(format!("the parameters of the function '{function}': {reason}"));
    }

    /// Adds a rule, unless the grammar is rejected or too long already, so that the compiler will reject it.
    pub(super) fn add_rule(&mut self, name: &str, body: &str) {
        if self.is_full() {
            return;
        }
        // Writing to a string cannot fail.
        let _ = writeln!(self.rules, "{name}: {body}");
        self.line += 1;
    }

    /// Returns true if no more rules are necessary: a schema was rejected, or the grammar is longer than the compiler
    /// accepts.
    pub(super) fn is_full(&self) -> bool {
        self.error.is_some() || self.rules.len() > MAX_SOURCE_BYTES
    }

    /// Returns the error if a schema was rejected.
    pub(super) fn check(&self) -> Result<(), GrammarError> {
        self.error.clone().map_or(Ok(()), |error| Err(GrammarError::Unsupported(error)))
    }

    /// Returns a constraint that starts with this expression.
    pub(super) fn finish(self, field: &str, start: &str) -> Constraint {
        let source = GrammarSource::Lark(format!("start: {start}\n{}", self.rules));
        Constraint { schemas: self.schemas, ..Constraint::new(field, source) }
    }

    /// Returns an expression for a text, with references for the control tokens in it.
    pub(super) fn literal(&self, text: &str) -> String {
        let quoted = |text: &str| Value::from(text).to_string();
        let mut parts: Vec<String> = Vec::new();
        let mut rest = text;
        for token in self.vocabulary.encode_markup(text) {
            let piece = std::str::from_utf8(self.vocabulary.piece(token)).unwrap_or_default();
            if self.vocabulary.is_control(token)
                && !piece.is_empty()
                && let Some(at) = rest.find(piece)
            {
                parts.extend((at > 0).then(|| quoted(&rest[..at])));
                parts.push(format!("<[{token}]>"));
                rest = &rest[at + piece.len()..];
            }
        }
        parts.extend((!rest.is_empty()).then(|| quoted(rest)));
        parts.join(" ")
    }

    /// Adds a rule for the text before the calls: the rest of the reasoning, or optional reasoning. Returns a reference
    /// to the rule, or nothing if there is no such text.
    pub(super) fn add_lead(&mut self, may_think: bool) -> String {
        let answer_format = self.answer_format;
        let ReasoningMarkers { open, close } = &answer_format.syntax.reasoning_markers;
        if !self.answer_format.thinking && !may_think {
            return String::new();
        }
        if answer_format.syntax.is_channels() {
            let (channel, message) = (self.literal("<|channel|>"), self.literal("<|message|>"));
            let start = self.literal("<|start|>");
            self.add_text_until("reasoning", "<|end|>");
            self.add_rule("lead", &format!("({channel} \"analysis\" {message} reasoning {start} \"assistant\")?"));
            return "lead ".into();
        }
        let open = self.literal(open);
        self.add_text_until("reasoning", close);
        if self.answer_format.thinking {
            self.add_rule("lead", "reasoning /[ \\n]{1,4}/?");
        } else {
            self.add_rule("lead", &format!("({open} reasoning /[ \\n]{{1,4}}/?)?"));
        }
        "lead ".into()
    }

    /// Adds a rule for an answer without calls: JSON that follows the schema of the request's field. Returns the rule's
    /// name.
    pub(super) fn add_answer(&mut self, field: &str, schema: &Value) -> &'static str {
        self.begin_schema(field, None);
        let json = format!("%json {}", schema::prepare(schema, true));
        if self.answer_format.syntax.is_channels() {
            self.add_rule("final_json", &json);
            let (channel, message) = (self.literal("<|channel|>"), self.literal("<|message|>"));
            let constrain = self.literal("<|constrain|>");
            self.add_rule(
                "answer",
                &format!("{channel} \"final\" (\" \"? {constrain} \"json\")? {message} final_json"),
            );
        } else {
            self.add_rule("answer", &json);
        }
        "answer"
    }

    /// Adds a rule for text up to and including a marker.
    pub(super) fn add_text_until(&mut self, name: &str, marker: &str) {
        let literal = self.literal(marker);
        let quoted = Value::from(marker).to_string();
        if quoted == literal {
            self.add_rule(&format!("{name}[suffix={literal}]"), "/(?s:.*)/");
        } else {
            self.add_rule(name, &format!("/(?s:.+)/? {literal}"));
        }
    }
}

/// Returns the control token of this text.
pub(super) fn control(text: &str, vocabulary: &Vocabulary) -> Option<TokenId> {
    match vocabulary.encode_markup(text)[..] {
        [token] if vocabulary.is_control(token) => Some(token),
        _ => None,
    }
}
