//! Constraints for answers: tool calls in the model's format, and other constraints that begin after the reasoning.
//! They are built from the answer syntax, the schemas of the functions and the request's choice.
//!
//! Every tool call that a grammar built here permits is parsed as a call by [`super::answer`].

mod calls;
mod definitions;
mod grammar;
mod lazy;

use super::answer::{AnswerFormat, ToolDefinition};
use crate::model::Vocabulary;
use crate::model::grammar::{Constraint, GrammarSource, Trigger};
use grammar::{GrammarWriter, control};
use serde_json::{Value, json};

/// Name of the request's field for error messages.
const FIELD: &str = "tools";

/// A request's choice of function calls.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No calls.
    None,
    /// One or more calls.
    Required,
    /// One call of this function.
    Function(String),
}

/// Returns the constraint that enforces the choice. `may_think` permits reasoning before the call; `answer` is a JSON
/// schema for an answer without a call.
#[must_use]
pub fn constraint(
    answer_format: &AnswerFormat,
    choice: &ToolChoice,
    answer: Option<&Value>,
    may_think: bool,
    vocabulary: &Vocabulary,
) -> Option<Constraint> {
    let chosen: Vec<&ToolDefinition> = match choice {
        ToolChoice::None => return None,
        ToolChoice::Function(name) => answer_format.tools.iter().filter(|tool| tool.name == *name).collect(),
        ToolChoice::Auto | ToolChoice::Required => answer_format.tools.iter().collect(),
    };
    if chosen.is_empty() {
        return None;
    }
    let mut grammar = GrammarWriter::new(answer_format, vocabulary);
    let several = !answer_format.single && !matches!(choice, ToolChoice::Function(_));
    match (choice, answer) {
        (ToolChoice::Auto, None) => {
            if chosen.iter().all(|tool| !tool.strict) {
                return None;
            }
            let trigger = grammar.trigger(&chosen);
            let calls = grammar.add_lazy_calls(&chosen, several);
            Some(Constraint::new(FIELD, GrammarSource::Lark(grammar.finish(&calls))).lazy(trigger))
        }
        (ToolChoice::Auto, Some(schema)) => {
            let calls = grammar.add_calls(&chosen, several, true);
            let lead = grammar.add_lead(may_think);
            let answer = grammar.add_answer(schema);
            Some(Constraint::new(FIELD, GrammarSource::Lark(grammar.finish(&format!("{lead}({answer} | {calls})")))))
        }
        _ => {
            let calls = grammar.add_calls(&chosen, several, true);
            let lead = grammar.add_lead(may_think);
            Some(Constraint::new(FIELD, GrammarSource::Lark(grammar.finish(&format!("{lead}{calls}")))))
        }
    }
}

/// Delays a constraint until after the reasoning. `may_think` is true if the answer may start with reasoning.
#[must_use]
pub fn after_reasoning(
    constraint: Constraint,
    answer_format: &AnswerFormat,
    may_think: bool,
    vocabulary: &Vocabulary,
) -> Constraint {
    if constraint.trigger.is_some() {
        return constraint;
    }
    if answer_format.syntax.is_channels() {
        return in_final_channel(constraint, answer_format, may_think, vocabulary);
    }
    if !answer_format.thinking {
        return constraint;
    }
    let close = answer_format.syntax.reasoning_markers.1.as_str();
    let trigger = match control(close, vocabulary) {
        Some(token) => Trigger::token(token),
        None => Trigger::text(close),
    };
    constraint.lazy(trigger)
}

/// Applies a constraint to the final channel of an answer in channels: JSON is only permitted in it; other grammars
/// apply when that channel starts.
fn in_final_channel(
    constraint: Constraint,
    answer_format: &AnswerFormat,
    may_think: bool,
    vocabulary: &Vocabulary,
) -> Constraint {
    let Some(schema) = schema(&constraint) else {
        return constraint.lazy(Trigger::text("<|channel|>final<|message|>"));
    };
    let mut grammar = GrammarWriter::new(answer_format, vocabulary);
    let lead = grammar.add_lead(may_think);
    let answer = grammar.add_answer(&schema);
    Constraint { source: GrammarSource::Lark(grammar.finish(&format!("{lead}{answer}"))), ..constraint }
}

/// Returns the schema if a constraint requires JSON text.
#[must_use]
pub fn schema(constraint: &Constraint) -> Option<Value> {
    match &constraint.source {
        GrammarSource::JsonSchema(schema) => Some(schema.clone()),
        GrammarSource::JsonObject => Some(json!({ "type": "object" })),
        GrammarSource::Gbnf(_) | GrammarSource::Lark(_) | GrammarSource::Regex(_) => None,
    }
}

#[cfg(test)]
mod tests;
