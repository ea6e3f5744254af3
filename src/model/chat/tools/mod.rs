//! Constraints for answers: tool calls in the model's format, and other constraints that begin after the reasoning.
//! They are built from the answer syntax, the schemas of the functions and the request's choice.
//!
//! Every tool call that a grammar built here permits is parsed as a call by [`super::answer`].

mod calls;
mod definitions;
mod grammar;
mod lazy;
mod members;
mod object_forms;

use super::answer::channel::FINAL_HEADER;
use super::answer::{AnswerFormat, ToolDefinition};
use crate::model::Vocabulary;
use crate::model::grammar::schema::prepare;
use crate::model::grammar::{Constraint, GrammarError, GrammarSource, Trigger};
use grammar::{GrammarWriter, control};
use serde_json::{Map, Value, json};

/// Name of the request's field for error messages.
pub const FIELD: &str = "tools";

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

/// Returns the constraint that enforces the choice. `may_think` permits reasoning before the call; `answer` is the
/// constraint of an answer without a call, which must be JSON.
///
/// # Errors
/// Returns an error if a grammar cannot enforce the schema of a strict function in the model's format.
pub fn constraint(
    answer_format: &AnswerFormat,
    choice: &ToolChoice,
    answer: Option<&Constraint>,
    may_think: bool,
    vocabulary: &Vocabulary,
) -> Result<Option<Constraint>, GrammarError> {
    let is_chosen = |tool: &&ToolDefinition| match choice {
        ToolChoice::None => false,
        ToolChoice::Function(name) => tool.name == *name,
        ToolChoice::Auto | ToolChoice::Required => true,
    };
    let is_auto = *choice == ToolChoice::Auto;
    let answer = answer.filter(|_| is_auto).and_then(|answer| Some((&answer.field, schema(answer)?)));
    let is_lazy = is_auto && answer.is_none();
    let chosen: Vec<&ToolDefinition> = answer_format.tools.iter().filter(is_chosen).collect();
    if chosen.is_empty() || (is_lazy && chosen.iter().all(|tool| !tool.strict)) {
        return Ok(None);
    }
    let chosen: Vec<ToolDefinition> = chosen.into_iter().map(with_prepared_parameters).collect();
    let mut grammar = GrammarWriter::new(answer_format, vocabulary);
    let several = !answer_format.single && !matches!(choice, ToolChoice::Function(_));
    if is_lazy {
        let trigger = grammar.trigger(&chosen);
        let calls = grammar.add_lazy_calls(&chosen, several);
        grammar.check()?;
        return Ok(Some(grammar.finish(FIELD, &calls).lazy(trigger)));
    }
    let calls = grammar.add_calls(&chosen, several, true);
    grammar.check()?;
    let lead = grammar.add_lead(may_think);
    let start = match answer {
        Some((field, schema)) => format!("{lead}({} | {calls})", grammar.add_answer(field, &schema)),
        None => format!("{lead}{calls}"),
    };
    Ok(Some(grammar.finish(FIELD, &start)))
}

/// Returns a tool with the prepared schema of its arguments, which are always an object. A tool without parameters has
/// no arguments, as in OpenAI's API.
fn with_prepared_parameters(tool: &ToolDefinition) -> ToolDefinition {
    let given = tool.parameters.as_object().filter(|schema| !schema.is_empty()).cloned();
    let mut schema = given.unwrap_or_else(|| Map::from_iter([("properties".to_owned(), json!({}))]));
    schema.insert("type".to_owned(), "object".into());
    ToolDefinition { parameters: prepare(&Value::Object(schema), tool.strict), ..tool.clone() }
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
    let close = answer_format.syntax.reasoning_markers.close.as_str();
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
        return constraint.lazy(Trigger::text(FINAL_HEADER));
    };
    let mut grammar = GrammarWriter::new(answer_format, vocabulary);
    let lead = grammar.add_lead(may_think);
    let answer = grammar.add_answer(&constraint.field, &schema);
    grammar.finish(&constraint.field, &format!("{lead}{answer}"))
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
