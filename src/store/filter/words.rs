//! Full-text queries for the words of a filter.

use crate::store::full_text::{index_text, search_texts};
use sqlx::{Postgres, QueryBuilder};

/// Minimum bytes of a word or part of a text for which an index is used. Shorter ones match too many entries.
pub(super) const MIN_INDEXED_BYTES: usize = 3;

/// SQL before and after a text, for runs with all of its words in any order, the last one by its beginning. A text without
/// words is an empty query; NULL would make the queries that it is joined with NULL.
pub(super) const ALL_WORDS: [&str; 2] =
    ["coalesce((nullif(plainto_tsquery('simple', ", ")::text, '') || ':*')::tsquery, '')"];

/// As [`ALL_WORDS`], without a last word of one or two letters after others, as [`leaves_out_last_word`] checks.
pub(super) const INDEXED_WORDS: [&str; 2] = [
    "coalesce(regexp_replace(nullif(plainto_tsquery('simple', ",
    ")::text, '') || ':*', ' & ''[a-z0-9]{1,2}'':[*]$', '')::tsquery, '')",
];

/// As [`ALL_WORDS`], with the last word as a whole.
pub(super) const UNORDERED: [&str; 2] = ["plainto_tsquery('simple', ", ")"];

/// SQL before and after a text, for runs with its words in their order.
pub(super) const PHRASE: [&str; 2] = ["phraseto_tsquery('simple', ", ")"];

/// Returns true if the last of several words has only one or two letters. All words that begin with them are too many entries
/// of the index.
pub(super) fn leaves_out_last_word(text: &str) -> bool {
    let text = index_text(text);
    let mut words = text.split_whitespace().rev();
    words.next().is_some_and(|last| last.len() < MIN_INDEXED_BYTES) && words.next().is_some()
}

/// Appends a full-text query for each of the [`search_texts`] of a text, between `begin` and `end`, joined by "or".
pub(super) fn push_search(query: &mut QueryBuilder<Postgres>, text: &str, [begin, end]: [&'static str; 2]) {
    for (number, text) in search_texts(text).into_iter().enumerate() {
        query.push(if number == 0 { "(" } else { " || " }).push(begin).push_bind(text).push(end);
    }
    query.push(")");
}
