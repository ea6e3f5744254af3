//! Text with NUL characters, which a model can generate and which PostgreSQL cannot store.

use crate::trace::document::replace_nul;
use std::borrow::Cow;

/// Replaces NUL with `U+2400`.
pub fn clean(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { Cow::Owned(text.replace('\0', "\u{2400}")) } else { Cow::Borrowed(text) }
}

/// Replaces NUL in the strings of a JSON text with `U+2400`.
pub fn clean_json(json: &str) -> String {
    replace_nul(json, r"\u2400").0
}

#[cfg(test)]
mod tests {
    use super::clean_json;

    #[test]
    fn escaped_backslash_before_u0000_is_kept() {
        let json = serde_json::json!({"literal": "\\u0000", "nul": "a\0\\\0", "key\0": 1}).to_string();
        assert_eq!(clean_json(&json), r#"{"literal":"\\u0000","nul":"a\u2400\\\u2400","key\u2400":1}"#);
    }
}
