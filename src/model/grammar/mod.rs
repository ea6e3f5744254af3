//! Constrained answers: a JSON schema, a grammar or a regular expression, applied as a set of permitted next tokens.
//!
//! A [`Constraint`] is part of a request. [`GrammarCompiler`], one per model, compiles it into a [`GrammarMatcher`] for
//! one run: it returns the permitted next tokens, accepts the sampled token, and rewinds when a mod removes tokens.
//! [`gbnf`] translates llama.cpp's grammar format for llguidance, which computes the masks. Grammars come from
//! untrusted clients: their size, depth and compile time are bounded, and none of them can abort the process.
//!
//! A literal in a grammar matches text only: a control token such as `<|im_end|>` does not match its characters. A
//! grammar refers to the token explicitly: `<|im_end|>` or `<[2]>` in Lark and GBNF.

mod compile;
mod deadline;
pub mod gbnf;
mod mask_worker;
mod matcher;
pub(crate) mod schema;
mod tokens;
mod trigger;

pub use compile::{GrammarCompiler, MAX_SOURCE_BYTES};
pub use matcher::{AcceptResult, GrammarMatcher, TokenMask};

use crate::events::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A grammar in one of the supported languages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "source", rename_all = "snake_case")]
pub enum GrammarSource {
    /// JSON that is valid against this schema.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// llama.cpp's grammar format (GBNF); it starts at the rule `root`.
    Gbnf(String),
    /// llguidance's variant of Lark; it starts at the rule `start`.
    Lark(String),
    /// A regular expression that must match the whole answer.
    Regex(String),
}

impl GrammarSource {
    /// Checks the syntax as far as that is possible without a model.
    ///
    /// # Errors
    /// [`GrammarError`], with a message for the author of the grammar.
    pub fn check_syntax(&self) -> Result<(), GrammarError> {
        match self {
            Self::Gbnf(text) => gbnf::check_syntax(text),
            Self::JsonSchema(schema) => schema::check(schema),
            Self::JsonObject | Self::Lark(_) | Self::Regex(_) => Ok(()),
        }
    }
}

/// A request's constraint on its answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Constraint {
    /// Name of the request's field, for error messages.
    pub field: String,
    /// The grammar.
    #[serde(flatten)]
    pub source: GrammarSource,
    /// The trigger that activates the grammar; `None` if it applies from the first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trigger: Option<Trigger>,
    /// The request's schemas in a generated grammar, in the order of its lines.
    #[serde(skip)]
    pub schemas: Vec<SchemaLines>,
}

/// The lines of a generated grammar that are made from one schema of the request. They end at the next schema's lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaLines {
    /// First line, counted from 1.
    pub first_line: usize,
    /// Name of the request's field.
    pub field: String,
    /// Name of the function, if the schema is that of its arguments.
    pub function: Option<String>,
}

impl Constraint {
    /// Creates a constraint that applies from the first token.
    #[must_use]
    pub fn new(field: impl Into<String>, source: GrammarSource) -> Self {
        Self { field: field.into(), source, trigger: None, schemas: Vec::new() }
    }

    /// Returns the field of the request that an error is about, and the error. In a generated grammar, the error names
    /// the schema instead of the line.
    #[must_use]
    pub fn locate_error(&self, error: GrammarError) -> (&str, GrammarError) {
        if let GrammarError::Syntax { line, message, .. } = &error
            && let Some(schema) = self.schemas.iter().rev().find(|schema| schema.first_line <= *line)
        {
            let message = message.strip_prefix("failed to compile JSON schema: ").unwrap_or(message);
            let message = match &schema.function {
                Some(name) => format!("the parameters of the function '{name}': {message}"),
                None => message.to_owned(),
            };
            return (&schema.field, GrammarError::Unsupported(message));
        }
        (&self.field, error)
    }

    /// Makes the constraint lazy: it begins after the first trigger. Until then all tokens are permitted, and a run may
    /// end before it. The grammar describes the text after the trigger.
    #[must_use]
    pub fn lazy(self, trigger: Trigger) -> Self {
        Self { trigger: Some(trigger), ..self }
    }
}

/// The conditions that activate a lazy constraint: any of them is enough.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trigger {
    /// Any of these tokens outside of reasoning.
    pub tokens: Vec<TokenId>,
    /// Any of these texts outside of reasoning, however they are tokenized.
    pub texts: Vec<String>,
    /// Any of these texts at the start of the answer, ignoring whitespace. Unlike the other triggers, an opening is
    /// part of the text that the grammar describes, including the whitespace in it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub openings: Vec<String>,
    /// Text at the start of the answer that begins reasoning, such as `<think>`; empty for none.
    #[serde(rename = "reasoning_start", skip_serializing_if = "String::is_empty")]
    pub reasoning_start_marker: String,
    /// Text that ends reasoning, such as `</think>`, after which an opening counts too; empty for none.
    #[serde(rename = "reasoning_end", alias = "behind", skip_serializing_if = "String::is_empty")]
    pub reasoning_end_marker: String,
    /// True if the prompt begins reasoning, so that an opening counts only after its end, not at the start of the answer.
    #[serde(alias = "only_behind", skip_serializing_if = "std::ops::Not::not")]
    pub starts_in_reasoning: bool,
}

impl Trigger {
    /// Creates a trigger on a text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self { texts: vec![text.into()], ..Self::default() }
    }

    /// Creates a trigger on a token.
    #[must_use]
    pub fn token(token: TokenId) -> Self {
        Self { tokens: vec![token], ..Self::default() }
    }
}

/// The reason why a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// A syntax error.
    #[error("line {line}, column {column}: {message}")]
    Syntax {
        /// Line, counted from 1.
        line: usize,
        /// Column, counted from 1, in characters.
        column: usize,
        /// The error and the expected syntax.
        message: String,
    },
    /// The grammar uses an unsupported feature, or cannot be used with this model; the text is the reason.
    #[error("{0}")]
    Unsupported(String),
    /// The grammar is too long.
    #[error("the grammar has {bytes} bytes; the maximum is {limit}")]
    TooLong {
        /// Length in bytes.
        bytes: usize,
        /// Maximum length.
        limit: usize,
    },
    /// Compiling took too long.
    #[error("compiling the grammar took longer than {seconds} seconds; simplify it")]
    TooSlow {
        /// The limit.
        seconds: u64,
    },
    /// Too many compilations are running.
    #[error("too many grammars are being compiled at the moment; try again later")]
    Busy,
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

impl GrammarError {
    fn unsupported(message: impl Into<String>) -> Self {
        Self::Unsupported(message.into())
    }
}
