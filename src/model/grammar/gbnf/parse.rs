//! Parser of llama.cpp's grammar format.
//!
//! It accepts the same grammars as llama.cpp, with the same limit of repetitions, and reports errors with line and
//! column. One difference: an empty character class is an error, while in llama.cpp it matches the empty text.

use super::super::GrammarError;
use crate::events::TokenId;
use std::collections::HashMap;

/// Maximum nesting of groups.
const MAX_DEPTH: usize = 64;
/// Maximum number of rules.
const MAX_RULES: usize = 4000;
/// llama.cpp's limit. A larger minimum is an error; a larger maximum means unlimited.
const MAX_REPETITIONS: u32 = 2000;

/// The rules of a grammar, and the index of its start rule.
#[derive(Debug, Clone)]
pub(super) struct GbnfGrammar {
    /// Rules by index, see [`Node::Rule`].
    pub(super) rules: Vec<Node>,
    pub(super) root: usize,
}

/// A part of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Node {
    /// A sequence of characters.
    Text(String),
    /// One of the characters in these ranges, which are sorted and disjoint.
    Class(Vec<(u32, u32)>),
    /// Another rule.
    Rule(usize),
    /// One token, or any other token if negated.
    Token { id: TokenId, negated: bool },
    /// Nodes in sequence.
    Sequence(Vec<Node>),
    /// Alternatives.
    Either(Vec<Node>),
    /// A node with its minimum and maximum number of repetitions; `None` means unlimited.
    Repeat(Box<Node>, u32, Option<u32>),
}

/// Parses a grammar. `token` resolves a token reference.
pub(super) fn parse(source: &str, token: &dyn Fn(&str) -> Option<TokenId>) -> Result<GbnfGrammar, GrammarError> {
    let mut parser = Parser {
        chars: source.chars().collect(),
        at: 0,
        line: 1,
        column: 1,
        names: Vec::new(),
        rules: HashMap::new(),
        token,
    };
    parser.skip_space(true);
    while parser.peek().is_some() {
        parser.rule()?;
    }
    parser.finish()
}

struct Parser<'a> {
    chars: Vec<char>,
    at: usize,
    line: usize,
    column: usize,
    /// Each name with the position of its first occurrence.
    names: Vec<(String, usize, usize)>,
    rules: HashMap<usize, Node>,
    token: &'a dyn Fn(&str) -> Option<TokenId>,
}

