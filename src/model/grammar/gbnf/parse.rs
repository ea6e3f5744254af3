//! Parser of llama.cpp's grammar format.
//!
//! It accepts llama.cpp's grammars, with the same limit of each repetition, and reports errors with line and column. The
//! differences:
//! - An empty character class, `[]` or `[^]`, is an error; in llama.cpp it matches the empty text.
//! - A range or a repetition whose maximum is below its minimum is an error.
//! - Left recursion, repetitions of the empty text, and nested repetitions above the limit are accepted.

use super::super::GrammarError;
use super::cursor::Cursor;
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
    let mut parser = Parser { cursor: Cursor::new(source), names: Vec::new(), rules: HashMap::new(), token };
    parser.cursor.skip_space(true);
    while parser.cursor.peek().is_some() {
        parser.rule()?;
    }
    parser.finish()
}

struct Parser<'a> {
    cursor: Cursor,
    /// Each name with the line and column of its first occurrence.
    names: Vec<(String, usize, usize)>,
    rules: HashMap<usize, Node>,
    token: &'a dyn Fn(&str) -> Option<TokenId>,
}

impl Parser<'_> {
    fn rule(&mut self) -> Result<(), GrammarError> {
        let name = self.name()?;
        let index = self.index(&name)?;
        self.cursor.skip_space(false);
        if !self.cursor.take_text("::=") {
            return Err(self.cursor.syntax_error(&format!("expected ::= after the name '{name}'")));
        }
        self.cursor.skip_space(true);
        let body = self.alternatives(0)?;
        match self.cursor.peek() {
            None => {}
            Some('\n' | '\r') => self.cursor.skip_space(true),
            Some(other) => {
                return Err(self.cursor.syntax_error(&format!("expected the end of the rule '{name}', got '{other}'")));
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
        let root =
            root.ok_or_else(|| self.cursor.syntax_error("the grammar has no rule 'root', which is its start"))?;
        Ok(GbnfGrammar { rules, root })
    }

    fn alternatives(&mut self, depth: usize) -> Result<Node, GrammarError> {
        if depth > MAX_DEPTH {
            return Err(self.cursor.syntax_error(&format!("groups are nested more than {MAX_DEPTH} levels deep")));
        }
        let mut alternatives = vec![self.sequence(depth)?];
        while self.cursor.take('|') {
            self.cursor.skip_space(true);
            alternatives.push(self.sequence(depth)?);
        }
        Ok(if alternatives.len() == 1 { alternatives.swap_remove(0) } else { Node::Either(alternatives) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, GrammarError> {
        let nested = depth > 0;
        let mut items = Vec::new();
        while let Some(next) = self.cursor.peek() {
            let item = match next {
                '"' => self.literal()?,
                '[' => self.class()?,
                '<' | '!' => self.token_literal()?,
                '(' => {
                    self.cursor.advance();
                    self.cursor.skip_space(true);
                    let inner = self.alternatives(depth + 1)?;
                    if !self.cursor.take(')') {
                        return Err(self.cursor.syntax_error("expected ')'"));
                    }
                    inner
                }
                '.' => {
                    self.cursor.advance();
                    Node::Class(vec![(0, 0x0010_ffff)])
                }
                '*' | '+' | '?' | '{' => {
                    let (min, max) = self.repetition(nested)?;
                    let item = items.pop().ok_or_else(|| {
                        self.cursor.syntax_error(&format!("'{next}' has nothing before it to repeat"))
                    })?;
                    Node::Repeat(Box::new(item), min, max)
                }
                _ if is_name(next) => {
                    let name = self.name()?;
                    Node::Rule(self.index(&name)?)
                }
                _ => break,
            };
            items.push(item);
            self.cursor.skip_space(nested);
        }
        Ok(if items.len() == 1 { items.swap_remove(0) } else { Node::Sequence(items) })
    }

    fn literal(&mut self) -> Result<Node, GrammarError> {
        self.cursor.advance();
        let mut text = String::new();
        loop {
            match self.cursor.peek() {
                None => return Err(self.cursor.syntax_error("the text ends without its closing '\"'")),
                Some('"') => break,
                Some(_) => {
                    let code = self.cursor.character()?;
                    text.push(
                        char::from_u32(code)
                            .ok_or_else(|| self.cursor.syntax_error(&format!("U+{code:04X} is not a character")))?,
                    );
                }
            }
        }
        self.cursor.advance();
        Ok(Node::Text(text))
    }

    fn class(&mut self) -> Result<Node, GrammarError> {
        self.cursor.advance();
        let negated = self.cursor.take('^');
        let mut ranges = Vec::new();
        loop {
            match self.cursor.peek() {
                None => return Err(self.cursor.syntax_error("the class ends without its closing ']'")),
                Some(']') => break,
                Some(_) => {
                    let first = self.cursor.character()?;
                    let mut last = first;
                    if self.cursor.peek() == Some('-') && self.cursor.peek_second() != Some(']') {
                        self.cursor.advance();
                        if self.cursor.peek().is_none() {
                            return Err(self.cursor.syntax_error("the class ends without its closing ']'"));
                        }
                        last = self.cursor.character()?;
                    }
                    if last < first {
                        return Err(self.cursor.syntax_error("the last character of the range is before the first"));
                    }
                    ranges.push((first, last));
                }
            }
        }
        let is_empty = ranges.is_empty();
        let ranges = normalize(ranges, negated);
        if is_empty || ranges.is_empty() {
            return Err(self.cursor.syntax_error("the character class is empty"));
        }
        self.cursor.advance();
        Ok(Node::Class(ranges))
    }

    fn token_literal(&mut self) -> Result<Node, GrammarError> {
        let negated = self.cursor.take('!');
        let start = self.cursor.index();
        if !self.cursor.take('<') {
            return Err(self.cursor.syntax_error("expected '<' after '!': !<token> matches any token except this one"));
        }
        loop {
            match self.cursor.advance() {
                Some('>') => break,
                Some('\n' | '\r') | None => {
                    return Err(self.cursor.syntax_error("the token ends without its closing '>'"));
                }
                Some(_) => {}
            }
        }
        let text = self.cursor.text_since(start);
        let number = text.strip_prefix("<[").and_then(|text| text.strip_suffix("]>"));
        let id = match number {
            Some(number) => number.trim().parse().ok().filter(|id| (self.token)(&format!("<[{id}]>")).is_some()),
            None => (self.token)(&text),
        };
        match id {
            Some(id) => Ok(Node::Token { id, negated }),
            None => Err(self.cursor.syntax_error(&format!("{text} is not a single token of this model"))),
        }
    }

    fn repetition(&mut self, nested: bool) -> Result<(u32, Option<u32>), GrammarError> {
        match self.cursor.advance() {
            Some('*') => return Ok((0, None)),
            Some('+') => return Ok((1, None)),
            Some('?') => return Ok((0, Some(1))),
            _ => {}
        }
        self.cursor.skip_space(nested);
        let min = self.cursor.number()?;
        self.cursor.skip_space(nested);
        let mut max = Some(min);
        if self.cursor.take(',') {
            self.cursor.skip_space(nested);
            max = if self.cursor.peek().is_some_and(|next| next.is_ascii_digit()) {
                Some(self.cursor.number()?)
            } else {
                None
            };
            self.cursor.skip_space(nested);
        }
        if !self.cursor.take('}') {
            return Err(self.cursor.syntax_error("expected '}', as in {2}, {2,} or {2,5}"));
        }
        if min > MAX_REPETITIONS {
            return Err(self
                .cursor
                .syntax_error(&format!("{min} repetitions are too many; the maximum is {MAX_REPETITIONS}")));
        }
        if max.is_some_and(|max| max < min) {
            return Err(self.cursor.syntax_error("the maximum number of repetitions is below the minimum"));
        }
        Ok((min, max.filter(|&max| max <= MAX_REPETITIONS)))
    }

    fn name(&mut self) -> Result<String, GrammarError> {
        let start = self.cursor.index();
        while self.cursor.peek().is_some_and(is_name) {
            self.cursor.advance();
        }
        if start == self.cursor.index() {
            let next = self.cursor.peek().map_or("the end".to_owned(), |next| format!("'{next}'"));
            return Err(self
                .cursor
                .syntax_error(&format!("expected the name of a rule (letters, digits and -), got {next}")));
        }
        Ok(self.cursor.text_since(start))
    }

    fn index(&mut self, name: &str) -> Result<usize, GrammarError> {
        if let Some(index) = self.names.iter().position(|(known, ..)| known == name) {
            return Ok(index);
        }
        if self.names.len() == MAX_RULES {
            return Err(self.cursor.syntax_error(&format!("the grammar has more than {MAX_RULES} rules")));
        }
        let (line, column) = self.cursor.position();
        self.names.push((name.to_owned(), line, column.saturating_sub(name.chars().count())));
        Ok(self.names.len() - 1)
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
