//! The plan of a search: a filter whose names are resolved, and the indexes that the search uses.

use super::id_range::IdRange;
use super::sql::{Branch, pattern};
use super::{Condition, Filter};
use crate::events::RunStatus;
use crate::store::full_text::index_text;
use crate::store::text::clean;
use uuid::Uuid;

/// Maximum number of words of phrases whose frequencies are estimated.
pub(super) const MAX_PHRASE_WORDS: usize = 8;

/// Number of indexed characters of a set of mods.
const MOD_SET_CHARS: usize = 200;

/// Number of indexed characters of a model's name. Names in ingested runs may have any length.
const MODEL_CHARS: usize = 100;

/// Maximum number of parts that a filter is split into; each is planned separately and reads a page of runs.
const MAX_PARTS: usize = 16;

/// Maximum share of runs with a label, or with any of several words, for which the index is used.
const MAX_FREQUENCY: f64 = 0.1;

/// A filter for the search of runs.
#[derive(Debug, Clone)]
pub(in crate::store) struct SearchPlan {
    pub(super) terms: Vec<PlannedTerm>,
}

#[derive(Debug, Clone)]
pub(super) struct PlannedTerm {
    pub(super) negated: bool,
    pub(super) condition: Condition,
    /// True if the search finds the runs that match with an index.
    pub(super) uses_index: bool,
}

impl PlannedTerm {
    fn new(negated: bool, condition: Condition) -> Self {
        let uses_index = condition.has_index(negated);
        Self { negated, condition, uses_index }
    }
}

impl SearchPlan {
    /// Plans to use the index of every term that has one.
    pub(in crate::store) fn new(filter: Filter) -> Self {
        let terms = filter.terms.into_iter().map(|term| PlannedTerm::new(term.negated, term.condition)).collect();
        Self { terms }
    }

    /// Returns true if the plan has a term for parts of model names.
    pub(in crate::store) fn has_models(&self) -> bool {
        self.terms.iter().any(|term| !term.negated && matches!(term.condition, Condition::Model(_)))
    }

    /// Replaces parts of model names by the indexed names that contain them, because an index finds whole values. `known`
    /// holds the first [`MODEL_CHARS`] characters of each model's name.
    pub(in crate::store) fn resolve_models(&mut self, known: &[String]) {
        for term in self.terms.iter_mut().filter(|term| !term.negated) {
            if let Condition::Model(text) = &term.condition {
                *term = PlannedTerm::new(
                    false,
                    Condition::Models(names_containing(known, text, MODEL_CHARS), text.clone()),
                );
            }
        }
    }

    /// Returns true if the plan has a term for parts of mod names.
    pub(in crate::store) fn has_mods(&self) -> bool {
        self.terms.iter().any(|term| !term.negated && matches!(term.condition, Condition::Mod(_)))
    }

    /// Replaces parts of mod names by the indexed sets of mods that contain them. `known` holds the first [`MOD_SET_CHARS`]
    /// characters of each set.
    pub(in crate::store) fn resolve_mods(&mut self, known: &[String]) {
        for term in self.terms.iter_mut().filter(|term| !term.negated) {
            if let Condition::Mod(text) = &term.condition {
                let sets = names_containing(known, text, MOD_SET_CHARS);
                *term = PlannedTerm::new(false, Condition::Mods(sets, text.clone()));
            }
        }
    }

    /// Returns the words and labels whose frequencies [`SearchPlan::set_frequencies`] needs: the index of the term, the column,
    /// and the beginning of the word, or the label. Of the words of phrases it returns the longest ones, which are probably
    /// the rarest.
    pub(in crate::store) fn frequency_terms(&self) -> Vec<(usize, &'static str, String)> {
        let (mut wanted, mut phrase_words) = (Vec::new(), Vec::new());
        for (index, term) in self.terms.iter().enumerate().filter(|(_, term)| term.uses_index) {
            match &term.condition {
                Condition::Word(word) => wanted.push((index, "search", index_text(word).trim().to_owned())),
                Condition::Phrase(phrase) => {
                    let phrase = index_text(phrase);
                    let words = phrase.split_whitespace();
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
    /// [`SearchPlan::frequency_terms`]. Returns the lowest share of a term that uses an index, or 1.
    pub(in crate::store) fn set_frequencies(&mut self, frequencies: &[(usize, f64)]) -> f64 {
        let is_label = |index: usize| matches!(self.terms[index].condition, Condition::Label(_));
        let has_rare_label = frequencies.iter().any(|&(index, share)| is_label(index) && share <= MAX_FREQUENCY);
        let mut sorted = frequencies.to_vec();
        sorted.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        let (mut lowest, mut words) = (1.0_f64, 0.0);
        for (index, share) in sorted {
            let term = &mut self.terms[index];
            term.uses_index = match term.condition {
                // The index intersects its entries for whole labels and words, so it reads few entries of the frequent ones.
                Condition::Label(_) => has_rare_label,
                Condition::Phrase(_) => true,
                _ => {
                    words += share;
                    words <= MAX_FREQUENCY
                }
            };
            if term.uses_index {
                lowest = lowest.min(share);
            }
        }
        lowest
    }

    /// Returns the indexes of the terms for parts of request ids, each with its pattern.
    pub(in crate::store) fn request_patterns(&self) -> Vec<(usize, String)> {
        let wanted = |(index, term): (usize, &PlannedTerm)| match &term.condition {
            Condition::Request(text) if term.uses_index => Some((index, pattern(text))),
            _ => None,
        };
        self.terms.iter().enumerate().filter_map(wanted).collect()
    }

    /// Replaces a part of request ids by the runs that match. `None` means too many runs: the index is not used.
    pub(in crate::store) fn set_request_matches(&mut self, index: usize, runs: Option<Vec<Uuid>>) {
        match runs {
            Some(runs) => self.terms[index].condition = Condition::Ids(runs),
            None => self.terms[index].uses_index = false,
        }
    }

    /// Returns the branches of runs that are searched separately.
    pub(in crate::store) fn branches(&self) -> &'static [Branch] {
        if self.id_range().is_some() { &[Branch::Ids, Branch::Displaced] } else { &[Branch::All] }
    }

    /// Returns the ids that `after:` and `before:` select; `None` without them.
    pub(in crate::store) fn id_range(&self) -> Option<IdRange> {
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

    /// Splits the plan into plans that match different runs. For each of them an index returns the newest runs in list
    /// order.
    pub(in crate::store) fn split(&self) -> Vec<Self> {
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
            part.terms[index] = PlannedTerm::new(false, condition);
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
