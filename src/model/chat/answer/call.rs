//! Parser of one tool call: its name first, then its arguments as they arrive.

use super::json::{ByteEffect, NotJson, Scanner};
use super::member_list::MemberListReader;
use super::object::Object;
use super::tagged::TaggedReader;
use super::{AnswerDelta, AnswerFormat, AnswerMessage, EndOfAnswer, emit_arguments, emit_call, emit_call_end};
use crate::model::chat::pattern::{Pattern, PatternMatch};
use crate::model::chat::syntax::{CallForm, CallShape};
use serde_json::Value;

/// Maximum length of the text before the arguments.
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

/// The result of a search in incomplete text.
pub(super) enum PartialMatch<T> {
    Found(T),
    More,
    No,
}

/// The continuation after a marker or a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextCall {
    /// More text is needed.
    More,
    /// A call starts here; `list` is true if a list was opened before it, and `kept` is the end of the block without
    /// the call.
    Next { at: usize, list: bool, kept: usize },
    /// The end of the block, or other text, from this byte on.
    End(usize),
}

/// Finds the next part of a block of calls.
pub(super) fn find_next_call(
    form: &CallForm,
    text: &str,
    from: usize,
    after_call: bool,
    list: bool,
    answer_end: bool,
) -> NextCall {
    let mut block = Block {
        form,
        after_call,
        list,
        opened: false,
        begun: false,
        separated: false,
        closed: false,
        kept: from,
        at: from,
    };
    loop {
        if block.closed {
            return NextCall::End(block.kept);
        }
        block.at = skip_space(text, block.at);
        if block.at == text.len() {
            return if answer_end { NextCall::End(block.kept) } else { NextCall::More };
        }
        match block.take(&text[block.at..], answer_end) {
            PartialMatch::Found(true) => {}
            PartialMatch::Found(false) => return NextCall::Next { at: block.at, list: block.list, kept: block.kept },
            PartialMatch::More => return NextCall::More,
            PartialMatch::No => return NextCall::End(if after_call { block.kept } else { block.at }),
        }
    }
}

#[expect(clippy::struct_excessive_bools, reason = "each is a part of the block that was read")]
struct Block<'a> {
    form: &'a CallForm,
    after_call: bool,
    list: bool,
    /// True after the text before the block's first call.
    opened: bool,
    /// True after the text before a call.
    begun: bool,
    /// True after the text between two calls.
    separated: bool,
    /// True after the text after the block's last call.
    closed: bool,
    /// End of the text that belongs to the block even if nothing follows.
    kept: usize,
    at: usize,
}

impl Block<'_> {
    /// Consumes the next part of the block. Returns `Found(false)` at the start of a call.
    fn take(&mut self, rest: &str, answer_end: bool) -> PartialMatch<bool> {
        let form = self.form;
        if !self.begun {
            let after = self.after_call && !self.opened && !self.separated;
            let patterns: [(&Pattern, bool); 5] = [
                (&form.close, after),
                (&form.after, after),
                (&form.separator, (self.after_call || form.is_bare()) && !self.separated),
                (&form.open, !self.opened),
                (&form.before, true),
            ];
            for (role, (pattern, _)) in
                patterns.iter().enumerate().filter(|(_, (pattern, fits))| *fits && !pattern.is_blank())
            {
                let ends = role < 2;
                match if ends { pattern.fit_beginning(rest) } else { pattern.fit(rest) } {
                    PatternMatch::Whole(len) => {
                        self.at += len;
                        match role {
                            0 | 1 => {
                                self.kept = self.at;
                                self.closed = role == 0;
                            }
                            2 => self.separated = true,
                            3 => self.opened = true,
                            _ => self.begun = true,
                        }
                        return PartialMatch::Found(true);
                    }
                    PatternMatch::Partial if !answer_end => return PartialMatch::More,
                    _ => {}
                }
            }
        }
        let fresh = self.opened || self.begun || self.separated;
        match rest.as_bytes()[0] {
            b'{' if fresh || self.list || form.before.is_blank() => return PartialMatch::Found(false),
            b'[' if fresh && !self.list => self.list = true,
            b']' if self.after_call && self.list && !fresh => {
                self.list = false;
                self.kept = self.at + 1;
            }
            b',' | b';' if self.after_call && !fresh => self.separated = true,
            _ if form.shape == CallShape::Code && self.begun => return PartialMatch::Found(false),
            first => {
                let may = self.begun || (form.before.is_blank() && (fresh || self.list));
                let named = is_name_byte(first) && !matches!(form.shape, CallShape::Json(_) | CallShape::Code);
                return if may && named { PartialMatch::Found(false) } else { PartialMatch::No };
            }
        }
        self.at += 1;
        PartialMatch::Found(true)
    }
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':' | b'/')
}

