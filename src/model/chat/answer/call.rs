//! Parser of one tool call: its name first, then its arguments as they arrive.

use super::json::{ByteEffect, NotJson, Scanner};
use super::member_list::MemberListParser;
use super::object::ObjectParser;
use super::output::AnswerOutput;
use super::tagged::TaggedParser;
use super::{AnswerFormat, TextEnd};
use crate::model::chat::pattern::{Pattern, PatternMatch};
use crate::model::chat::syntax::{CallForm, CallShape};
use serde_json::Value;

/// Maximum length of the name and the text before the arguments.
const MAX_HEAD: usize = 600;
/// Maximum length of the name of a function or an argument.
pub(super) const MAX_NAME: usize = 200;
/// Tools that accept code without JSON, as Llama writes it.
const CODE_TOOLS: &[&str] = &["python", "ipython", "code_interpreter"];

/// Progress of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallProgress {
    /// More text is needed.
    More,
    /// The call ends before this byte.
    Done(usize),
    /// The text is not a call: this byte differs.
    Failed(usize),
}

/// The text of an answer that contains a call, and the context for parsing it.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallText<'a> {
    pub(super) answer_format: &'a AnswerFormat,
    /// Form of the call.
    pub(super) form: &'a CallForm,
    /// The whole text so far.
    pub(super) text: &'a str,
    pub(super) text_end: TextEnd,
}

/// The result of a search in incomplete text.
pub(super) enum PartialMatch<T> {
    Found(T),
    More,
    No,
}

pub(super) fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':' | b'/')
}

pub(super) fn skip_space(text: &str, at: usize) -> usize {
    text.len() - text[at..].trim_start().len()
}

/// Parses the name at `from` and the pattern after it. Returns the name and the end of the pattern.
pub(super) fn parse_name<'t>(call: CallText<'t>, from: usize, pattern: &Pattern) -> PartialMatch<(&'t str, usize)> {
    let CallText { text, text_end, .. } = call;
    let rest = &text[from..];
    let run = rest.bytes().position(|byte| !is_name_byte(byte)).unwrap_or(rest.len());
    if run == 0 || run > MAX_NAME {
        return if rest.is_empty() && !text_end.is_final() { PartialMatch::More } else { PartialMatch::No };
    }
    if run == rest.len() && !text_end.is_final() {
        return PartialMatch::More;
    }
    // The pattern may start with a byte that is also valid in names, like Kimi's `:0`.
    for len in (1..=run).rev() {
        match pattern.match_whole(&rest[len..]) {
            PatternMatch::Whole(_) if pattern.is_blank() && len < run => break,
            PatternMatch::Whole(end) => return PartialMatch::Found((&rest[..len], from + len + end)),
            PatternMatch::Partial if !text_end.is_final() => return PartialMatch::More,
            _ => {}
        }
    }
    PartialMatch::No
}

/// The parser of one call.
#[derive(Debug)]
pub(super) struct CallParser {
    /// Start of the call.
    from: usize,
    /// True if no marker precedes the call.
    bare: bool,
    /// True if the name of the function was sent.
    sent: bool,
    state: CallState,
}

#[derive(Debug)]
enum CallState {
    Json(ObjectParser),
    Named(Option<Arguments>),
    Tagged(TaggedParser),
    MemberList(MemberListParser),
    Code,
}

/// Arguments that are being written.
#[derive(Debug)]
struct Arguments {
    scanner: Scanner,
    from: usize,
    /// End of the parsed text.
    at: usize,
}

impl CallParser {
    /// Creates a parser for a call of this form that starts at `at` with `rest`.
    pub(super) fn new(form: &CallForm, at: usize, rest: &str, bare: bool) -> Self {
        let state = match &form.shape {
            _ if rest.starts_with('{') => CallState::Json(ObjectParser::new(&form.shape, at, bare)),
            CallShape::Named { .. } => CallState::Named(None),
            CallShape::Tagged(_) => CallState::Tagged(TaggedParser::new(at)),
            CallShape::Braces { quote } => CallState::MemberList(MemberListParser::braces(at, quote)),
            CallShape::Python => CallState::MemberList(MemberListParser::python(at)),
            CallShape::Json(_) | CallShape::Code | CallShape::Channel => CallState::Code,
        };
        Self { from: at, bare, sent: false, state }
    }

    /// Returns true if text without a marker may start with a call of this form.
    pub(super) fn may_be_bare(form: &CallForm, answer_format: &AnswerFormat, text: &str) -> bool {
        match form.shape {
            CallShape::Json(_) => text.starts_with('{'),
            CallShape::Named { .. } => !text.is_empty() && starts_with_bare_name(answer_format, text),
            _ => false,
        }
    }

    /// Returns true if the name of the function was sent.
    pub(super) fn is_sent(&self) -> bool {
        self.sent
    }

    /// Continues parsing. Adds the changes of the message to `output`, and returns the progress of the call.
    pub(super) fn parse(&mut self, call: CallText<'_>, output: &mut AnswerOutput) -> CallProgress {
        let calls = output.message.calls.len();
        let progress = self.parse_state(call, output);
        self.sent |= output.message.calls.len() > calls;
        match (progress, call.text_end) {
            (CallProgress::More, TextEnd::Cut) if self.sent => CallProgress::Done(call.text.len()),
            (CallProgress::More, TextEnd::Complete | TextEnd::Cut) => CallProgress::Failed(call.text.len()),
            _ => progress,
        }
    }

