//! The filter language of the run list.
//!
//! Terms are separated by spaces, and a run must match all of them: a word or the beginning of one (in prompt or answer),
//! `"an exact phrase"`, `field:value`, `field>number`; `-` before a term negates it. An unknown field is an error with its
//! position, not an empty result.

mod id_range;
mod parser;
mod sql;
#[cfg(test)]
mod tests;

use super::BadFilter;
use super::full_text::index_text;
use super::text::clean;
use crate::events::{RunStatus, Surface};
use chrono::{DateTime, Utc};
pub(super) use id_range::IdRange;
use parser::FilterScanner;
pub(super) use sql::Branch;
use uuid::Uuid;

/// The fields, in display order.
pub const FIELDS: [&str; 20] = [
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

/// Maximum number of words of phrases whose frequencies are estimated.
const MAX_PHRASE_WORDS: usize = 8;

/// Number of indexed characters of a set of mods.
const MOD_SET_CHARS: usize = 200;

/// Number of indexed characters of a model's name. Names in ingested runs may have any length.
pub(super) const MODEL_CHARS: usize = 100;

/// Maximum number of parts that a filter is split into; each is planned separately and reads a page of runs.
const MAX_PARTS: usize = 16;

/// Maximum share of runs with a label, or with any of several words, for which the index is used.
const MAX_FREQUENCY: f64 = 0.1;

/// A parsed filter.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Filter {
    terms: Vec<Term>,
}

#[derive(Debug, Clone, PartialEq)]
struct Term {
    negated: bool,
    condition: Condition,
    /// True if an index finds the runs that match.
    is_indexed: bool,
}

