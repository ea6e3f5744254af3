//! The filter language of the run list.
//!
//! Terms are separated by spaces, and a run must match all of them: a word or the beginning of one (in prompt or answer),
//! `"an exact phrase"`, `field:value`, `field>number`; `-` before a term negates it. An unknown field is an error with its
//! position, not an empty result.

mod id_range;
mod parser;
mod plan;
mod sql;
#[cfg(test)]
mod tests;
mod words;

use super::BadFilter;
use crate::events::{RunStatus, Surface};
use chrono::{DateTime, Utc};
pub(super) use id_range::IdRange;
use parser::FilterScanner;
pub(super) use plan::SearchPlan;
pub(super) use sql::Branch;
use uuid::Uuid;

/// The fields, in display order.
pub const FIELDS: [&str; 21] = [
    "model",
    "mod",
    "status",
    "surface",
    "error",
    "request",
    "user",
    "session",
    "tag",
    "feedback",
    "note",
    "metadata",
    "parent",
    "experiment",
    "seed",
    "tokens",
    "backtracks",
    "forced",
    "actions",
    "after",
    "before",
];

/// Maximum characters of a filter; each word of a phrase may be looked up in the index.
pub const MAX_FILTER_CHARS: usize = 4000;

/// Maximum number of terms; each may be evaluated for every run.
const MAX_TERMS: usize = 64;

/// A parsed filter, as the user wrote it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Filter {
    terms: Vec<Term>,
}

#[derive(Debug, Clone, PartialEq)]
struct Term {
    negated: bool,
    condition: Condition,
}

#[derive(Debug, Clone, PartialEq)]
enum Condition {
    Word(String),
    Phrase(String),
    Model(String),
    /// In a plan: runs with one of these indexed model names whose full model name contains the text.
    Models(Vec<String>, String),
    Mod(String),
    /// In a plan: runs with one of these indexed sets of mods whose full set contains the text.
    Mods(Vec<String>, String),
    /// The whole label of a user.
    User(String),
    /// A session, an entry of the metadata, the parent of a fork, a tag, or a kind of feedback or note, as in `runs.labels`.
    Label(String),
    Seed(u32),
    Status(RunStatus),
    Surface(Surface),
    Error(String),
    Request(String),
    /// In a plan: runs whose request ids contain a text.
    Ids(Vec<Uuid>),
    Count(CountField, Comparison, i32),
    After(DateTime<Utc>),
    Before(DateTime<Utc>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CountField {
    Tokens,
    Backtracks,
    Forced,
    Actions,
    Errors,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Is,
    Above,
    AtLeast,
    Below,
    AtMost,
}

impl Filter {
    /// Parses a filter. `now` is the reference of relative times such as `after:7d`.
    ///
    /// # Errors
    /// The first error, with its position.
    pub fn parse(text: &str, now: DateTime<Utc>) -> Result<Self, BadFilter> {
        let mut filter = Self::default();
        for (term, _) in terms(text, now)? {
            if !filter.terms.contains(&term) {
                filter.terms.push(term);
            }
        }
        Ok(filter)
    }

    /// Returns the text of each term of a filter; empty for an invalid filter.
    #[must_use]
    pub fn term_texts(text: &str) -> Vec<String> {
        terms(text, DateTime::default())
            .map(|terms| terms.into_iter().map(|(_, text)| text).collect())
            .unwrap_or_default()
    }
}

/// Returns the terms of a filter, each with its text.
fn terms(text: &str, now: DateTime<Utc>) -> Result<Vec<(Term, String)>, BadFilter> {
    let chars: Vec<char> = text.chars().collect();
    if chars.len() > MAX_FILTER_CHARS {
        let message = format!("the filter has more than {MAX_FILTER_CHARS} characters");
        return Err(BadFilter {
            at: MAX_FILTER_CHARS,
            len: chars.len() - MAX_FILTER_CHARS,
            message,
            did_you_mean: None,
        });
    }
    let mut scanner = FilterScanner::new(&chars);
    let mut terms = Vec::new();
    while scanner.skip_spaces() {
        if terms.len() == MAX_TERMS {
            return Err(scanner.too_many(MAX_TERMS));
        }
        let start = scanner.at();
        let term = scanner.term(now)?;
        terms.push((term, chars[start..scanner.at()].iter().collect()));
    }
    Ok(terms)
}
