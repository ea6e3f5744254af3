//! Masking of control tokens in the text of a conversation.
//!
//! `<|im_end|>` in a user's message must stay text. A mark is inserted into every such literal, and the conversation is
//! rendered again. In the result, literals without a mark come from the template, and literals with a mark are text.

use crate::events::TokenId;
use crate::model::Vocabulary;
use serde_json::{Map, Value};

/// A private-use character that is inserted into masked text.
pub(super) const MARK: char = '\u{f5a8c}';

/// Marks the literals of control tokens in every string of a value, except those in `exempt`. Returns true if it marked
/// any.
pub(super) fn mask(value: &mut Value, vocabulary: &Vocabulary, exempt: &[&str]) -> bool {
    match value {
        Value::String(text) => match masked(text, vocabulary, exempt) {
            Some(masked) => {
                *text = masked;
                true
            }
            None => false,
        },
        Value::Array(values) => values.iter_mut().fold(false, |any, value| mask(value, vocabulary, exempt) | any),
        Value::Object(fields) => {
            let mut any = fields.iter_mut().fold(false, |any, (name, value)| {
                // Roles stay unchanged, because templates compare them.
                (name != "role" && mask(value, vocabulary, exempt)) | any
            });
            if fields.keys().any(|name| masked(name, vocabulary, exempt).is_some()) {
                any = true;
                let renamed =
                    |(name, value): (String, Value)| (masked(&name, vocabulary, exempt).unwrap_or(name), value);
                *fields = std::mem::take(fields).into_iter().map(renamed).collect::<Map<_, _>>();
            }
            any
        }
        _ => false,
    }
}

/// Returns the text with a mark in every control token's literal; `None` if the text has no such literal.
pub(super) fn masked(text: &str, vocabulary: &Vocabulary, exempt: &[&str]) -> Option<String> {
    let mut result = String::new();
    let mut copied = 0;
    for found in vocabulary.control_literals(text) {
        if exempt.iter().any(|exempt| text[found.start..].starts_with(exempt)) {
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

/// Tokenizes a masked text: only unmarked literals become control tokens.
pub(super) fn tokenize(text: &str, vocabulary: &Vocabulary) -> Vec<TokenId> {
    let (mut tokens, after) = surrounding_tokens(vocabulary);
    tokens.extend(tokenize_part(text, vocabulary));
    tokens.extend(after);
    tokens
}

/// Returns the tokens that the tokenizer adds before and after every text.
pub(super) fn surrounding_tokens(vocabulary: &Vocabulary) -> (Vec<TokenId>, Vec<TokenId>) {
    let mut before = vocabulary.encode_prompt("");
    let bos = usize::from(vocabulary.special().bos.is_some_and(|bos| before.first() == Some(&bos)));
    let after = before.split_off(bos);
    (before, after)
}

/// Tokenizes a part of a masked text, without tokens before and after it.
pub(super) fn tokenize_part(text: &str, vocabulary: &Vocabulary) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(found) = text[at..].find(MARK) {
        let mark = at + found;
        // The tokenizer splits the text at control tokens anyway.
        let start = vocabulary.control_literals(&text[at..mark]).last().map_or(at, |last| at + last.end);
        let end = vocabulary.control_literals(&text[mark..]).next().map_or(text.len(), |next| mark + next.start);
        tokens.extend(vocabulary.encode_markup(&text[at..start]));
        tokens.extend(vocabulary.encode_plain(&unmasked(&text[start..end])));
        at = end;
    }
    tokens.extend(vocabulary.encode_markup(&text[at..]));
    tokens
}