    fn parse_state(&mut self, call: CallText<'_>, output: &mut AnswerOutput) -> CallProgress {
        match &mut self.state {
            CallState::Json(object) => object.parse(call, output),
            CallState::Named(None) => match self.parse_name_and_arguments_start(call) {
                PartialMatch::More => CallProgress::More,
                PartialMatch::No => CallProgress::Failed(self.from),
                PartialMatch::Found((name, brace)) => {
                    output.begin_call(name);
                    let mut arguments = Arguments { scanner: Scanner::new(), from: brace, at: brace };
                    let progress = arguments.parse(call.text, output);
                    self.state = CallState::Named(Some(arguments));
                    progress
                }
            },
            CallState::Named(Some(arguments)) => arguments.parse(call.text, output),
            CallState::Tagged(tagged) => tagged.parse(call, output),
            CallState::MemberList(members) => members.parse(call, output),
            CallState::Code => parse_code(call, self.from, output),
        }
    }

    /// Parses the name of the function. Returns it and the byte where the arguments start.
    fn parse_name_and_arguments_start<'t>(&self, call: CallText<'t>) -> PartialMatch<(&'t str, usize)> {
        let CallText { answer_format, form, text, .. } = call;
        let CallShape::Named { middle } = &form.shape else { return PartialMatch::No };
        if self.bare && !starts_with_bare_name(answer_format, &text[self.from..]) {
            return PartialMatch::No;
        }
        match parse_name(call, self.from, middle) {
            PartialMatch::Found((name, end)) => {
                let brace = skip_space(text, end);
                match text.as_bytes().get(brace) {
                    _ if brace - self.from > MAX_HEAD => PartialMatch::No,
                    None => PartialMatch::More,
                    Some(b'{') => PartialMatch::Found((name, brace)),
                    Some(_) => PartialMatch::No,
                }
            }
            PartialMatch::More if text.len() - self.from > MAX_HEAD => PartialMatch::No,
            other => other,
        }
    }
}

impl Arguments {
    /// Parses the next part of the arguments.
    fn parse(&mut self, text: &str, output: &mut AnswerOutput) -> CallProgress {
        let sent = self.at;
        for byte in text[sent..].bytes() {
            match self.scanner.push(byte) {
                Err(NotJson) => return CallProgress::Failed(self.at),
                Ok(ByteEffect::End) => {
                    self.at += 1;
                    if serde_json::from_str::<Value>(&text[self.from..self.at]).is_err() {
                        return CallProgress::Failed(self.at);
                    }
                    output.push_arguments(&text[sent..self.at]);
                    output.end_call();
                    return CallProgress::Done(self.at);
                }
                Ok(_) => self.at += 1,
            }
        }
        output.push_arguments(&text[sent..self.at]);
        CallProgress::More
    }
}

/// Returns true if the text starts with a tool's name on its own line and an object after it, or may become such a
/// text.
fn starts_with_bare_name(answer_format: &AnswerFormat, text: &str) -> bool {
    answer_format.tools.iter().any(|tool| match text.strip_prefix(tool.name.as_str()) {
        Some(rest) => {
            let space = rest.len() - rest.trim_start().len();
            rest[space..].is_empty() || (rest[..space].contains('\n') && rest[space..].starts_with('{'))
        }
        None => tool.name.starts_with(text),
    })
}

/// Parses Llama's built-in tools: `name.call(key="value")`, or code for a tool that runs it.
fn parse_code(call: CallText<'_>, from: usize, output: &mut AnswerOutput) -> CallProgress {
    let CallText { answer_format, text, text_end, .. } = call;
    if !text_end.is_final() {
        return CallProgress::More;
    }
    let written = &text[from..];
    let call = parse_builtin_call(written.trim())
        .filter(|(name, _)| answer_format.tools.iter().any(|tool| tool.name == *name));
    let call = call.or_else(|| {
        let tool = answer_format.tools.iter().find(|tool| CODE_TOOLS.contains(&tool.name.as_str()))?;
        Some((tool.name.clone(), serde_json::json!({ "code": written }).to_string()))
    });
    match call {
        Some((name, arguments)) if text_end == TextEnd::Complete => {
            output.begin_call(&name);
            output.push_arguments(&arguments);
            output.end_call();
            CallProgress::Done(text.len())
        }
        _ => CallProgress::Failed(text.len()),
    }
}

/// Parses `name.call(key="value")`; returns the name and the arguments as JSON.
fn parse_builtin_call(text: &str) -> Option<(String, String)> {
    let (name, rest) = text.split_at(text.find(".call(")?);
    let mut rest = rest.strip_prefix(".call(")?.strip_suffix(')')?.trim();
    let mut arguments = serde_json::Map::new();
    while !rest.is_empty() {
        let (key, value) = rest.split_once('=')?;
        let mut values = serde_json::Deserializer::from_str(value).into_iter::<Value>();
        let parsed = values.next()?.ok()?;
        arguments.insert(key.trim().to_owned(), parsed);
        rest = value[values.byte_offset()..].trim_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
    }
    Some((name.trim().to_owned(), Value::Object(arguments).to_string()))
}
