//! JSON that is kept unchanged: checks for PostgreSQL's limits, and a canonical form for comparison.

/// Maximum nesting, similar to `serde_json`'s limit and far below that of PostgreSQL's parser.
const MAX_DEPTH: usize = 128;
/// Maximum exponent of a number; PostgreSQL's `numeric` ends at 131 072 digits.
const MAX_EXPONENT: u32 = 9_999;

/// Finds a value in valid JSON text that PostgreSQL cannot store. Returns (expected, found).
pub fn find_problem(json: &str) -> Option<(String, String)> {
    let bytes = json.as_bytes();
    if passes_quick_check(bytes) { None } else { Scan { bytes, at: 0 }.run() }
}

/// Returns true if PostgreSQL can certainly store the text, which holds for most values. The loop compiles to vector
/// code.
fn passes_quick_check(bytes: &[u8]) -> bool {
    let opens = bytes.iter().filter(|&&byte| byte | 0x20 == b'{').count();
    let suspicious = bytes.iter().zip(bytes.iter().skip(1)).fold(0_u8, |found, (&a, &b)| {
        let escape = u8::from(a == b'\\') & u8::from(b == b'u');
        let exponent = (u8::from(a == b'.') | u8::from(a.is_ascii_digit())) & u8::from(b | 0x20 == b'e');
        found | escape | exponent
    });
    opens <= MAX_DEPTH && suspicious == 0
}

/// Replaces every NUL character of the JSON text with `replacement`, an escape sequence, and counts them.
pub fn replace_nul(json: &str, replacement: &str) -> (String, u32) {
    const NUL: &str = r"\u0000";
    let mut out = String::with_capacity(json.len());
    let (mut rest, mut count) = (json, 0);
    // JSON has backslashes only inside strings. Each escape is skipped as a whole, so that the second half of an
    // escaped backslash does not count as the start of an escape.
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        out.push_str(before);
        if let Some(after) = escape.strip_prefix(NUL) {
            out.push_str(replacement);
            count += 1;
            rest = after;
        } else {
            let next = 1 + escape[1..].chars().next().map_or(0, char::len_utf8);
            out.push_str(&escape[..next]);
            rest = &escape[next..];
        }
    }
    out.push_str(rest);
    (out, count)
}

struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Scan<'_> {
    fn run(mut self) -> Option<(String, String)> {
        let mut depth = 0;
        while let Some(&byte) = self.bytes.get(self.at) {
            self.at += 1;
            match byte {
                b'{' | b'[' => {
                    depth += 1;
                    if depth > MAX_DEPTH {
                        return Some((format!("up to {MAX_DEPTH} nested levels"), "more".into()));
                    }
                }
                b'}' | b']' => depth -= 1,
                b'"' => {
                    if let Some(problem) = self.string() {
                        return Some(problem);
                    }
                }
                b'e' | b'E' if self.bytes[..self.at - 1].last().is_some_and(|&b| b == b'.' || b.is_ascii_digit()) => {
                    let exponent: String = self.bytes[self.at..]
                        .iter()
                        .skip_while(|byte| matches!(byte, b'+' | b'-'))
                        .take_while(|byte| byte.is_ascii_digit())
                        .map(|&byte| byte as char)
                        .collect();
                    if exponent.parse::<u32>().is_ok_and(|n| n > MAX_EXPONENT) || exponent.len() > 9 {
                        let limit = format!("numbers with exponents up to {MAX_EXPONENT}");
                        return Some((limit, format!("the exponent {exponent}")));
                    }
                }
                _ => {}
            }
        }
        None
    }

    /// Reads to the end of the string after its opening quote.
    fn string(&mut self) -> Option<(String, String)> {
        while let Some(&byte) = self.bytes.get(self.at) {
            self.at += 1;
            match byte {
                b'"' => return None,
                b'\\' if self.bytes.get(self.at) == Some(&b'u') => {
                    let unit = self.unit(self.at + 1);
                    self.at += 5;
                    match unit {
                        0 => return Some(("text without NUL characters".into(), "\\u0000".into())),
                        0xd800..=0xdbff => {
                            let follows = self.bytes.get(self.at..self.at + 2) == Some(br"\u");
                            if !follows || !(0xdc00..=0xdfff).contains(&self.unit(self.at + 2)) {
                                return Some(lone_surrogate(unit));
                            }
                            self.at += 6;
                        }
                        0xdc00..=0xdfff => return Some(lone_surrogate(unit)),
                        _ => {}
                    }
                }
                b'\\' => self.at += 1,
                _ => {}
            }
        }
        None
    }

    /// Parses the four hexadecimal digits at `at`.
    fn unit(&self, at: usize) -> u32 {
        let digits = self.bytes.get(at..at + 4).unwrap_or_default();
        digits.iter().fold(0, |unit, &digit| unit * 16 + (digit as char).to_digit(16).unwrap_or(0))
    }
}

