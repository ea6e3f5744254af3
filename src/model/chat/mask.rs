//! Keeps control tokens in the text of a conversation from being read as control tokens.
//!
//! A user who writes `<|im_end|>` means the letters. Before the conversation is rendered once more, a mark is put into
//! every such text; in the result, what is still whole is the template's, and what has a mark is not.

use crate::events::TokenId;
use crate::model::Vocabulary;
use serde_json::{Map, Value};

/// A private-use character that stands within a masked text.
pub(super) const MARK: char = '\u{f5a8c}';

/// Marks the literals of control tokens in every text of a value, those in `spared` excepted. Returns whether there
/// were any.
pub(super) fn mask(value: &mut Value, vocabulary: &Vocabulary, spared: &[&str]) -> bool {
    match value {
        Value::String(text) => match masked(text, vocabulary, spared) {
            Some(masked) => {
                *text = masked;
                true
            }
            None => false,
        },
        Value::Array(values) => values.iter_mut().fold(false, |any, value| mask(value, vocabulary, spared) | any),
        Value::Object(fields) => {
            let mut any = fields.iter_mut().fold(false, |any, (name, value)| {
                // The template compares roles.
                (name != "role" && mask(value, vocabulary, spared)) | any
            });
            if fields.keys().any(|name| masked(name, vocabulary, spared).is_some()) {
                any = true;
                let renamed =
                    |(name, value): (String, Value)| (masked(&name, vocabulary, spared).unwrap_or(name), value);
                *fields = std::mem::take(fields).into_iter().map(renamed).collect::<Map<_, _>>();
            }
            any
        }
        _ => false,
    }
}

/// Returns the text with a mark in every control token's literal; `None` where there is none.
pub(super) fn masked(text: &str, vocabulary: &Vocabulary, spared: &[&str]) -> Option<String> {
    let mut result = String::new();
    let mut copied = 0;
    for found in vocabulary.control_literals(text) {
        if spared.iter().any(|spared| text[found.start..].starts_with(spared)) {
            continue;
        }
        let first = text[found.start..].chars().next().map_or(0, char::len_utf8);
        let cut = found.start + first;
        if cut > copied {
            result.push_str(&text[copied..cut]);
            result.push(MARK);
            copied = cut;
        }
    }
    if copied == 0 {
        return None;
    }
    result.push_str(&text[copied..]);
    Some(result)
}

/// Returns the text without marks.
pub(super) fn unmasked(text: &str) -> String {
    text.replace(MARK, "")
}

/// Returns the tokens of a masked text: control tokens where their literals are whole, and nowhere else.
pub(super) fn tokenize(text: &str, vocabulary: &Vocabulary) -> Vec<TokenId> {
    // The tokenizer itself says what comes before and after every text.
    let around = vocabulary.encode("", true, true);
    let bos = usize::from(vocabulary.special().bos.is_some_and(|bos| around.first() == Some(&bos)));
    let mut tokens = around[..bos].to_vec();
    let mut at = 0;
    while let Some(found) = text[at..].find(MARK) {
        let mark = at + found;
        // Between two control tokens, a text is tokenized on its own anyway.
        let start = vocabulary.control_literals(&text[at..mark]).last().map_or(at, |last| at + last.end);
        let end = vocabulary.control_literals(&text[mark..]).next().map_or(text.len(), |next| mark + next.start);
        tokens.extend(vocabulary.encode(&text[at..start], false, true));
        tokens.extend(vocabulary.encode(&unmasked(&text[start..end]), false, false));
        at = end;
    }
    tokens.extend(vocabulary.encode(&text[at..], false, true));
    tokens.extend(&around[bos..]);
    tokens
}
