//! One tool call: its name first, then its arguments while they are written.

use super::json::{NotJson, Scanner, Seen};
use super::object::Object;
use super::tagged::Tagged;
use super::{Match, Message, Over, Piece, Reading, literal, say_arguments, say_call, say_called};
use crate::model::chat::family::{CallShape, Family, Format};
use serde_json::Value;

/// Longest text before the arguments.
const LONGEST_HEAD: usize = 300;
/// Tools that take Llama's bare code.
const CODE_TOOLS: &[&str] = &["python", "ipython", "code_interpreter"];

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Its end is not there.
    More,
    /// It ends before this byte.
    Done(usize),
    /// It is none, as this byte shows.
    Failed(usize),
}

/// What follows a marker or a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Between {
    /// That cannot be told yet.
    More,
    /// A call, here; `list` says whether a list was opened before it.
    Next { at: usize, list: bool },
    /// The end of the block, before this byte.
    Closed(usize),
    /// Something else, from this byte on.
    Over(usize),
}

/// Finds what comes next within a block.
pub(super) fn between(
    format: &Format,
    text: &str,
    mut at: usize,
    after_call: bool,
    mut list: bool,
    over: bool,
) -> Between {
    let after: &[&str] = match format.call {
        CallShape::Named { after, .. } if after_call => after,
        _ => &[],
    };
    let before = match format.call {
        CallShape::Named { before, .. } => before,
        CallShape::Tagged(tags) => tags.name.0,
        _ => "",
    };
    let mut opened = !after_call;
    // What belongs to the block even when nothing follows.
    let mut kept = at;
    loop {
        at += text[at..].len() - text[at..].trim_start().len();
        let rest = &text[at..];
        if rest.is_empty() {
            return if over { Between::Closed(at) } else { Between::More };
        }
        let mut begun = false;
        let mut find = |literals: &[&str]| {
            literals.iter().filter(|literal| !literal.is_empty()).find_map(|text| match literal(rest, text) {
                Match::Whole => Some(text.len()),
                found => {
                    begun |= found == Match::Begun;
                    None
                }
            })
        };
        if let Some(len) = find(format.close) {
            return Between::Closed(at + len);
        }
        if let Some(len) = find(after) {
            at += len;
            kept = at;
            continue;
        }
        if let Some(len) = find(format.open) {
            at += len;
            opened = true;
            continue;
        }
        if find(&[before]).is_some() {
            return Between::Next { at, list };
        }
        if begun && !over {
            return Between::More;
        }
        let first = rest.as_bytes()[0];
        match first {
            b'{' => return Between::Next { at, list },
            b'[' if opened && !list => {
                list = true;
                at += 1;
            }
            b']' if after_call && list => {
                list = false;
                at += 1;
                kept = at;
            }
            b',' | b';' if after_call && !opened => at += 1,
            _ if opened && before.is_empty() && !list && !matches!(format.call, CallShape::Channel) => {
                let named = is_name_byte(first) && !matches!(format.call, CallShape::Json { .. });
                let code = format.family == Family::Llama3;
                return if named || code { Between::Next { at, list } } else { Between::Over(kept) };
            }
            _ => return Between::Over(if after_call { kept } else { at }),
        }
    }
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':' | b'/')
}

/// The length of the name that the text begins with.
pub(super) fn name_len(text: &str) -> usize {
    text.bytes().position(|byte| !is_name_byte(byte)).unwrap_or(text.len())
}

/// Reads one call.
#[derive(Debug)]
pub(super) struct CallReader {
    from: usize,
    at: usize,
    bare: bool,
    said: bool,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Json(Object),
    Named(Option<Arguments>),
    Tagged(Tagged),
    Code,
}

/// Arguments that are being written.
#[derive(Debug)]
struct Arguments {
    scanner: Scanner,
    from: usize,
}

impl CallReader {
    /// A call that begins at `at` with `rest`.
    pub(super) fn new(reading: &Reading, at: usize, rest: &str, bare: bool) -> Self {
        let kind = match reading.format.call {
            _ if rest.starts_with('{') => Kind::Json(Object::new()),
            CallShape::Named { .. } => Kind::Named(None),
            CallShape::Tagged(tags) => Kind::Tagged(Tagged::new(tags, at)),
            CallShape::Json { .. } | CallShape::Channel => Kind::Code,
        };
        Self { from: at, at, bare, said: false, kind }
    }

    /// Whether a text without a marker may begin with a call.
    pub(super) fn may_stand_bare(reading: &Reading, words: &str) -> bool {
        match reading.format.call {
            CallShape::Json { .. } => words.starts_with('{'),
            _ => !words.is_empty() && bare_name(reading, words),
        }
    }

    /// Whether its name was said.
    pub(super) fn is_said(&self) -> bool {
        self.said
    }

