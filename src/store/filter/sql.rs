//! Translation of a search plan to the conditions of statements.

use super::plan::{PlannedTerm, SearchPlan};
use super::words::{ALL_WORDS, INDEXED_WORDS, MIN_INDEXED_BYTES, PHRASE, UNORDERED, leaves_out_last_word, push_search};
use super::{Comparison, Condition, CountField};
use crate::events::RunStatus;
use crate::store::full_text::has_several_words;
use crate::store::text::clean;
use sqlx::{Postgres, QueryBuilder};

/// Rank of a condition without an index that returns runs in list order.
const NO_DRIVER: u8 = 9;

/// Maximum number of candidates that a search checks for conditions on short columns.
const MAX_CHECKED: i64 = 5_000;

/// Maximum number of candidates whose texts a search checks.
const MAX_TEXTS_CHECKED: i64 = 3_000;

/// A part of the runs that an index returns in list order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum Branch {
    /// All runs, for filters without `after:` and `before:`.
    All,
    /// Runs with ids in the range that `after:` and `before:` select.
    Ids,
    /// Runs outside that range whose id contains another time than their start, e.g. ingested runs.
    Displaced,
}

impl SearchPlan {
    /// Appends ` and …` with the condition of each term, in a form that uses no index.
    pub(in crate::store) fn push_all(&self, query: &mut QueryBuilder<Postgres>) {
        for is_text in [false, true] {
            for term in self.terms.iter().filter(|term| term.condition.reads_text() == is_text) {
                term.push_check(query);
            }
        }
    }

    /// Appends ` and …` with the conditions by which indexes find candidates.
    pub(in crate::store) fn push_indexed(&self, query: &mut QueryBuilder<Postgres>) {
        let (texts, others): (Vec<_>, Vec<_>) =
            self.terms.iter().filter(|term| term.uses_index).partition(|term| term.condition.is_full_text());
        for term in others {
            query.push(" and (");
            term.condition.push_indexed(term.negated, query);
            query.push(")");
        }
        // One condition for all words, because the planner multiplies the estimates of several. The sub-query hides the
        // words from the planner, which would ignore the index of ids after a low estimate.
        for (number, term) in texts.iter().enumerate() {
            query.push(if number == 0 { " and search @@ (select " } else { " && " });
            term.condition.push_words(query);
        }
        query.push(if texts.is_empty() { "" } else { ")" });
    }

    /// Returns the number of terms whose index contains the ids of runs.
    pub(in crate::store) fn count_id_indexes(&self) -> usize {
        self.terms.iter().filter(|term| term.uses_index && term.condition.has_id_index()).count()
    }

    /// Appends ` and …` with the condition of a branch.
    pub(in crate::store) fn push_branch(&self, branch: Branch, query: &mut QueryBuilder<Postgres>) {
        let id_range = self.id_range().unwrap_or_default();
        match branch {
            Branch::All => {}
            Branch::Ids => id_range.push_inside(query),
            Branch::Displaced => id_range.push_displaced(query),
        }
    }

    /// Appends ` and …` with the conditions that each candidate is checked for.
    pub(in crate::store) fn push_checked(&self, query: &mut QueryBuilder<Postgres>) {
        for is_text in [false, true] {
            let terms = self.terms.iter().filter(|term| term.needs_check() && term.condition.reads_text() == is_text);
            terms.for_each(|term| term.push_check(query));
        }
    }

    /// Returns the maximum number of candidates that a search checks; `None` if no condition needs a check.
    pub(in crate::store) fn max_candidates(&self) -> Option<i64> {
        let mut checked = self.terms.iter().filter(|term| term.needs_check()).peekable();
        checked.peek()?;
        Some(if checked.any(|term| term.condition.reads_text()) { MAX_TEXTS_CHECKED } else { MAX_CHECKED })
    }

    /// Returns true if there is no term.
    pub(in crate::store) fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// Returns the index of the term that drives the probe: its database index returns the fewest runs in list order.
    pub(in crate::store) fn driver(&self) -> Option<usize> {
        let drives = |&index: &usize| !self.terms[index].negated && self.terms[index].condition.rank() < NO_DRIVER;
        (0..self.terms.len()).filter(drives).min_by_key(|&index| self.terms[index].condition.rank())
    }

    /// Appends ` and …` with the index condition of a term. Returns the `order by` columns of the index that precede
    /// `run_id`.
    pub(in crate::store) fn push_driver(&self, index: usize, query: &mut QueryBuilder<Postgres>) -> &'static str {
        self.terms[index].condition.push_driver(query)
    }
}

impl PlannedTerm {
    /// Returns true if each candidate must be checked for this term.
    fn needs_check(&self) -> bool {
        !self.uses_index || self.condition.exceeds_index()
    }

    fn push_check(&self, query: &mut QueryBuilder<Postgres>) {
        query.push(if self.negated { " and not coalesce((" } else { " and coalesce((" });
        self.condition.push(query);
        query.push("), false)");
    }
}

