//! Texts as the full-text index of runs contains them.

use super::text::clean;
use regex::Regex;
use std::sync::LazyLock;

/// NUL, which PostgreSQL cannot store, and non-ASCII characters that are not part of a word, with the marks on them. In the
/// locale C, PostgreSQL's parser takes every non-ASCII character as a letter.
static SEPARATORS: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"[\x00[^\x00-\x7F\p{Alphabetic}\p{N}\p{M}]]\p{M}*").expect("the expression is valid"));

/// Converts a text to lower case, which the database's locale may not support, and replaces non-ASCII punctuation by spaces.
pub fn index_text(text: &str) -> String {
    SEPARATORS.replace_all(&text.to_lowercase(), " ").into_owned()
}

/// Returns a searched text as [`index_text`], and as in the index of runs that an earlier version stored, if that differs.
pub fn search_texts(text: &str) -> Vec<String> {
    let mut texts = vec![index_text(text), clean(text).to_lowercase()];
    texts.dedup();
    texts
}

#[cfg(test)]
mod tests {
    use super::{index_text, search_texts};

    #[test]
    fn non_ascii_punctuation_becomes_a_space() {
        assert_eq!(index_text("She said “Hello there” — yes…"), "she said  hello there    yes ");
        assert_eq!(index_text("«Öl»、東京。❤\u{fe0f}Tag\0"), " öl  東京  tag ");
    }

    #[test]
    fn letters_digits_marks_and_ascii_remain() {
        for text in ["e\u{301}té नमस्ते สวัสดี", "x² ٣ ½ {\"a_b\": -1.5}\n", "東京"] {
            assert_eq!(index_text(text), text);
        }
    }

    #[test]
    fn text_with_non_ascii_punctuation_is_searched_in_both_forms() {
        assert_eq!(search_texts("Don’t"), ["don t", "don’t"]);
        assert_eq!(search_texts("Don't"), ["don't"]);
    }
}