pub(super) fn skip_space(text: &str, at: usize) -> usize {
    text.len() - text[at..].trim_start().len()
}

/// Parses the name at `from` and the pattern after it. Returns both the name and the end of the pattern.
pub(super) fn name_before<'t>(
    pattern: &Pattern,
    text: &'t str,
    from: usize,
    answer_end: bool,
) -> PartialMatch<(&'t str, usize)> {
    let rest = &text[from..];
    let run = rest.bytes().position(|byte| !is_name_byte(byte)).unwrap_or(rest.len());
    if run == 0 || run > MAX_NAME {
        return if rest.is_empty() && !answer_end { PartialMatch::More } else { PartialMatch::No };
    }
    if run == rest.len() && !answer_end {
        return PartialMatch::More;
    }
    // The pattern may start with a byte that is also valid in names, like Kimi's `:0`.
    for len in (1..=run).rev() {
        match pattern.fit(&rest[len..]) {
            PatternMatch::Whole(_) if pattern.is_blank() && len < run => break,
            PatternMatch::Whole(end) => return PartialMatch::Found((&rest[..len], from + len + end)),
            PatternMatch::Partial if !answer_end => return PartialMatch::More,
            _ => {}
        }
    }
    PartialMatch::No
}

/// The state of parsing one call.
#[derive(Debug)]
pub(super) struct CallReader {
    from: usize,
    at: usize,
    bare: bool,
    sent: bool,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Json(Object),
    Named(Option<Arguments>),
    Tagged(TaggedReader),
    MemberList(MemberListReader),
    Code,
}

/// Arguments that are being written.
#[derive(Debug)]
struct Arguments {
    scanner: Scanner,
    from: usize,
}

impl CallReader {
    /// Creates a parser for a call of this form that starts at `at` with `rest`.
    pub(super) fn new(form: &CallForm, at: usize, rest: &str, bare: bool) -> Self {
        let kind = match &form.shape {
            _ if rest.starts_with('{') => Kind::Json(Object::new(&form.shape)),
            CallShape::Named { .. } => Kind::Named(None),
            CallShape::Tagged(_) => Kind::Tagged(TaggedReader::new(at)),
            CallShape::Braces { quote } => Kind::MemberList(MemberListReader::braces(at, quote)),
            CallShape::Python => Kind::MemberList(MemberListReader::python(at)),
            CallShape::Json(_) | CallShape::Code | CallShape::Channel => Kind::Code,
        };
        Self { from: at, at, bare, sent: false, kind }
    }

    /// Returns true if text without a marker may start with a call of this form.
    pub(super) fn may_be_bare(form: &CallForm, answer_format: &AnswerFormat, words: &str) -> bool {
        match form.shape {
            CallShape::Json(_) => words.starts_with('{'),
            CallShape::Named { .. } => !words.is_empty() && bare_name(answer_format, words),
            _ => false,
        }
    }

    /// Returns true if the name of the function was sent.
    pub(super) fn is_sent(&self) -> bool {
        self.sent
    }

    /// Continues parsing.
    pub(super) fn read(
        &mut self,
        (answer_format, form): (&AnswerFormat, &CallForm),
        text: &str,
        answer_end: Option<EndOfAnswer>,
        deltas: &mut Vec<AnswerDelta>,
        message: &mut AnswerMessage,
    ) -> CallProgress {
        let progress = match &mut self.kind {
            Kind::Json(object) => {
                object.read(answer_format, text, &mut self.at, self.bare, &mut self.sent, deltas, message)
            }
            Kind::Named(None) => match self.head(answer_format, form, text, answer_end.is_some()) {
                PartialMatch::More => CallProgress::More,
                PartialMatch::No => CallProgress::Failed(self.from),
                PartialMatch::Found((name, brace)) => {
                    emit_call(deltas, message, name);
                    self.sent = true;
                    self.at = brace;
                    self.kind = Kind::Named(Some(Arguments { scanner: Scanner::new(), from: brace }));
                    return self.read((answer_format, form), text, answer_end, deltas, message);
                }
            },
            Kind::Named(Some(arguments)) => arguments.read(text, &mut self.at, deltas, message),
            Kind::Tagged(tagged) => {
                tagged.read((answer_format, form), text, answer_end, &mut self.sent, deltas, message)
            }
            Kind::MemberList(members) => members.read(text, answer_end.is_some(), &mut self.sent, deltas, message),
            Kind::Code => code(answer_format, text, self.from, answer_end, &mut self.sent, deltas, message),
        };
        match (progress, answer_end) {
            (CallProgress::More, Some(answer_end)) if answer_end.cut && self.sent => CallProgress::Done(text.len()),
            (CallProgress::More, Some(_)) => CallProgress::Failed(text.len()),
            _ => progress,
        }
    }