impl Condition {
    fn is_full_text(&self) -> bool {
        matches!(self, Self::Word(text) | Self::Phrase(text) if text.contains(char::is_alphanumeric))
    }

    /// Returns true if the index also returns runs that do not match: it does not contain the order of words, and is not
    /// searched for the last word of [`leaves_out_last_word`].
    pub(super) fn exceeds_index(&self) -> bool {
        match self {
            Self::Word(text) => leaves_out_last_word(text),
            // PostgreSQL also splits a number from the letters after it, as in `1.5b`.
            Self::Phrase(text) => has_several_words(text) || text.contains(|c: char| c.is_ascii_digit()),
            _ => false,
        }
    }

    /// Returns true if a check reads the full-text column of a run or searches its texts.
    fn reads_text(&self) -> bool {
        matches!(self, Self::Word(_) | Self::Phrase(_) | Self::Error(_))
    }

    /// Returns true if an index finds the runs that match.
    pub(super) fn has_index(&self, negated: bool) -> bool {
        match self {
            Self::Status(_) => true,
            _ if negated => false,
            Self::Word(text) | Self::Phrase(text) => self.is_full_text() && text.len() >= MIN_INDEXED_BYTES,
            Self::Error(text) | Self::Request(text) => text.len() >= MIN_INDEXED_BYTES,
            Self::Models(..)
            | Self::Mods(..)
            | Self::User(_)
            | Self::Label(_)
            | Self::Surface(_)
            | Self::Ids(_)
            | Self::Count(CountField::Tokens | CountField::Actions, ..) => true,
            Self::Count(_, comparison, number) => comparison.implies_above_zero(*number),
            Self::Model(_) | Self::Mod(_) | Self::Seed(_) | Self::After(_) | Self::Before(_) => false,
        }
    }

    /// Returns true if the index of this condition contains the ids of runs.
    fn has_id_index(&self) -> bool {
        !matches!(self, Self::Word(_) | Self::Phrase(_) | Self::Label(_) | Self::Error(_) | Self::Ids(_))
    }

    /// Returns the rank of a condition as driver of the probe; a lower rank means fewer runs.
    fn rank(&self) -> u8 {
        match self {
            Self::Models(names, _) | Self::Mods(names, _) if names.len() != 1 => NO_DRIVER,
            Self::User(_) => 0,
            Self::Error(_) => 1,
            Self::Count(CountField::Backtracks | CountField::Forced | CountField::Errors, comparison, number)
                if comparison.implies_above_zero(*number) =>
            {
                1
            }
            Self::Mods(..) => 2,
            Self::Status(RunStatus::Done) => 5,
            Self::Status(_) => 3,
            Self::Models(..) => 4,
            Self::Surface(_) => 6,
            _ => NO_DRIVER,
        }
    }

