//! Values written as JSON, as Python literals, or with keys and strings in other quotes.

use serde_json::{Map, Value};

/// Maximum nesting, equal to `serde_json`'s.
const MAX_DEPTH: usize = 127;

/// Parses a whole text as JSON, or as a Python literal other than a string.
pub(super) fn parse(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok().or_else(|| parse_quoted(text, "").filter(|value| !value.is_string()))
}

/// Parses a whole text as a value whose strings may be enclosed in `quote`.
pub(super) fn parse_quoted(text: &str, quote: &str) -> Option<Value> {
    let mut parser = LiteralParser { text, at: 0, quote };
    let value = parser.value(0)?;
    parser.skip();
    (parser.at == text.len()).then_some(value)
}

/// Parses a key and the delimiter `end` at the start of a text. Returns the key and the offset after the delimiter.
pub(super) fn parse_key(text: &str, quote: &str, end: char) -> Option<(String, usize)> {
    let mut parser = LiteralParser { text, at: 0, quote };
    let key = parser.key(end)?;
    Some((key, parser.at))
}

struct LiteralParser<'t> {
    text: &'t str,
    at: usize,
    quote: &'t str,
}

impl<'t> LiteralParser<'t> {
    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn skip(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn take(&mut self, literal: &str) -> bool {
        let found = !literal.is_empty() && self.rest().starts_with(literal);
        if found {
            self.at += literal.len();
        }
        found
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.skip();
        if let Some(text) = self.string() {
            return text.map(Value::from);
        }
        if self.take("{") {
            return self.object(depth);
        }
        for (open, close) in [("[", "]"), ("(", ")")] {
            if self.take(open) {
                return self.list(close, depth);
            }
        }
        let len = self.rest().find(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '+' | '-' | '.' | '_'));
        let word = &self.rest()[..len.unwrap_or(self.rest().len())];
        self.at += word.len();
        match word {
            "" => None,
            "True" => Some(true.into()),
            "False" => Some(false.into()),
            "None" => Some(Value::Null),
            word => serde_json::from_str(word).ok(),
        }
    }

    fn object(&mut self, depth: usize) -> Option<Value> {
        let mut members = Map::new();
        loop {
            self.skip();
            if self.take("}") {
                return Some(Value::Object(members));
            }
            let key = self.key(':')?;
            let value = self.value(depth + 1)?;
            members.insert(key, value);
            self.skip();
            if !self.take(",") && !self.rest().starts_with('}') {
                return None;
            }
        }
    }

    fn list(&mut self, close: &str, depth: usize) -> Option<Value> {
        let mut items = Vec::new();
        loop {
            self.skip();
            if self.take(close) {
                return Some(Value::Array(items));
            }
            items.push(self.value(depth + 1)?);
            self.skip();
            if !self.take(",") && !self.rest().starts_with(close) {
                return None;
            }
        }
    }

    /// Parses a key and the character after it.
    fn key(&mut self, end: char) -> Option<String> {
        self.skip();
        let key = if let Some(text) = self.string() {
            text?
        } else {
            let len = self.rest().find(end)?;
            let key = self.rest()[..len].trim();
            self.at += len;
            key.to_owned()
        };
        self.skip();
        let ended = self.rest().starts_with(end);
        self.at += if ended { end.len_utf8() } else { 0 };
        (ended && !key.is_empty()).then_some(key)
    }

    /// Parses a string if one starts here; `Some(None)` if it does not end.
    #[expect(clippy::option_option, reason = "a missing string differs from an incomplete one")]
    fn string(&mut self) -> Option<Option<String>> {
        if self.take(self.quote) {
            let Some(len) = self.rest().find(self.quote) else { return Some(None) };
            let text = self.rest()[..len].to_owned();
            self.at += len + self.quote.len();
            return Some(Some(text));
        }
        let quote = self.rest().chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let mut text = String::new();
        let mut chars = self.rest().char_indices().skip(1).peekable();
        while let Some((at, c)) = chars.next() {
            match c {
                c if c == quote => {
                    self.at += at + 1;
                    return Some(Some(text));
                }
                '\\' => match chars.next().map(|(_, c)| c) {
                    Some('n') => text.push('\n'),
                    Some('t') => text.push('\t'),
                    Some('r') => text.push('\r'),
                    Some('b') => text.push('\u{8}'),
                    Some('f') => text.push('\u{c}'),
                    Some(kind @ ('u' | 'x')) => {
                        let len = if kind == 'u' { 4 } else { 2 };
                        let code: String = chars.by_ref().take(len).map(|(_, c)| c).collect();
                        let mut units = u16::from_str_radix(&code, 16).ok().into_iter().collect::<Vec<_>>();
                        if (0xd800..0xdc00).contains(units.first()?) {
                            let pair: String = chars.by_ref().take(6).map(|(_, c)| c).collect();
                            units.extend(pair.strip_prefix("\\u").and_then(|low| u16::from_str_radix(low, 16).ok()));
                        }
                        match String::from_utf16(&units) {
                            Ok(decoded) => text.push_str(&decoded),
                            Err(_) => return Some(None),
                        }
                    }
                    Some(other @ ('"' | '\'' | '\\' | '/')) => text.push(other),
                    Some(other) => text.extend(['\\', other]),
                    None => return Some(None),
                },
                c => text.push(c),
            }
        }
        Some(None)
    }
}

#[cfg(test)]
mod tests {
    use super::{parse, parse_quoted};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn python_literals_are_parsed() {
        for (text, value) in [
            (
                "{'k': True, \"l\": [None, -1.5], 'm': (1, 'it\\'s')}",
                json!({"k": true, "l": [null, -1.5], "m": [1, "it's"]}),
            ),
            ("'\\u00e9\\n\\ud83d\\ude00'", json!("é\n😀")),
            ("False", json!(false)),
        ] {
            assert_eq!(parse_quoted(text, ""), Some(value), "{text}");
        }
        for text in ["", "{'k'}", "[1", "'a", "nan", "{'k': 1} x", "1 2", "'\\ud83d'"] {
            assert_eq!(parse_quoted(text, ""), None, "{text}");
        }
        assert_eq!((parse("True"), parse("'a'"), parse("\"a\"")), (Some(json!(true)), None, Some(json!("a"))));
        let gemma = "{city:<|\"|>it's {x}<|\"|>,n:[<|\"|>a<|\"|>,1],<|\"|>k<|\"|>:true}";
        assert_eq!(parse_quoted(gemma, "<|\"|>"), Some(json!({"city": "it's {x}", "n": ["a", 1], "k": true})));
    }

    proptest! {
        #[test]
        fn hostile_text_does_not_panic(text in "[\\[{(\"'\\\\udx0-9,:a \\]})é]{0,60}") {
            let _ = parse(&text);
            let _ = parse_quoted(&text, "<|\"|>");
        }

        #[test]
        fn json_parses_to_the_same_value(text in any::<String>()) {
            prop_assert_eq!(parse_quoted(&json!([text]).to_string(), ""), Some(Value::from(vec![text])));
        }
    }
}
