//! What an answer may look like: JSON of a schema, a grammar, a regular expression, as a set of tokens that may come next.
//!
//! A [`Constraint`] is what a request asks for. [`GrammarCompiler`], one per model, compiles it into a [`GrammarMatcher`], which goes along
//! with one run: it says which tokens may come next, takes the token that came, and goes back where a mod takes tokens away.
//! The work is llguidance's; llama.cpp's grammar format is translated in [`gbnf`]. GrammarCompiler come from strangers: their size,
//! depth and compile time are bounded, and none of them can end the process.
//!
//! Only text can spell text: a control token (`<|im_end|>`) never stands for its characters, and its characters never become
//! it. A grammar that means the token says so: `<|im_end|>` or `<[2]>` in Lark and GBNF, see [`token_reference`].

mod ahead;
mod compile;
mod follower;
pub mod gbnf;
mod schema;
mod tokens;
mod trigger;

pub use compile::GrammarCompiler;
pub use follower::{AcceptResult, GrammarMatcher, TokenMask};
pub use tokens::token_reference;

use crate::events::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A grammar, in one of the languages that people write them in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "source", rename_all = "snake_case")]
pub enum GrammarSource {
    /// JSON that is valid against this schema.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// llama.cpp's grammar format; it begins at the rule `root`.
    Gbnf(String),
    /// llguidance's variant of Lark; it begins at the rule `start`.
    Lark(String),
    /// A regular expression that the whole answer matches.
    Regex(String),
}

/// What a request asks its answer to be.
///
/// ```
/// use thunder::model::grammar::{Constraint, GrammarSource, Trigger};
/// let at_once = Constraint::new("grammar", GrammarSource::Gbnf("root ::= \"yes\" | \"no\"".into()));
/// let later = Constraint::new("tools", GrammarSource::JsonObject).lazy(Trigger::text("<tool_call>"));
/// assert!(at_once.trigger.is_none() && later.trigger.is_some());
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Constraint {
    /// The request's field that it came from, which an error names.
    pub field: String,
    /// The grammar.
    #[serde(flatten)]
    pub source: GrammarSource,
    /// What must have been generated before the grammar holds; `None`: it holds from the first token on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trigger: Option<Trigger>,
}

impl Constraint {
    /// A constraint that holds from the first token on.
    #[must_use]
    pub fn new(field: impl Into<String>, source: GrammarSource) -> Self {
        Self { field: field.into(), source, trigger: None }
    }

    /// The same constraint, which begins behind the first trigger. Until then everything may be generated, and a run that
    /// ends before is none the worse. The grammar describes what follows the trigger, without it.
    #[must_use]
    pub fn lazy(self, trigger: Trigger) -> Self {
        Self { trigger: Some(trigger), ..self }
    }
}

/// What makes a lazy constraint begin, whichever comes first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trigger {
    /// Any of these tokens.
    pub tokens: Vec<TokenId>,
    /// Any of these texts, however they are cut into tokens.
    pub texts: Vec<String>,
    /// Any of these texts where the answer begins with it, white space not counted. The grammar describes it, too, with the
    /// white space within.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub openings: Vec<String>,
    /// What an opening may also stand behind; empty for nothing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub behind: String,
    /// Whether an opening counts only behind that.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub only_behind: bool,
}

impl Trigger {
    /// A text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self { texts: vec![text.into()], ..Self::default() }
    }

    /// A token.
    #[must_use]
    pub fn token(token: TokenId) -> Self {
        Self { tokens: vec![token], ..Self::default() }
    }
}

/// Why a grammar cannot be used; every message is for the person who wrote it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// It is not written as its language wants it.
    #[error("line {line}, column {column}: {message}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// Counted from 1, in characters.
        column: usize,
        /// What is wrong there, and what would be right.
        message: String,
    },
    /// It says something that cannot be done.
    #[error("{0}")]
    Unsupported(String),
    /// It is longer than is taken.
    #[error("the grammar has {bytes} bytes, at most {limit} are taken")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// What is taken.
        limit: usize,
    },
    /// Compiling took too long.
    #[error("compiling the grammar took longer than {seconds} seconds; a simpler one is needed")]
    TooSlow {
        /// The limit.
        seconds: u64,
    },
    /// Too many are being compiled.
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
