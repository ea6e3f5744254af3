//! Patterns of an answer's syntax, in which names, numbers and whitespace may vary.

/// Maximum length of the word in place of a placeholder.
const MAX_WORD: usize = 200;

/// A text with placeholders.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pattern(Vec<PatternPart>);

/// A part of a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PatternPart {
    /// Fixed text.
    Text(String),
    /// Whitespace. Parsers accept any amount; the grammar writes this text.
    Space(String),
    /// A word that differs from call to call.
    Placeholder(Placeholder),
}

/// A word that differs from call to call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placeholder {
    /// The function's name.
    Name,
    /// The call's id.
    Id,
    /// The call's number in the answer.
    Index,
    /// The name of an argument's type.
    TypeName,
    /// The name of an argument.
    Key,
}

/// The result of matching the start of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatternMatch {
    /// A match of this length in bytes.
    Whole(usize),
    /// The text is a prefix of a match and may become one.
    Partial,
    /// No match.
    No,
}

impl Placeholder {
    const ALL: [Self; 5] = [Self::Name, Self::Id, Self::Index, Self::TypeName, Self::Key];

    /// Returns the private-use character that represents the placeholder in a marked text.
    #[must_use]
    pub const fn mark(self) -> char {
        match self {
            Self::Name => '\u{f5a90}',
            Self::Id => '\u{f5a91}',
            Self::Index => '\u{f5a92}',
            Self::TypeName => '\u{f5a93}',
            Self::Key => '\u{f5a94}',
        }
    }

    fn from_mark(c: char) -> Option<Self> {
        Self::ALL.into_iter().find(|placeholder| placeholder.mark() == c)
    }
}

impl Pattern {
    /// Parses a text in which [`Placeholder::mark`] represents each placeholder.
    #[must_use]
    pub fn new(marked: &str) -> Self {
        let mut parts: Vec<PatternPart> = Vec::new();
        for c in marked.chars() {
            match (Placeholder::from_mark(c), c.is_whitespace(), parts.last_mut()) {
                (Some(placeholder), ..) => parts.push(PatternPart::Placeholder(placeholder)),
                (None, true, Some(PatternPart::Space(space))) => space.push(c),
                (None, true, _) => parts.push(PatternPart::Space(c.into())),
                (None, false, Some(PatternPart::Text(text))) => text.push(c),
                (None, false, _) => parts.push(PatternPart::Text(c.into())),
            }
        }
        Self(parts)
    }

    /// Returns its parts in order.
    #[must_use]
    pub fn parts(&self) -> &[PatternPart] {
        &self.0
    }

    /// Returns true if it consists only of whitespace.
    #[must_use]
    pub fn is_blank(&self) -> bool {
        self.0.iter().all(|part| matches!(part, PatternPart::Space(_)))
    }

    /// Returns the fixed text at its start, ignoring whitespace.
    #[must_use]
    pub fn marker(&self) -> Option<&str> {
        match self.0.iter().find(|part| !matches!(part, PatternPart::Space(_))) {
            Some(PatternPart::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns its fixed texts.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| if let PatternPart::Text(text) = part { Some(text.as_str()) } else { None })
    }

    /// Matches the start of a text with the whole pattern.
    #[must_use]
    pub fn match_whole(&self, text: &str) -> PatternMatch {
        self.compare(text).0
    }

    /// Matches like [`Self::match_whole`], and also returns the word in place of the last placeholder.
    #[must_use]
    pub fn match_with_word<'t>(&self, text: &'t str) -> (PatternMatch, Option<&'t str>) {
        let (result, word, _) = self.compare(text);
        (result, word)
    }

    /// Matches the start of a text with the pattern. If it does not match as a whole, matches the beginning of the
    /// pattern up to its last fixed text that matches.
    #[must_use]
    pub fn match_beginning(&self, text: &str) -> PatternMatch {
        match self.compare(text) {
            (PatternMatch::No, _, upto) if upto > 0 => PatternMatch::Whole(upto),
            (result, ..) => result,
        }
    }

    /// Returns the result, the word in place of the last placeholder, and the end of the last matched text.
    fn compare<'t>(&self, text: &'t str) -> (PatternMatch, Option<&'t str>, usize) {
        let (mut at, mut word, mut upto) = (0, None, 0);
        let last = self.0.iter().rposition(|part| !matches!(part, PatternPart::Space(_))).map_or(0, |last| last + 1);
        for part in &self.0[..last] {
            let rest = &text[at..];
            match part {
                PatternPart::Space(_) => at += rest.len() - rest.trim_start().len(),
                PatternPart::Text(expected) if rest.starts_with(expected.as_str()) => {
                    at += expected.len();
                    upto = at;
                }
                PatternPart::Text(expected) if expected.starts_with(rest) => {
                    return (PatternMatch::Partial, word, upto);
                }
                PatternPart::Text(_) => return (PatternMatch::No, word, upto),
                PatternPart::Placeholder(_) => {
                    let len = rest.bytes().position(|byte| !is_word_byte(byte)).unwrap_or(rest.len());
                    if len > MAX_WORD || (len == 0 && !rest.is_empty()) {
                        return (PatternMatch::No, word, upto);
                    }
                    if len == rest.len() {
                        return (PatternMatch::Partial, word, upto);
                    }
                    word = Some(&rest[..len]);
                    at += len;
                }
            }
        }
        (PatternMatch::Whole(at), word, upto)
    }
}

impl From<&str> for Pattern {
    fn from(marked: &str) -> Self {
        Self::new(marked)
    }
}

/// Matches the start of a text with a literal.
pub(super) fn match_literal(text: &str, literal: &str) -> PatternMatch {
    if text.starts_with(literal) {
        PatternMatch::Whole(literal.len())
    } else if literal.starts_with(text) {
        PatternMatch::Partial
    } else {
        PatternMatch::No
    }
}

fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.')
}

#[cfg(test)]
mod tests {
    use super::{Pattern, PatternMatch, Placeholder};

    #[test]
    fn pattern_matches_any_whitespace_and_any_word() {
        let pattern = Pattern::new(&format!(" <call>\n<id={}> ", Placeholder::Id.mark()));
        assert_eq!(pattern.match_whole("<call><id=a-1>x"), PatternMatch::Whole(14));
        assert_eq!(pattern.match_whole("<call> \n <id=b> x"), PatternMatch::Whole(15));
        for begun in ["", "<ca", "<call> ", "<call><id=ab"] {
            assert_eq!(pattern.match_whole(begun), PatternMatch::Partial, "{begun}");
        }
        for other in ["x", "<call>x", "<call><id=>", "<call><id=a b>"] {
            assert_eq!(pattern.match_whole(other), PatternMatch::No, "{other}");
        }
        assert_eq!(pattern.match_with_word("<call><id=ab>").1, Some("ab"));
        assert_eq!(pattern.match_beginning("<call> and"), PatternMatch::Whole(6));
        assert_eq!(pattern.marker(), Some("<call>"));
    }
}