    /// Parses the name; returns it with the start of the arguments.
    fn head<'t>(
        &self,
        answer_format: &AnswerFormat,
        form: &CallForm,
        text: &'t str,
        answer_end: bool,
    ) -> PartialMatch<(&'t str, usize)> {
        let CallShape::Named { middle } = &form.shape else { return PartialMatch::No };
        if self.bare && !bare_name(answer_format, &text[self.from..]) {
            return PartialMatch::No;
        }
        match name_before(middle, text, self.from, answer_end) {
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
    /// Parses arguments from the byte `at` on.
    fn read(
        &mut self,
        text: &str,
        at: &mut usize,
        deltas: &mut Vec<AnswerDelta>,
        message: &mut AnswerMessage,
    ) -> CallProgress {
        let sent = *at;
        for byte in text[*at..].bytes() {
            match self.scanner.push(byte) {
                Err(NotJson) => return CallProgress::Failed(*at),
                Ok(ByteEffect::End) => {
                    *at += 1;
                    if serde_json::from_str::<Value>(&text[self.from..*at]).is_err() {
                        return CallProgress::Failed(*at);
                    }
                    emit_arguments(deltas, message, &text[sent..*at]);
                    emit_call_end(deltas, message);
                    return CallProgress::Done(*at);
                }
                Ok(_) => *at += 1,
            }
        }
        emit_arguments(deltas, message, &text[sent..*at]);
        CallProgress::More
    }
}

/// Returns true if the text starts with a tool's name on a separate line, followed by an object, or is an incomplete
/// start of this.
pub(super) fn bare_name(answer_format: &AnswerFormat, text: &str) -> bool {
    answer_format.tools.iter().any(|tool| match text.strip_prefix(tool.name.as_str()) {
        Some(rest) => {
            let space = rest.len() - rest.trim_start().len();
            rest.is_empty()
                || (rest[..space].contains('\n') && (rest[space..].is_empty() || rest[space..].starts_with('{')))
                || rest[space..].is_empty()
        }
        None => tool.name.starts_with(text),
    })
}

/// Parses Llama's built-in tools: `name.call(key="value")`, or code for a tool that runs it.
fn code(
    answer_format: &AnswerFormat,
    text: &str,
    from: usize,
    answer_end: Option<EndOfAnswer>,
    sent: &mut bool,
    deltas: &mut Vec<AnswerDelta>,
    message: &mut AnswerMessage,
) -> CallProgress {
    let Some(answer_end) = answer_end else { return CallProgress::More };
    let written = &text[from..];
    let call = builtin(written.trim()).filter(|(name, _)| answer_format.tools.iter().any(|tool| tool.name == *name));
    let call = call.or_else(|| {
        let tool = answer_format.tools.iter().find(|tool| CODE_TOOLS.contains(&tool.name.as_str()))?;
        Some((tool.name.clone(), serde_json::json!({ "code": written }).to_string()))
    });
    match call {
        Some((name, arguments)) if !answer_end.cut => {
            emit_call(deltas, message, &name);
            *sent = true;
            emit_arguments(deltas, message, &arguments);
            emit_call_end(deltas, message);
            CallProgress::Done(text.len())
        }
        _ => CallProgress::Failed(text.len()),
    }
}

fn builtin(text: &str) -> Option<(String, String)> {
    let (name, rest) = text.split_at(text.find(".call(")?);
    let mut rest = rest.strip_prefix(".call(")?.strip_suffix(')')?.trim();
    let mut arguments = serde_json::Map::new();
    while !rest.is_empty() {
        let (key, value) = rest.split_once('=')?;
        let mut values = serde_json::Deserializer::from_str(value).into_iter::<Value>();
        let read = values.next()?.ok()?;
        arguments.insert(key.trim().to_owned(), read);
        rest = value[values.byte_offset()..].trim_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
    }
    Some((name.trim().to_owned(), Value::Object(arguments).to_string()))
}
