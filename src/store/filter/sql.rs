//! Translation of a filter to the condition of a statement.

use super::{Comparison, Condition, CountField, Filter};
use crate::store::rows::clean;
use sqlx::{Postgres, QueryBuilder};

/// The runs that a filter searches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum SearchRange {
    /// The newest runs: the words of each run are examined.
    Newest,
    /// All runs: the full-text index is used, because the words of a hundred thousand runs take a gigabyte.
    All,
}

impl Filter {
    /// Returns true if the filter has full-text terms, whose index returns runs in no order.
    pub(in crate::store) fn has_full_text_terms(&self) -> bool {
        self.terms.iter().any(|term| !term.negated && term.condition.is_full_text())
    }

    /// Appends ` and …` with the condition of each term.
    pub(in crate::store) fn push(&self, query: &mut QueryBuilder<Postgres>, range: SearchRange) {
        for term in &self.terms {
            let is_full_text = term.condition.is_full_text();
            if term.negated {
                query.push(" and not coalesce(");
                term.condition.push(query);
                query.push(", false)");
            } else if is_full_text && range == SearchRange::All {
                // `offset 0` prevents the planner from examining every run instead.
                query.push(" and run_id in (select run_id from runs where ");
                term.condition.push(query);
                query.push(" offset 0)");
            } else if is_full_text {
                // `coalesce` prevents the planner from using the full-text index.
                query.push(" and coalesce(");
                term.condition.push(query);
                query.push(", false)");
            } else {
                query.push(" and (");
                term.condition.push_positive(query);
                query.push(")");
            }
        }
    }
}

impl Condition {
    fn is_full_text(&self) -> bool {
        matches!(self, Self::Word(text) | Self::Phrase(text) if text.contains(char::is_alphanumeric))
    }

    /// Appends the condition of a term that is not negated, which may use another table.
    fn push_positive(&self, query: &mut QueryBuilder<Postgres>) {
        if let Self::Request(text) = self {
            // `run_keys` has short rows and, if the database supports it, an index for parts of ids.
            query.push("run_id in (select run_id from run_keys where ");
            push_contains(query, "request_id", text);
            query.push(")");
        } else {
            self.push(query);
        }
    }

    fn push(&self, query: &mut QueryBuilder<Postgres>) {
        match self {
            // A full-text index does not contain words of punctuation only.
            Self::Word(word) | Self::Phrase(word) if !self.is_full_text() => {
                query
                    .push("position(")
                    .push_bind(clean(word).into_owned())
                    .push(" in prompt_preview || output_preview) > 0");
            }
            Self::Word(word) => {
                query.push("search @@ (nullif(plainto_tsquery('simple', ").push_bind(clean(word).to_lowercase());
                query.push(")::text, '') || ':*')::tsquery");
            }
            Self::Phrase(phrase) => {
                query.push("search @@ phraseto_tsquery('simple', ").push_bind(clean(phrase).to_lowercase()).push(")");
            }
            Self::Model(text) => push_contains(query, "model", text),
            Self::Models(names, text) => {
                match names.as_slice() {
                    [] => drop(query.push("false")),
                    [name] => drop(query.push("left(model, 100) = ").push_bind(name.clone())),
                    names => drop(query.push("left(model, 100) = any(").push_bind(names.to_vec()).push(")")),
                }
                query.push(" and ");
                push_contains(query, "model", text);
            }
            // The first part of the next two conditions is the condition of their partial index.
            Self::Mod(text) => {
                query.push("mods <> '{}' and ");
                push_contains(query, "array_to_string(mods, E'\\x01')", text);
            }
            Self::Error(text) => {
                query.push("(errors > 0 or error_text <> '' or message is not null) and ");
                push_contains(query, "concat(error_text, ' ', message)", text);
            }
            Self::Request(text) => push_contains(query, "request_id", text),
            Self::Status(status) => {
                query.push("status = ").push_bind(status.as_str());
            }
            Self::Surface(surface) => {
                query.push("surface = ").push_bind(surface.as_str());
            }
            Self::Count(count, comparison, number) => {
                query.push(count.column()).push(comparison.operator()).push_bind(*number);
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

fn push_contains(query: &mut QueryBuilder<Postgres>, column: &'static str, text: &str) {
    let mut pattern = String::from("%");
    for c in clean(text).chars() {
        if matches!(c, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('%');
    query.push(column).push(" ilike ").push_bind(pattern);
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
}
