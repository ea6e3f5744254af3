//! Forms of an answer: tool calls that must come, and what stands beside them or behind a thought. From the family's
//! format, the functions' schemas and the request's choice to a grammar.
//!
//! A grammar written here can only be followed by answers that [`super::answer`] reads as calls of these functions.

mod calls;
mod grammar;
mod own;

use super::answer::{AnswerFormat, ToolDefinition};
use crate::model::Vocabulary;
use crate::model::grammar::{Constraint, GrammarSource, Trigger};
use grammar::{GrammarWriter, control};
use serde_json::{Value, json};

/// The request's field that errors name.
const FIELD: &str = "tools";

/// What a request says about calling functions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// There are no calls.
    None,
    /// There is at least one call.
    Required,
    /// This function is called, once.
    Function(String),
}

/// What the answer must be so that the choice holds. `may_think` lets a thought come before the call; `answer` is a JSON
/// schema that an answer without a call must follow.
#[must_use]
pub fn constraint(
    reading: &AnswerFormat,
    choice: &ToolChoice,
    answer: Option<&Value>,
    may_think: bool,
    vocabulary: &Vocabulary,
) -> Option<Constraint> {
    let chosen: Vec<&ToolDefinition> = match choice {
        ToolChoice::None => return None,
        ToolChoice::Function(name) => reading.tools.iter().filter(|tool| tool.name == *name).collect(),
        ToolChoice::Auto | ToolChoice::Required => reading.tools.iter().collect(),
    };
    if chosen.is_empty() {
        return None;
    }
    let mut grammar = GrammarWriter::new(reading, vocabulary);
    let several = !reading.single && !matches!(choice, ToolChoice::Function(_));
    match (choice, answer) {
        (ToolChoice::Auto, None) => {
            if chosen.iter().all(|tool| !tool.strict) {
                return None;
            }
            let trigger = grammar.trigger(&chosen);
            let calls = grammar.own_calls(&chosen, several);
            Some(Constraint::new(FIELD, GrammarSource::Lark(grammar.finish(&calls))).lazy(trigger))
        }
        (ToolChoice::Auto, Some(schema)) => {
            let calls = grammar.calls(&chosen, several, true);
            let lead = grammar.lead(may_think);
            let answer = grammar.answer(schema);
            Some(Constraint::new(FIELD, GrammarSource::Lark(grammar.finish(&format!("{lead}({answer} | {calls})")))))
        }
        _ => {
            let calls = grammar.calls(&chosen, several, true);
            let lead = grammar.lead(may_think);
            Some(Constraint::new(FIELD, GrammarSource::Lark(grammar.finish(&format!("{lead}{calls}")))))
        }
    }
}

/// The same form for an answer in which thoughts come first: those are left alone. `may_think` says whether a thought may
/// come where none has begun.
#[must_use]
pub fn behind_thought(
    form: Constraint,
    reading: &AnswerFormat,
    may_think: bool,
    vocabulary: &Vocabulary,
) -> Constraint {
    if form.trigger.is_some() {
        return form;
    }
    if reading.format.is_channels() {
        return in_final_channel(form, reading, may_think, vocabulary);
    }
    if !reading.thinking {
        return form;
    }
    let close = reading.format.thought.1.as_str();
    let trigger = match control(close, vocabulary) {
        Some(token) => Trigger::token(token),
        None => Trigger::text(close),
    };
    form.lazy(trigger)
}

/// The form for an answer in channels, of which it is about the last: JSON is made to come there, any other grammar holds as
/// soon as that channel begins.
fn in_final_channel(form: Constraint, reading: &AnswerFormat, may_think: bool, vocabulary: &Vocabulary) -> Constraint {
    let Some(schema) = schema(&form) else {
        return form.lazy(Trigger::text("<|channel|>final<|message|>"));
    };
    let mut grammar = GrammarWriter::new(reading, vocabulary);
    let lead = grammar.lead(may_think);
    let answer = grammar.answer(&schema);
    Constraint { source: GrammarSource::Lark(grammar.finish(&format!("{lead}{answer}"))), ..form }
}

/// The schema, where a form says that the text must be JSON.
#[must_use]
pub fn schema(form: &Constraint) -> Option<Value> {
    match &form.source {
        GrammarSource::JsonSchema(schema) => Some(schema.clone()),
        GrammarSource::JsonObject => Some(json!({ "type": "object" })),
        GrammarSource::Gbnf(_) | GrammarSource::Lark(_) | GrammarSource::Regex(_) => None,
    }
}

#[cfg(test)]
mod tests;