fn lone_surrogate(unit: u32) -> (String, String) {
    ("complete UTF-16 surrogate pairs".into(), format!("a lone \\u{unit:04x}"))
}

/// Appends a form of the JSON text that is independent of white space, number notation and escaping. The order of keys
/// is kept.
pub fn canonical(json: &str, out: &mut Vec<u8>) {
    let bytes = json.as_bytes();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let from = at;
        at += 1;
        match byte {
            b' ' | b'\n' | b'\r' | b'\t' => {}
            b'"' => {
                let mut escapes = false;
                while let Some(&byte) = bytes.get(at).filter(|&&byte| byte != b'"') {
                    escapes |= byte == b'\\';
                    at += if byte == b'\\' { 2 } else { 1 };
                }
                let text = &bytes[from + 1..at.min(bytes.len())];
                at += 1;
                let quoted = &bytes[from..at.min(bytes.len())];
                let unescaped = escapes.then(|| serde_json::from_slice::<String>(quoted).ok()).flatten();
                let text = unescaped.as_ref().map_or(text, |unescaped| unescaped.as_bytes());
                // The length prefix distinguishes one string from two.
                out.push(b'"');
                out.extend((text.len() as u64).to_le_bytes());
                out.extend(text);
            }
            b'-' | b'0'..=b'9' => {
                let more = |&byte: &u8| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-');
                at += bytes[at..].iter().take_while(|&byte| more(byte)).count();
                number(&json[from..at], out);
            }
            _ => out.push(byte),
        }
    }
}

fn number(digits: &str, out: &mut Vec<u8>) {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let float = digits.bytes().any(|byte| matches!(byte, b'.' | b'e' | b'E')).then(|| digits.parse::<f64>().ok());
    // Numbers beyond the range of a double are compared by their digits.
    match float.flatten().filter(|float| float.is_finite()) {
        Some(float) if float.fract() == 0.0 && float.abs() < EXACT => {
            out.extend((float as i64).to_string().as_bytes());
        }
        Some(float) => {
            out.push(b'#');
            out.extend(float.to_le_bytes());
        }
        None => out.extend(digits.as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::{canonical, find_problem};

    #[test]
    fn canonical_form_ignores_notation() {
        let canonical_bytes = |json: &str| {
            let mut out = Vec::new();
            canonical(json, &mut out);
            out
        };
        assert_eq!(
            canonical_bytes(r#"{"a" : [1.50, 2.0, "\u00e9\"", -0.1e1]}"#),
            canonical_bytes(r#"{"a":[1.5,2,"é\"",-1]}"#)
        );
        assert_eq!(canonical_bytes("9007199254740993"), canonical_bytes("9007199254740993"));
        for (a, b) in [
            ("9007199254740993", "9007199254740992"),
            (r#"["a","b"]"#, r#"["a\",\"b"]"#),
            ("[1,2]", "[12]"),
            (r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#),
            ("1.5", "1.25"),
            ("1", r#""1""#),
            ("1e400", "2e400"),
        ] {
            assert_ne!(canonical_bytes(a), canonical_bytes(b), "{a} {b}");
        }
    }

    #[test]
    fn find_problem_reports_values_postgresql_rejects() {
        for (json, expected) in [
            (r#"{"a":"\u0000"}"#, "NUL"),
            (r#"{"\u0000":1}"#, "NUL"),
            (r#"["\\\u0000"]"#, "NUL"),
            (r#"["\ud800"]"#, "surrogate"),
            (r#"["\ud800\u0041"]"#, "surrogate"),
            (r#"["\udc00"]"#, "surrogate"),
            ("[1e10000]", "exponents"),
            ("[1E+99999999999]", "exponents"),
            (&format!("{}{}", "[".repeat(129), "]".repeat(129)), "nested"),
        ] {
            let (message, _) = find_problem(json).unwrap_or_else(|| panic!("{json}"));
            assert!(message.contains(expected), "{json}: {message}");
        }
        for json in [
            r#"["\\u0000"]"#,
            r#"["\ud83d\ude00"]"#,
            r#"["1e10000"]"#,
            "[1e-300]",
            r#""\"[[[[""#,
            &format!("[{}]", vec!["{}"; 500].join(",")),
        ] {
            assert_eq!(find_problem(json), None, "{json}");
        }
    }
}
