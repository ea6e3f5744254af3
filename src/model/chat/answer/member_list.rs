//! Parser of a call as a list of members: `name{key:value}` with strings in the family's quotes, or Python's
//! `name(key=value)`. A member is sent when it is complete.

use super::call::{CallProgress, CallText, PartialMatch, parse_name, skip_space};
use super::literals;
use super::output::AnswerOutput;
use crate::model::chat::pattern::{Pattern, PatternMatch, match_literal};

/// Maximum nesting.
const MAX_DEPTH: usize = 127;

/// The parser of one call.
#[derive(Debug)]
pub(super) struct MemberListParser {
    /// The bracket before the members.
    open: char,
    /// The bracket after the members.
    close: u8,
    /// The separator of key and value.
    assign: char,
    /// The family's quote; empty for none.
    quote: String,
    at: usize,
    /// True after the name of the function.
    named: bool,
    /// Start of the current member.
    from: usize,
    /// Number of sent members.
    count: usize,
    /// The closing brackets of the brackets that are open inside a value.
    brackets: Vec<u8>,
    quotes: QuoteState,
}

/// The string that the current byte is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QuoteState {
    /// Outside of strings.
    Outside,
    /// In a string in the family's quotes.
    Family,
    /// In a string in these quotes.
    String(u8),
    /// In a string in these quotes, after a backslash.
    Escape(u8),
}

impl MemberListParser {
    /// Creates a parser for `name{key:value}`.
    pub(super) fn braces(at: usize, quote: &str) -> Self {
        Self::new(at, ('{', b'}', ':'), quote)
    }

    /// Creates a parser for `name(key=value)`.
    pub(super) fn python(at: usize) -> Self {
        Self::new(at, ('(', b')', '='), "")
    }

    fn new(at: usize, (open, close, assign): (char, u8, char), quote: &str) -> Self {
        Self {
            open,
            close,
            assign,
            quote: quote.to_owned(),
            at,
            named: false,
            from: at,
            count: 0,
            brackets: Vec::new(),
            quotes: QuoteState::Outside,
        }
    }

    pub(super) fn parse(&mut self, call: CallText<'_>, output: &mut AnswerOutput) -> CallProgress {
        let CallText { text, text_end, .. } = call;
        if !self.named {
            let pattern = Pattern::new(&self.open.to_string());
            match parse_name(call, self.at, &pattern) {
                PartialMatch::Found((name, end)) => {
                    output.begin_call(name);
                    self.named = true;
                    (self.at, self.from) = (end, end);
                }
                PartialMatch::More => return CallProgress::More,
                PartialMatch::No => return CallProgress::Failed(self.at),
            }
        }
        while let Some(&byte) = text.as_bytes().get(self.at) {
            let own_quote = match self.quotes {
                QuoteState::Outside | QuoteState::Family
                    if !self.quote.is_empty() && byte == self.quote.as_bytes()[0] =>
                {
                    match_literal(&text[self.at..], &self.quote)
                }
                _ => PatternMatch::No,
            };
            match own_quote {
                PatternMatch::Whole(len) => {
                    self.at += len;
                    self.quotes =
                        if self.quotes == QuoteState::Outside { QuoteState::Family } else { QuoteState::Outside };
                    continue;
                }
                PatternMatch::Partial if !text_end.is_final() => return CallProgress::More,
                _ => {}
            }
            let here = self.at;
            self.at += 1;
            match self.quotes {
                QuoteState::Escape(quote) => self.quotes = QuoteState::String(quote),
                QuoteState::String(quote) if byte == quote => self.quotes = QuoteState::Outside,
                QuoteState::String(quote) if byte == b'\\' => self.quotes = QuoteState::Escape(quote),
                QuoteState::Family | QuoteState::String(_) => {}
                QuoteState::Outside => match byte {
                    b'"' => self.quotes = QuoteState::String(byte),
                    b'\'' if self.quote.is_empty() => self.quotes = QuoteState::String(byte),
                    b'[' | b'(' | b'{' if self.brackets.len() < MAX_DEPTH => {
                        self.brackets.push(match byte {
                            b'[' => b']',
                            b'(' => b')',
                            _ => b'}',
                        });
                    }
                    b'[' | b'(' | b'{' => return CallProgress::Failed(here),
                    b']' | b')' | b'}' if self.brackets.last() == Some(&byte) => {
                        self.brackets.pop();
                    }
                    _ if byte == self.close && self.brackets.is_empty() => {
                        let has_member = skip_space(text, self.from) < here;
                        if has_member && self.emit(&text[self.from..here], output).is_none() {
                            return CallProgress::Failed(here);
                        }
                        output.end_members(self.count);
                        return CallProgress::Done(self.at);
                    }
                    b']' | b')' | b'}' => return CallProgress::Failed(here),
                    b',' if self.brackets.is_empty() => {
                        if self.emit(&text[self.from..here], output).is_none() {
                            return CallProgress::Failed(here);
                        }
                        self.from = self.at;
                    }
                    _ => {}
                },
            }
        }
        CallProgress::More
    }

    fn emit(&mut self, member: &str, output: &mut AnswerOutput) -> Option<()> {
        let (key, value) = literals::parse_key(member, &self.quote, self.assign)?;
        let value = literals::parse_quoted(&member[value..], &self.quote)?;
        output.push_member(self.count, &key, &value);
        self.count += 1;
        Some(())
    }
}
