//! JSON that is kept as it was given: whether PostgreSQL can hold it, and how it is hashed.

use sha2::{Digest, Sha256};

/// Deepest nesting that is taken; `serde_json`'s own limit, far below where PostgreSQL's parser gives up.
const MOST_DEPTH: usize = 128;
/// Largest exponent of ten in a number; PostgreSQL's `numeric` ends at 131 072 digits.
const MOST_EXPONENT: u32 = 9_999;

/// What PostgreSQL could not hold in this syntactically valid JSON text, if anything: (expected, found).
pub fn problem(json: &str) -> Option<(String, String)> {
    let bytes = json.as_bytes();
    if harmless(bytes) { None } else { Scan { bytes, at: 0 }.run() }
}

/// A cheap necessary condition for a problem, in a form that compiles to vector code: most values end here.
fn harmless(bytes: &[u8]) -> bool {
    let opens = bytes.iter().filter(|&&byte| byte | 0x20 == b'{').count();
    let suspicious = bytes.iter().zip(bytes.iter().skip(1)).fold(false, |found, (&a, &b)| {
        found | ((a == b'\\') & (b == b'u')) | ((a == b'.' || a.is_ascii_digit()) & (b | 0x20 == b'e'))
    });
    opens <= MOST_DEPTH && !suspicious
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
                    if depth > MOST_DEPTH {
                        return Some((format!("at most {MOST_DEPTH} nested levels"), "more".into()));
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
                    if exponent.parse::<u32>().is_ok_and(|n| n > MOST_EXPONENT) || exponent.len() > 9 {
                        let limit = format!("numbers with exponents up to {MOST_EXPONENT}");
                        return Some((limit, format!("the exponent {exponent}")));
                    }
                }
                _ => {}
            }
        }
        None
    }

    /// Reads to the end of the string whose opening quote was just read.
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
                                return Some(lone(unit));
                            }
                            self.at += 6;
                        }
                        0xdc00..=0xdfff => return Some(lone(unit)),
                        _ => {}
                    }
                }
                b'\\' => self.at += 1,
                _ => {}
            }
        }
        None
    }

    /// The four hexadecimal digits at `at`.
    fn unit(&self, at: usize) -> u32 {
        let digits = self.bytes.get(at..at + 4).unwrap_or_default();
        digits.iter().fold(0, |unit, &digit| unit * 16 + (digit as char).to_digit(16).unwrap_or(0))
    }
}

fn lone(unit: u32) -> (String, String) {
    ("complete UTF-16 surrogate pairs".into(), format!("a lone \\u{unit:04x}"))
}

/// Hashes a JSON text without the white space between its tokens, so that reformatting does not change the hash.
pub fn hash(hasher: &mut Sha256, json: &str) {
    let bytes = json.as_bytes();
    let (mut from, mut in_string, mut escaped) = (0, false, false);
    for (at, &byte) in bytes.iter().enumerate() {
        if in_string {
            (in_string, escaped) = (escaped || byte != b'"', !escaped && byte == b'\\');
        } else if byte == b'"' {
            in_string = true;
        } else if matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
            hasher.update(&bytes[from..at]);
            from = at + 1;
        }
    }
    hasher.update(&bytes[from..]);
    hasher.update([0]);
}

#[cfg(test)]
mod tests {
    use super::problem;

    #[test]
    fn what_postgresql_cannot_hold() {
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
            let (message, _) = problem(json).unwrap_or_else(|| panic!("{json}"));
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
            assert_eq!(problem(json), None, "{json}");
        }
    }
}
