//! Incremental JSON scanner: for each byte, it returns the effect on the members of the outermost object, or an error
//! if the text cannot become valid JSON.

/// Maximum nesting, equal to `serde_json`'s.
const MAX_DEPTH: usize = 127;
/// Maximum length of a number or word.
const MAX_WORD: usize = 400;

/// The text is not valid JSON from this byte on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotJson;

/// The effect of a byte on the outermost object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByteEffect {
    /// No effect on its members.
    Inside,
    /// The byte starts a key.
    KeyBegin,
    /// The byte ends a key.
    KeyEnd,
    /// The byte starts a member's value.
    ValueBegin,
    /// The byte is the last of a member's value.
    ValueEnd,
    /// The byte follows a member's value.
    AfterValue,
    /// The byte ends the object, and a number or word directly before it.
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expectation {
    Value,
    ValueOrEnd,
    KeyOrEnd,
    Key,
    Colon,
    CommaOrEnd,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    None,
    String {
        key: bool,
    },
    Escape {
        key: bool,
    },
    /// `\u`, with `left` hexadecimal digits still missing.
    UnicodeEscape {
        key: bool,
        left: u8,
    },
    Word(Vec<u8>),
}

/// A scanner of one value, byte by byte.
#[derive(Debug, Clone)]
pub(super) struct Scanner {
    /// The open containers, outermost first: true for an object, false for a list.
    open: Vec<bool>,
    expect: Expectation,
    token: Token,
}

impl Scanner {
    pub(super) fn new() -> Self {
        Self { open: Vec::new(), expect: Expectation::Value, token: Token::None }
    }

    /// Processes the next byte. Returns its effect.
    pub(super) fn push(&mut self, byte: u8) -> Result<ByteEffect, NotJson> {
        match &mut self.token {
            Token::String { key } => {
                let key = *key;
                match byte {
                    b'"' if key => {
                        self.token = Token::None;
                        self.expect = Expectation::Colon;
                        Ok(if self.open.len() == 1 { ByteEffect::KeyEnd } else { ByteEffect::Inside })
                    }
                    b'"' => {
                        self.token = Token::None;
                        Ok(self.end_value())
                    }
                    b'\\' => {
                        self.token = Token::Escape { key };
                        Ok(ByteEffect::Inside)
                    }
                    0..0x20 => Err(NotJson),
                    _ => Ok(ByteEffect::Inside),
                }
            }
            Token::Escape { key } => {
                let key = *key;
                self.token = match byte {
                    b'u' => Token::UnicodeEscape { key, left: 4 },
                    b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Token::String { key },
                    _ => return Err(NotJson),
                };
                Ok(ByteEffect::Inside)
            }
            Token::UnicodeEscape { key, left } => {
                if !byte.is_ascii_hexdigit() {
                    return Err(NotJson);
                }
                self.token = if *left == 1 {
                    Token::String { key: *key }
                } else {
                    Token::UnicodeEscape { key: *key, left: *left - 1 }
                };
                Ok(ByteEffect::Inside)
            }
            Token::Word(word) => {
                if byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.') {
                    word.push(byte);
                    return if word.len() > MAX_WORD { Err(NotJson) } else { Ok(ByteEffect::Inside) };
                }
                serde_json::from_slice::<serde_json::Value>(word).map_err(|_| NotJson)?;
                self.token = Token::None;
                self.end_value();
                let after = if self.open.len() == 1 { ByteEffect::AfterValue } else { ByteEffect::Inside };
                match self.push_between_tokens(byte)? {
                    ByteEffect::Inside => Ok(after),
                    other => Ok(other),
                }
            }
            Token::None => self.push_between_tokens(byte),
        }
    }

    fn push_between_tokens(&mut self, byte: u8) -> Result<ByteEffect, NotJson> {
        let top = self.open.len() == 1;
        match (byte, self.expect) {
            (b' ' | b'\t' | b'\n' | b'\r', _) => Ok(ByteEffect::Inside),
            (b'}', Expectation::KeyOrEnd | Expectation::CommaOrEnd) => self.close(true),
            (b']', Expectation::ValueOrEnd | Expectation::CommaOrEnd) => self.close(false),
            (b'"', Expectation::Key | Expectation::KeyOrEnd) => {
                self.token = Token::String { key: true };
                Ok(if top { ByteEffect::KeyBegin } else { ByteEffect::Inside })
            }
            (b':', Expectation::Colon) => {
                self.expect = Expectation::Value;
                Ok(ByteEffect::Inside)
            }
            (b',', Expectation::CommaOrEnd) => {
                self.expect = if self.open.last() == Some(&true) { Expectation::Key } else { Expectation::Value };
                Ok(ByteEffect::Inside)
            }
            (_, Expectation::Value | Expectation::ValueOrEnd) => {
                match byte {
                    b'{' | b'[' => {
                        if self.open.len() >= MAX_DEPTH {
                            return Err(NotJson);
                        }
                        self.open.push(byte == b'{');
                        self.expect = if byte == b'{' { Expectation::KeyOrEnd } else { Expectation::ValueOrEnd };
                    }
                    b'"' => self.token = Token::String { key: false },
                    b'-' | b'0'..=b'9' | b't' | b'f' | b'n' => self.token = Token::Word(vec![byte]),
                    _ => return Err(NotJson),
                }
                Ok(if top { ByteEffect::ValueBegin } else { ByteEffect::Inside })
            }
            _ => Err(NotJson),
        }
    }

    fn close(&mut self, object: bool) -> Result<ByteEffect, NotJson> {
        if self.open.pop() != Some(object) {
            return Err(NotJson);
        }
        Ok(if self.open.is_empty() { ByteEffect::End } else { self.end_value() })
    }

    fn end_value(&mut self) -> ByteEffect {
        self.expect = Expectation::CommaOrEnd;
        if self.open.len() == 1 { ByteEffect::ValueEnd } else { ByteEffect::Inside }
    }
}

#[cfg(test)]
mod tests {
    use super::{ByteEffect, Scanner};
    use proptest::prelude::*;
    use serde_json::Value;

    fn end(text: &str) -> Option<usize> {
        let mut scanner = Scanner::new();
        for (at, byte) in text.bytes().enumerate() {
            if scanner.push(byte).ok()? == ByteEffect::End {
                return Some(at + 1);
            }
        }
        None
    }

    #[test]
    fn end_of_an_object_is_found() {
        for text in [r"{}", r#"{"a":1}"#, r#"{"a": [1, {"b": "}\"\u00e9"}], "c": -1.5e3 , "d": null}"#] {
            assert_eq!(end(&format!("{text} rest")), Some(text.len()), "{text}");
        }
        for text in
            ["{,}", "{\"a\"}", "{\"a\":}", "{\"a\":tru}", "{\"a\":\"\n\"}", "{\"a\":01}", "{]", "{\"a\":\"\\x\"}"]
        {
            assert_eq!(end(text), None, "{text}");
        }
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map(".{0,4}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// The scanner finds the end of every value that serde_json writes, and no end in text that serde_json rejects.
        #[test]
        fn scanner_agrees_with_serde_json(value in value(), pretty: bool, noise in "[{}\\[\\]\",:0-9a-z \\\\]{0,24}") {
            let object = serde_json::json!({ "v": value });
            let text = if pretty { serde_json::to_string_pretty(&object).unwrap() } else { object.to_string() };
            prop_assert_eq!(end(&text), Some(text.len()));
            let noise = format!("{{{noise}");
            if let Some(end) = end(&noise) {
                prop_assert!(serde_json::from_str::<Value>(&noise[..end]).is_ok(), "{}", noise);
            }
        }
    }
}
