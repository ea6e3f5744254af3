//! A filter as the condition of a statement.

use super::{Comparison, Condition, Count, Filter};
use crate::store::rows::clean;
use sqlx::{Postgres, QueryBuilder};

impl Filter {
    /// Appends ` and …` for every term.
    pub(in crate::store) fn push(&self, query: &mut QueryBuilder<Postgres>) {
        for term in &self.terms {
            query.push(if term.negated { " and not coalesce(" } else { " and coalesce(" });
            term.condition.push(query);
            query.push(", false)");
        }
    }
}

impl Condition {
    fn push(&self, query: &mut QueryBuilder<Postgres>) {
        match self {
            // a word of punctuation alone has no place in an index of words
            Self::Word(word) | Self::Phrase(word) if !word.contains(char::is_alphanumeric) => {
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
            Self::Mod(text) => {
                query.push("exists (select from unnest(mods) as name where ");
                push_contains(query, "name", text);
                query.push(")");
            }
            Self::Error(text) => push_contains(query, "concat(error_text, ' ', message)", text),
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

impl Count {
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