impl Parser<'_> {
    fn rule(&mut self) -> Result<(), GrammarError> {
        let name = self.name()?;
        let index = self.index(&name)?;
        self.skip_space(false);
        if !self.take_text("::=") {
            return Err(self.syntax_error(&format!("expected ::= after the name '{name}'")));
        }
        self.skip_space(true);
        let body = self.alternatives(0)?;
        match self.peek() {
            None => {}
            Some('\n' | '\r') => self.skip_space(true),
            Some(other) => {
                return Err(self.syntax_error(&format!("expected the end of the rule '{name}', found '{other}'")));
            }
        }
        self.rules.insert(index, body);
        Ok(())
    }

    fn finish(self) -> Result<GbnfGrammar, GrammarError> {
        let mut rules = Vec::with_capacity(self.names.len());
        let mut defined = self.rules;
        let root = self.names.iter().position(|(name, ..)| name == "root");
        for (index, (name, line, column)) in self.names.iter().enumerate() {
            match defined.remove(&index) {
                Some(body) => rules.push(body),
                None => {
                    return Err(GrammarError::Syntax {
                        line: *line,
                        column: *column,
                        message: format!("the rule '{name}' is used here but not defined"),
                    });
                }
            }
        }
        let root = root.ok_or_else(|| GrammarError::Syntax {
            line: self.line,
            column: self.column,
            message: "the grammar has no rule 'root', which is its start".into(),
        })?;
        Ok(GbnfGrammar { rules, root })
    }

    fn alternatives(&mut self, depth: usize) -> Result<Node, GrammarError> {
        if depth > MAX_DEPTH {
            return Err(self.syntax_error(&format!("groups are nested more than {MAX_DEPTH} deep")));
        }
        let mut alternatives = vec![self.sequence(depth)?];
        while self.take('|') {
            self.skip_space(true);
            alternatives.push(self.sequence(depth)?);
        }
        Ok(if alternatives.len() == 1 { alternatives.swap_remove(0) } else { Node::Either(alternatives) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, GrammarError> {
        let nested = depth > 0;
        let mut items = Vec::new();
        while let Some(next) = self.peek() {
            let item = match next {
                '"' => self.literal()?,
                '[' => self.class()?,
                '<' | '!' => self.token_literal()?,
                '(' => {
                    self.advance();
                    self.skip_space(true);
                    let inner = self.alternatives(depth + 1)?;
                    if !self.take(')') {
                        return Err(self.syntax_error("expected ')'"));
                    }
                    inner
                }
                '.' => {
                    self.advance();
                    Node::Class(vec![(0, 0x0010_ffff)])
                }
                '*' | '+' | '?' | '{' => {
                    let (min, max) = self.repetition(nested)?;
                    let item = items
                        .pop()
                        .ok_or_else(|| self.syntax_error(&format!("'{next}' has nothing before it to repeat")))?;
                    Node::Repeat(Box::new(item), min, max)
                }
                _ if is_name(next) => {
                    let name = self.name()?;
                    Node::Rule(self.index(&name)?)
                }
                _ => break,
            };
            items.push(item);
            self.skip_space(nested);
        }
        Ok(if items.len() == 1 { items.swap_remove(0) } else { Node::Sequence(items) })
    }

    fn literal(&mut self) -> Result<Node, GrammarError> {
        self.advance();
        let mut text = String::new();
        loop {
            match self.peek() {
                None => return Err(self.syntax_error("the text ends without its closing '\"'")),
                Some('"') => break,
                Some(_) => {
                    let code = self.character()?;
                    text.push(
                        char::from_u32(code)
                            .ok_or_else(|| self.syntax_error(&format!("U+{code:04X} is not a character")))?,
                    );
                }
            }
        }
        self.advance();
        Ok(Node::Text(text))
    }

    fn class(&mut self) -> Result<Node, GrammarError> {
        self.advance();
        let negated = self.take('^');
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                None => return Err(self.syntax_error("the class ends without its closing ']'")),
                Some(']') => break,
                Some(_) => {
                    let first = self.character()?;
                    let mut last = first;
                    if self.peek() == Some('-') && self.chars.get(self.at + 1) != Some(&']') {
                        self.advance();
                        if self.peek().is_none() {
                            return Err(self.syntax_error("the class ends without its closing ']'"));
                        }
                        last = self.character()?;
                    }
                    if last < first {
                        return Err(self.syntax_error("the last character of the range is before the first"));
                    }
                    ranges.push((first, last));
                }
            }
        }
        let ranges = normalize(ranges, negated);
        if ranges.is_empty() {
            return Err(self.syntax_error("the character class is empty"));
        }
        self.advance();
        Ok(Node::Class(ranges))
    }

    fn token_literal(&mut self) -> Result<Node, GrammarError> {
        let negated = self.take('!');
        let start = self.at;
        if !self.take('<') {
            return Err(self.syntax_error("expected '<' after '!': !<token> matches any token except this one"));
        }
        loop {
            match self.advance() {
                Some('>') => break,
                Some('\n' | '\r') | None => return Err(self.syntax_error("the token ends without its closing '>'")),
                Some(_) => {}
            }
        }
        let text: String = self.chars[start..self.at].iter().collect();
        let number = text.strip_prefix("<[").and_then(|text| text.strip_suffix("]>"));
        let id = match number {
            Some(number) => number.trim().parse().ok().filter(|id| (self.token)(&format!("<[{id}]>")).is_some()),
            None => (self.token)(&text),
        };
        match id {
            Some(id) => Ok(Node::Token { id, negated }),
            None => Err(self.syntax_error(&format!("{text} is not a single token of this model"))),
        }
    }

    fn repetition(&mut self, nested: bool) -> Result<(u32, Option<u32>), GrammarError> {
        match self.advance() {
            Some('*') => return Ok((0, None)),
            Some('+') => return Ok((1, None)),
            Some('?') => return Ok((0, Some(1))),
            _ => {}
        }
        self.skip_space(nested);
        let min = self.number()?;
        self.skip_space(nested);
        let mut max = Some(min);
        if self.take(',') {
            self.skip_space(nested);
            max = if self.peek().is_some_and(|next| next.is_ascii_digit()) { Some(self.number()?) } else { None };
            self.skip_space(nested);
        }
        if !self.take('}') {
            return Err(self.syntax_error("expected '}', as in {2}, {2,} or {2,5}"));
        }
        if min > MAX_REPETITIONS {
            return Err(self.syntax_error(&format!("{min} repetitions are too many; the maximum is {MAX_REPETITIONS}")));
        }
        if max.is_some_and(|max| max < min) {
            return Err(self.syntax_error("the maximum number of repetitions is below the minimum"));
        }
        Ok((min, max.filter(|&max| max <= MAX_REPETITIONS)))
    }

    fn number(&mut self) -> Result<u32, GrammarError> {
        let start = self.at;
        while self.peek().is_some_and(|next| next.is_ascii_digit()) {
            self.advance();
        }
        if start == self.at {
            return Err(self.syntax_error("expected a number, as in {2}, {2,} or {2,5}"));
        }
        let digits: String = self.chars[start..self.at].iter().collect();
        Ok(digits.parse().unwrap_or(u32::MAX))
    }

    /// Parses one character of a text or a class, escaped or not.
    fn character(&mut self) -> Result<u32, GrammarError> {
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

    fn name(&mut self) -> Result<String, GrammarError> {
        let start = self.at;
        while self.peek().is_some_and(is_name) {
            self.advance();
        }
        if start == self.at {
            let found = self.peek().map_or("the end".to_owned(), |found| format!("'{found}'"));
            return Err(
                self.syntax_error(&format!("expected the name of a rule (letters, digits and -), found {found}"))
            );
        }
        Ok(self.chars[start..self.at].iter().collect())
    }

    fn index(&mut self, name: &str) -> Result<usize, GrammarError> {
        if let Some(index) = self.names.iter().position(|(known, ..)| known == name) {
            return Ok(index);
        }
        if self.names.len() == MAX_RULES {
            return Err(self.syntax_error(&format!("the grammar has more than {MAX_RULES} rules")));
        }
        let column = self.column.saturating_sub(name.chars().count());
        self.names.push((name.to_owned(), self.line, column));
        Ok(self.names.len() - 1)
    }

    /// Skips spaces and comments, and also line breaks if `lines` is true.
    fn skip_space(&mut self, lines: bool) {
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

    fn take(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.advance();
        }
        found
    }

    fn take_text(&mut self, wanted: &str) -> bool {
        let found = wanted.chars().enumerate().all(|(index, wanted)| self.chars.get(self.at + index) == Some(&wanted));
        if found {
            wanted.chars().for_each(|_| {
                self.advance();
            });
        }
        found
    }

    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn advance(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += 1;
        if next == '\n' {
            self.line += 1;
            self.column = 1;
        } else {
            self.column += 1;
        }
        Some(next)
    }

    fn syntax_error(&self, message: &str) -> GrammarError {
        GrammarError::Syntax { line: self.line, column: self.column, message: message.to_owned() }
    }
}

fn is_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '-'
}

/// Returns sorted and disjoint ranges without surrogates, complemented if `negated`.
fn normalize(mut ranges: Vec<(u32, u32)>, negated: bool) -> Vec<(u32, u32)> {
    ranges.sort_unstable();
    let mut merged: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match merged.last_mut() {
            Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
            _ => merged.push((first, last)),
        }
    }
    if negated {
        let mut next = 0;
        let mut gaps = Vec::with_capacity(merged.len() + 1);
        for (first, last) in merged {
            if first > next {
                gaps.push((next, first - 1));
            }
            next = last + 1;
        }
        if next <= 0x0010_ffff {
            gaps.push((next, 0x0010_ffff));
        }
        merged = gaps;
    }
    let mut valid = Vec::with_capacity(merged.len() + 1);
    for (first, last) in merged {
        if first < 0xd800 {
            valid.push((first, last.min(0xd7ff)));
        }
        if last > 0xdfff {
            valid.push((first.max(0xe000), last));
        }
    }
    valid
}
