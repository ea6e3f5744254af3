//! Texts as the full-text index of runs contains them.

use super::text::clean;
use regex::Regex;
use std::sync::LazyLock;

/// NUL, which PostgreSQL cannot store, and non-ASCII characters that are not part of a word, with the marks on them. In the
/// locale C, PostgreSQL's parser takes every non-ASCII character as a letter.
static SEPARATORS: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"[\x00[^\x00-\x7F\p{Alphabetic}\p{N}\p{M}]]\p{M}*").expect("the expression is valid"));

/// Converts a text to lower case, which the database's locale may not support, and replaces punctuation by spaces, except for
/// decimal points. PostgreSQL's parser would drop tags, join the parts of addresses and paths, and take the minus of a date or
/// a hyphenated word for the sign of a number.
pub fn index_text(text: &str) -> String {
    let text = replace_non_ascii_punctuation(text);
    let bytes = text.as_bytes();
    let is_digit = |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_digit);
    let is_decimal_point = |at: usize, c: char| c == '.' && is_digit(at.checked_sub(1)) && is_digit(Some(at + 1));
    let replace = |(at, c): (usize, char)| if c.is_ascii_punctuation() && !is_decimal_point(at, c) { ' ' } else { c };
    text.char_indices().map(replace).collect()
}

/// Returns true if [`index_text`] splits a text into several words.
pub fn has_several_words(text: &str) -> bool {
    index_text(text).split_whitespace().nth(1).is_some()
}

/// Returns a searched text as [`index_text`], and as in the index of runs that earlier versions stored, if that differs.
pub fn search_texts(text: &str) -> Vec<String> {
    let mut texts = vec![index_text(text), replace_non_ascii_punctuation(text), clean(text).to_lowercase()];
    texts.dedup();
    texts
}

fn replace_non_ascii_punctuation(text: &str) -> String {
    SEPARATORS.replace_all(&text.to_lowercase(), " ").into_owned()
}

#[cfg(test)]
mod tests {
    use super::{has_several_words, index_text, search_texts};

    #[test]
    fn non_ascii_punctuation_becomes_a_space() {
        assert_eq!(index_text("She said “Hello there” — yes…"), "she said  hello there    yes ");
        assert_eq!(index_text("«Öl»、東京。❤\u{fe0f}Tag\0"), " öl  東京  tag ");
    }

    #[test]
    fn ascii_punctuation_becomes_a_space_except_for_decimal_points() {
        assert_eq!(index_text("<div class=\"a-b\">"), " div class  a b  ");
        assert_eq!(index_text("https://x.org/a_b?c=1#d"), "https   x org a b c 1 d");
        assert_eq!(index_text("-3.14, v1.2.3. .5 5. 2026-01-31"), " 3.14  v1.2.3   5 5  2026 01 31");
    }

    #[test]
    fn letters_digits_and_marks_remain() {
        for text in ["e\u{301}té नमस्ते สวัสดี", "x² ٣ ½ 1.5\n", "東京"] {
            assert_eq!(index_text(text), text);
        }
    }

    #[test]
    fn text_with_punctuation_is_searched_in_the_forms_of_all_versions() {
        assert_eq!(search_texts("Don’t"), ["don t", "don’t"]);
        assert_eq!(search_texts("Don't"), ["don t", "don't"]);
        assert_eq!(search_texts("“X.org”"), [" x org ", " x.org ", "“x.org”"]);
        assert_eq!(search_texts("Sky"), ["sky"]);
        assert!(has_several_words("Don’t") && !has_several_words("<Sky>") && !has_several_words("3.14"));
    }
}