    /// Reads on.
    pub(super) fn read(
        &mut self,
        reading: &Reading,
        text: &str,
        over: Option<Over>,
        pieces: &mut Vec<Piece>,
        message: &mut Message,
    ) -> Step {
        let step = match &mut self.kind {
            Kind::Json(object) => object.read(reading, text, &mut self.at, self.bare, &mut self.said, pieces, message),
            Kind::Named(None) => match head(reading, text, self.from, self.bare) {
                Head::More => Step::More,
                Head::Failed => Step::Failed(self.from),
                Head::Name(name, brace) => {
                    say_call(pieces, message, &name);
                    self.said = true;
                    self.at = brace;
                    self.kind = Kind::Named(Some(Arguments { scanner: Scanner::new(), from: brace }));
                    return self.read(reading, text, over, pieces, message);
                }
            },
            Kind::Named(Some(arguments)) => arguments.read(text, &mut self.at, pieces, message),
            Kind::Tagged(tagged) => tagged.read(reading, text, over, &mut self.said, pieces, message),
            Kind::Code => code(reading, text, self.from, over, &mut self.said, pieces, message),
        };
        match (step, over) {
            (Step::More, Some(over)) if over.cut && self.said => Step::Done(text.len()),
            (Step::More, Some(_)) => Step::Failed(text.len()),
            _ => step,
        }
    }
}

impl Arguments {
    /// `at` is the first byte that was not read.
    fn read(&mut self, text: &str, at: &mut usize, pieces: &mut Vec<Piece>, message: &mut Message) -> Step {
        let said = *at;
        for byte in text[*at..].bytes() {
            match self.scanner.push(byte) {
                Err(NotJson) => return Step::Failed(*at),
                Ok(Seen::End) => {
                    *at += 1;
                    if serde_json::from_str::<Value>(&text[self.from..*at]).is_err() {
                        return Step::Failed(*at);
                    }
                    say_arguments(pieces, message, &text[said..*at]);
                    say_called(pieces, message);
                    return Step::Done(*at);
                }
                Ok(_) => *at += 1,
            }
        }
        say_arguments(pieces, message, &text[said..*at]);
        Step::More
    }
}

enum Head {
    More,
    Failed,
    /// The name, and where the arguments begin.
    Name(String, usize),
}

fn head(reading: &Reading, text: &str, from: usize, bare: bool) -> Head {
    let CallShape::Named { before, between, also, .. } = reading.format.call else { return Head::Failed };
    let rest = &text[from..];
    if bare && !bare_name(reading, rest) {
        return Head::Failed;
    }
    let Some(brace) = rest.find('{').filter(|&brace| brace <= LONGEST_HEAD) else {
        return if rest.len() > LONGEST_HEAD { Head::Failed } else { Head::More };
    };
    let mut head = rest[..brace].trim();
    head = head.strip_prefix(before).unwrap_or(head).trim_start();
    for literal in also.iter().filter(|literal| literal.starts_with("function")) {
        head = head.strip_prefix(literal).unwrap_or(head).trim_start();
    }
    let (name, mut tail) = head.split_at(name_len(head));
    while !tail.trim_start().is_empty() {
        tail = tail.trim_start();
        let Some(literal) = also.iter().chain([&between]).find(|literal| tail.starts_with(**literal)) else {
            return Head::Failed;
        };
        tail = &tail[literal.len()..];
        if *literal == "[CALL_ID]" {
            tail = &tail[name_len(tail)..];
        }
        if literal.is_empty() {
            return Head::Failed;
        }
    }
    // Kimi numbers its calls: functions.name:0.
    let name = name.strip_prefix("functions.").unwrap_or(name);
    let name = match name.rsplit_once(':') {
        Some((name, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => name,
    };
    if name.is_empty() { Head::Failed } else { Head::Name(name.to_owned(), from + brace) }
}

/// Whether the text begins with the name of a tool on a line of its own, then an object; or may still come to it.
fn bare_name(reading: &Reading, text: &str) -> bool {
    reading.tools.iter().any(|tool| match text.strip_prefix(tool.name.as_str()) {
        Some(rest) => {
            let space = rest.len() - rest.trim_start().len();
            rest.is_empty()
                || (rest[..space].contains('\n') && (rest[space..].is_empty() || rest[space..].starts_with('{')))
                || rest[space..].is_empty()
        }
        None => tool.name.starts_with(text),
    })
}

/// Llama's built-in tools: `name.call(key="value")`, or code for a tool that runs it.
fn code(
    reading: &Reading,
    text: &str,
    from: usize,
    over: Option<Over>,
    said: &mut bool,
    pieces: &mut Vec<Piece>,
    message: &mut Message,
) -> Step {
    let Some(over) = over else { return Step::More };
    let written = &text[from..];
    let call = builtin(written.trim()).filter(|(name, _)| reading.tools.iter().any(|tool| tool.name == *name));
    let call = call.or_else(|| {
        let tool = reading.tools.iter().find(|tool| CODE_TOOLS.contains(&tool.name.as_str()))?;
        Some((tool.name.clone(), serde_json::json!({ "code": written }).to_string()))
    });
    match call {
        Some((name, arguments)) if !over.cut => {
            say_call(pieces, message, &name);
            *said = true;
            say_arguments(pieces, message, &arguments);
            say_called(pieces, message);
            Step::Done(text.len())
        }
        _ => Step::Failed(text.len()),
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