    /// Appends the condition of an index, as a range instead of an equality, so that the planner uses no other index.
    fn push_driver(&self, query: &mut QueryBuilder<Postgres>) -> &'static str {
        let mut between = |column: &'static str, value: &str, order: &'static str| {
            query.push(" and ").push(column).push(" between ").push_bind(value.to_owned());
            query.push(" and ").push_bind(value.to_owned());
            order
        };
        match self {
            Self::Models(names, _) if names.len() == 1 => {
                between("left(model, 100)", &names[0], "left(model, 100) desc, ")
            }
            Self::Mods(sets, _) if sets.len() == 1 => {
                between("mods <> '{}' and mod_set(mods)", &sets[0], "mod_set(mods) desc, ")
            }
            Self::User(user) => between("left(user_label, 100)", &indexed_user(user), "left(user_label, 100) desc, "),
            Self::Status(status) => between("status", status.as_str(), "status desc, "),
            Self::Surface(surface) => between("surface", surface.as_str(), "surface desc, "),
            Self::Error(_) => {
                query.push(" and (errors > 0 or error_text <> '' or message is not null)");
                ""
            }
            Self::Count(CountField::Errors, comparison, number) if comparison.implies_above_zero(*number) => {
                query.push(" and (errors > 0 or error_text <> '' or message is not null)");
                ""
            }
            Self::Count(CountField::Backtracks | CountField::Forced, comparison, number)
                if comparison.implies_above_zero(*number) =>
            {
                query.push(" and (backtracked > 0 or forced > 0)");
                ""
            }
            _ => "",
        }
    }

    /// Appends the condition in a form that can use its index.
    fn push_indexed(&self, negated: bool, query: &mut QueryBuilder<Postgres>) {
        match self {
            Self::Status(status) if negated => {
                let others =
                    RunStatus::ALL.into_iter().filter(|other| other != status).map(|other| other.as_str().to_owned());
                query.push("status = any(").push_bind(others.collect::<Vec<_>>()).push(")");
            }
            Self::Count(count @ (CountField::Tokens | CountField::Actions), comparison, number) => {
                let column = if *count == CountField::Tokens { "final_tokens" } else { "final_actions" };
                query.push(column).push(comparison.operator()).push_bind(*number);
                query.push(" or status = 'running' and ");
                self.push(query);
            }
            _ => self.push(query),
        }
    }

    /// Appends a full-text query for the words of a condition, in any order.
    pub(super) fn push_words(&self, query: &mut QueryBuilder<Postgres>) {
        match self {
            Self::Word(word) if leaves_out_last_word(word) => push_search(query, word, INDEXED_WORDS),
            Self::Word(word) => push_search(query, word, ALL_WORDS),
            Self::Phrase(phrase) => push_search(query, phrase, UNORDERED),
            _ => {}
        }
    }

    fn push(&self, query: &mut QueryBuilder<Postgres>) {
        match self {
            // The full-text index contains no words that consist of punctuation.
            Self::Word(word) | Self::Phrase(word) if !self.is_full_text() => {
                query
                    .push("position(")
                    .push_bind(clean(word).into_owned())
                    .push(" in prompt_preview || output_preview) > 0");
            }
            Self::Word(word) => {
                query.push("search @@ ");
                push_search(query, word, ALL_WORDS);
            }
            Self::Phrase(phrase) => {
                query.push("search @@ ");
                push_search(query, phrase, PHRASE);
            }
            Self::Model(text) => push_contains(query, "model", text),
            Self::Models(names, text) => {
                push_one_of(query, "left(model, 100)", names);
                query.push(" and ");
                push_contains(query, "model", text);
            }
            // The next conditions begin with the condition of their partial index.
            Self::Mod(text) => {
                query.push("mods <> '{}' and ");
                push_contains(query, "array_to_string(mods, E'\\x01')", text);
            }
            Self::Mods(sets, text) => {
                query.push("mods <> '{}' and ");
                push_one_of(query, "mod_set(mods)", sets);
                query.push(" and ");
                push_contains(query, "array_to_string(mods, E'\\x01')", text);
            }
            Self::User(user) => {
                query.push("left(user_label, 100) = ").push_bind(indexed_user(user));
                query.push(" and user_label = ").push_bind(clean(user).into_owned());
            }
            Self::Label(label) => {
                query.push("labels <> '{}' and labels @> array[").push_bind(clean(label).into_owned()).push("]");
            }
            Self::Error(text) => {
                query.push("(errors > 0 or error_text <> '' or message is not null) and ");
                push_contains(query, "(error_text || ' ' || coalesce(message, ''))", text);
            }
            Self::Request(text) => push_contains(query, "request_id", text),
            Self::Ids(runs) => {
                query.push("run_id = any(").push_bind(runs.clone()).push(")");
            }
            Self::Seed(seed) => {
                query.push("seed = ").push_bind(i64::from(*seed));
            }
            Self::Status(status) => {
                query.push("status = ").push_bind(status.as_str());
            }
            Self::Surface(surface) => {
                query.push("surface = ").push_bind(surface.as_str());
            }
            Self::Count(count, comparison, number) => {
                let column = count.column();
                if count.has_index() && comparison.implies_above_zero(*number) {
                    query.push(column).push(" > 0 and ");
                }
                query.push(column).push(comparison.operator()).push_bind(*number);
            }
            Self::After(time) => {
                query.push("created_at >= ").push_bind(*time);
            }
            Self::Before(time) => {
                query.push("created_at < ").push_bind(*time);
            }
        }
    }
}

/// Returns the indexed part of a user's label.
fn indexed_user(user: &str) -> String {
    clean(user).chars().take(100).collect()
}

fn push_one_of(query: &mut QueryBuilder<Postgres>, column: &'static str, names: &[String]) {
    match names {
        [] => drop(query.push("false")),
        [name] => drop(query.push(column).push(" = ").push_bind(name.clone())),
        names => drop(query.push(column).push(" = any(").push_bind(names.to_vec()).push(")")),
    }
}

fn push_contains(query: &mut QueryBuilder<Postgres>, column: &'static str, text: &str) {
    query.push(column).push(" ilike ").push_bind(pattern(text));
}

/// Returns the `like` pattern of texts that contain this one.
pub(super) fn pattern(text: &str) -> String {
    let mut pattern = String::from("%");
    for c in clean(text).chars() {
        if matches!(c, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('%');
    pattern
}

impl CountField {
    const fn column(self) -> &'static str {
        match self {
            Self::Tokens => "completion_tokens",
            Self::Backtracks => "backtracked",
            Self::Forced => "forced",
            Self::Actions => "actions",
            Self::Errors => "errors",
        }
    }

    /// Returns true if an index contains the runs whose count is above zero.
    const fn has_index(self) -> bool {
        matches!(self, Self::Backtracks | Self::Forced | Self::Errors)
    }
}

impl Comparison {
    const fn operator(self) -> &'static str {
        match self {
            Self::Is => " = ",
            Self::Above => " > ",
            Self::AtLeast => " >= ",
            Self::Below => " < ",
            Self::AtMost => " <= ",
        }
    }

    /// Returns true if the comparison is only true for counts above zero.
    const fn implies_above_zero(self, number: i32) -> bool {
        match self {
            Self::Is | Self::AtLeast => number > 0,
            Self::Above => number >= 0,
            Self::Below | Self::AtMost => false,
        }
    }
}
