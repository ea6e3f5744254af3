//! Reading of a grammar's text character by character, with the line and column for errors.

use super::super::GrammarError;

/// A position in a grammar's text.
pub(super) struct Cursor {
    chars: Vec<char>,
    /// Index of the next character.
    index: usize,
    line: usize,
    column: usize,
}

impl Cursor {
    pub(super) fn new(source: &str) -> Self {
        Self { chars: source.chars().collect(), index: 0, line: 1, column: 1 }
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Returns the line and the column of the next character, counted from 1.
    pub(super) fn position(&self) -> (usize, usize) {
        (self.line, self.column)
    }

    /// Returns the text from the character with index `start` up to the cursor.
    pub(super) fn text_since(&self, start: usize) -> String {
        self.chars[start..self.index].iter().collect()
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.chars.get(self.index).copied()
    }

    pub(super) fn peek_second(&self) -> Option<char> {
        self.chars.get(self.index + 1).copied()
    }

    pub(super) fn number(&mut self) -> Result<u32, GrammarError> {
        let start = self.index;
        while self.peek().is_some_and(|next| next.is_ascii_digit()) {
            self.advance();
        }
        if start == self.index {
            return Err(self.syntax_error("expected a number, as in {2}, {2,} or {2,5}"));
        }
        Ok(self.text_since(start).parse().unwrap_or(u32::MAX))
    }

    /// Parses one character of a literal or a class, escaped or not.
    pub(super) fn character(&mut self) -> Result<u32, GrammarError> {
        match self.advance() {
            Some('\\') => match self.advance() {
                Some('x') => self.hexadecimal(2),
                Some('u') => self.hexadecimal(4),
                Some('U') => self.hexadecimal(8),
                Some('t') => Ok(9),
                Some('r') => Ok(13),
                Some('n') => Ok(10),
                Some(same @ ('\\' | '"' | '[' | ']' | '-')) => Ok(same.into()),
                Some(other) => Err(self.syntax_error(&format!(
                    "unknown escape \\{other}; expected one of \\n \\r \\t \\\\ \\\" \\[ \\] \\- \\x41 \\u0041 \\U00000041"
                ))),
                None => Err(self.syntax_error("the grammar ends within an escape")),
            },
            Some(other) => Ok(other.into()),
            None => Err(self.syntax_error("the grammar ends within a text")),
        }
    }

    fn hexadecimal(&mut self, digits: usize) -> Result<u32, GrammarError> {
        let mut code = 0;
        for _ in 0..digits {
            match self.peek().and_then(|next| next.to_digit(16)) {
                Some(digit) => code = code << 4 | digit,
                None => return Err(self.syntax_error(&format!("expected {digits} hexadecimal digits"))),
            }
            self.advance();
        }
        if code > 0x0010_ffff {
            return Err(self.syntax_error(&format!("U+{code:X} is not a character")));
        }
        Ok(code)
    }

    /// Skips spaces and comments, and also line breaks if `lines` is true.
    pub(super) fn skip_space(&mut self, lines: bool) {
        while let Some(next) = self.peek() {
            match next {
                ' ' | '\t' => {
                    self.advance();
                }
                '\n' | '\r' if lines => {
                    self.advance();
                }
                '#' => {
                    while self.peek().is_some_and(|next| next != '\n' && next != '\r') {
                        self.advance();
                    }
                }
                _ => return,
            }
        }
    }

    /// Skips the character if it is next; returns false otherwise.
    pub(super) fn take(&mut self, expected: char) -> bool {
        let matches = self.peek() == Some(expected);
        if matches {
            self.advance();
        }
        matches
    }

    /// Skips the text if it is next; returns false otherwise.
    pub(super) fn take_text(&mut self, expected: &str) -> bool {
        let length = expected.chars().count();
        let matches = self.chars[self.index..].iter().take(length).copied().eq(expected.chars());
        if matches {
            for _ in 0..length {
                self.advance();
            }
        }
        matches
    }

    pub(super) fn advance(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.index += 1;
        if next == '\n' {
            self.line += 1;
            self.column = 1;
        } else {
            self.column += 1;
        }
        Some(next)
    }

    pub(super) fn syntax_error(&self, message: &str) -> GrammarError {
        GrammarError::Syntax { line: self.line, column: self.column, message: message.to_owned() }
    }
}