impl Term {
    fn new(negated: bool, condition: Condition) -> Self {
        let is_indexed = condition.has_index(negated);
        Self { negated, condition, is_indexed }
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Condition {
    Word(String),
    Phrase(String),
    Model(String),
    /// Runs with one of these indexed model names whose full model name contains the text.
    Models(Vec<String>, String),
    Mod(String),
    /// Runs with one of these indexed sets of mods whose full set contains the text.
    Mods(Vec<String>, String),
    /// The whole label of a user.
    User(String),
    /// A session, an entry of the metadata, the parent of a fork, a tag, or a kind of feedback or note, as in `runs.labels`.
    Label(String),
    Status(RunStatus),
    Surface(Surface),
    Error(String),
    Request(String),
    /// Runs whose request ids contain a text.
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

impl Filter {
    /// Returns true if the filter has a term for models.
    pub(super) fn has_models(&self) -> bool {
        self.terms.iter().any(|term| !term.negated && matches!(term.condition, Condition::Model(_)))
    }

    /// Replaces parts of model names by the indexed names that contain them, because an index finds whole values. `known`
    /// holds the first [`MODEL_CHARS`] characters of each model's name.
    pub(super) fn resolve_models(&mut self, known: &[String]) {
        for term in self.terms.iter_mut().filter(|term| !term.negated) {
            if let Condition::Model(text) = &term.condition {
                *term = Term::new(false, Condition::Models(names_containing(known, text, MODEL_CHARS), text.clone()));
            }
        }
    }

    /// Returns true if the filter has a term for mods.
    pub(super) fn has_mods(&self) -> bool {
        self.terms.iter().any(|term| !term.negated && matches!(term.condition, Condition::Mod(_)))
    }

    /// Replaces parts of mod names by the indexed sets of mods that contain them. `known` holds the first [`MOD_SET_CHARS`]
    /// characters of each set.
    pub(super) fn resolve_mods(&mut self, known: &[String]) {
        for term in self.terms.iter_mut().filter(|term| !term.negated) {
            if let Condition::Mod(text) = &term.condition {
                let sets = names_containing(known, text, MOD_SET_CHARS);
                *term = Term::new(false, Condition::Mods(sets, text.clone()));
            }
        }
    }

    /// Returns the words and labels whose frequencies [`Filter::set_frequencies`] needs: the index of the term, the column,
    /// and the beginning of the word, or the label. Of the words of phrases it returns the longest ones, which are probably
    /// the rarest.
    pub(super) fn frequency_terms(&self) -> Vec<(usize, &'static str, String)> {
        let (mut wanted, mut phrase_words) = (Vec::new(), Vec::new());
        for (index, term) in self.terms.iter().enumerate().filter(|(_, term)| term.is_indexed) {
            match &term.condition {
                Condition::Word(word) => wanted.push((index, "search", index_text(word).trim().to_owned())),
                Condition::Phrase(phrase) => {
                    let phrase = index_text(phrase);
                    let words = phrase.split(|c: char| c.is_ascii() && !c.is_alphanumeric());
                    let words = words.filter(|word| !word.is_empty());
                    phrase_words.extend(words.map(|word| (index, "search", word.to_owned())));
                }
                Condition::Label(label) => wanted.push((index, "labels", clean(label).into_owned())),
                _ => {}
            }
        }
        phrase_words.sort_by(|(_, _, a), (_, _, b)| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        phrase_words.dedup_by(|(_, _, a), (_, _, b)| a == b);
        wanted.extend(phrase_words.into_iter().take(MAX_PHRASE_WORDS));
        wanted
    }

    /// Selects the words and labels for which the index is used: the rarest words, until their shares exceed
    /// [`MAX_FREQUENCY`] in total, and all labels if one of them is rare. `frequencies` holds the share of runs for each of
    /// [`Filter::frequency_terms`]. Returns the lowest share of a term that uses an index, or 1.
    pub(super) fn set_frequencies(&mut self, frequencies: &[(usize, f64)]) -> f64 {
        let is_label = |index: usize| matches!(self.terms[index].condition, Condition::Label(_));
        let has_rare_label = frequencies.iter().any(|&(index, share)| is_label(index) && share <= MAX_FREQUENCY);
        let mut sorted = frequencies.to_vec();
        sorted.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        let (mut lowest, mut words) = (1.0_f64, 0.0);
        for (index, share) in sorted {
            let term = &mut self.terms[index];
            term.is_indexed = match term.condition {
                // The index intersects its entries for whole labels and words, so it reads few entries of the frequent ones.
                Condition::Label(_) => has_rare_label,
                Condition::Phrase(_) => true,
                _ => {
                    words += share;
                    words <= MAX_FREQUENCY
                }
            };
            if term.is_indexed {
                lowest = lowest.min(share);
            }
        }
        lowest
    }

    /// Returns the indexes of the terms for parts of request ids, each with its pattern.
    pub(super) fn request_patterns(&self) -> Vec<(usize, String)> {
        let wanted = |(index, term): (usize, &Term)| match &term.condition {
            Condition::Request(text) if term.is_indexed => Some((index, sql::pattern(text))),
            _ => None,
        };
        self.terms.iter().enumerate().filter_map(wanted).collect()
    }

    /// Replaces a part of request ids by the runs that match. `None` means too many runs: the index is not used.
    pub(super) fn set_request_matches(&mut self, index: usize, runs: Option<Vec<Uuid>>) {
        match runs {
            Some(runs) => self.terms[index].condition = Condition::Ids(runs),
            None => self.terms[index].is_indexed = false,
        }
    }

    /// Returns the branches of runs that are searched separately.
    pub(super) fn branches(&self) -> &'static [Branch] {
        if self.id_range().is_some() { &[Branch::Ids, Branch::Displaced] } else { &[Branch::All] }
    }

    /// Returns the ids that `after:` and `before:` select; `None` without them.
    pub(super) fn id_range(&self) -> Option<IdRange> {
        let mut id_range = IdRange::default();
        for term in self.terms.iter().filter(|term| !term.negated) {
            match term.condition {
                Condition::After(time) => id_range.begin_after(time),
                Condition::Before(time) => id_range.end_before(time),
                _ => {}
            }
        }
        (id_range != IdRange::default()).then_some(id_range)
    }

    /// Splits the filter into filters that match different runs. For each of them an index returns the newest runs in list
    /// order.
    pub(super) fn split(&self) -> Vec<Self> {
        let split = self.terms.iter().enumerate().find_map(|(index, term)| {
            let parts: Vec<Condition> = match &term.condition {
                Condition::Models(names, text) if !term.negated => {
                    names.iter().map(|name| Condition::Models(vec![name.clone()], text.clone())).collect()
                }
                Condition::Mods(sets, text) if !term.negated => {
                    sets.iter().map(|set| Condition::Mods(vec![set.clone()], text.clone())).collect()
                }
                Condition::Status(status) if term.negated => {
                    RunStatus::ALL.into_iter().filter(|other| other != status).map(Condition::Status).collect()
                }
                _ => return None,
            };
            (2..=MAX_PARTS).contains(&parts.len()).then_some((index, parts))
        });
        let Some((index, parts)) = split else { return vec![self.clone()] };
        let part = |condition| {
            let mut part = self.clone();
            part.terms[index] = Term::new(false, condition);
            part
        };
        parts.into_iter().map(part).collect()
    }
}

/// Returns the names that contain a text, and the names of `chars` characters, which are truncated and may contain it.
fn names_containing(known: &[String], text: &str, chars: usize) -> Vec<String> {
    let wanted = clean(text).to_lowercase();
    let is_truncated = |name: &str| name.chars().count() == chars;
    known.iter().filter(|name| is_truncated(name) || name.to_lowercase().contains(&wanted)).cloned().collect()
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
