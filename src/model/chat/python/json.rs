//! `tojson` as in transformers: `json.dumps` that keeps non-ASCII characters.

use super::MAX_INDENT;
use crate::model::chat::limited_text::LimitedText;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use std::io::{self, Write};

/// Writes a value as JSON. `indent`, `separators`, `sort_keys` and `ensure_ascii` have Python's meaning.
#[expect(clippy::needless_pass_by_value, reason = "minijinja passes keyword arguments by value")]
pub(super) fn tojson(value: &Value, arguments: Kwargs) -> Result<String, Error> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidOperation, message);
    let failed = |error: serde_json::Error| invalid(format!("the value cannot be written as JSON: {error}"));
    let indent = arguments.get::<Option<Value>>("indent").unwrap_or(None).filter(|indent| !indent.is_none());
    let indent = indent.map(|indent| match (indent.as_str(), indent.as_usize()) {
        (Some(text), _) => text.chars().take(MAX_INDENT).collect(),
        (None, width) => " ".repeat(width.unwrap_or(0).min(MAX_INDENT)),
    });
    let (mut item, mut key) = (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned());
    if let Some(separators) = arguments.get::<Option<Value>>("separators").unwrap_or(None).filter(|s| !s.is_none()) {
        let given: Vec<Value> = separators.try_iter()?.collect();
        let [first, second] = &given[..] else {
            return Err(invalid("`separators` of `tojson` must be a pair of strings".into()));
        };
        (item, key) = (first.to_string(), second.to_string());
    }
    let flag = |name: &str| arguments.get::<Option<bool>>(name).ok().flatten().unwrap_or(false);
    let sorted = if flag("sort_keys") { Some(sorted(value)?) } else { None };
    let mut out = LimitedText::default();
    let layout = Layout { item, key, indent, depth: 0, has_value: false };
    sorted.as_ref().unwrap_or(value).serialize(&mut Serializer::with_formatter(&mut out, layout)).map_err(failed)?;
    let text = String::from_utf8_lossy(&out.text).into_owned();
    Ok(if flag("ensure_ascii") { escaped(&text) } else { text })
}

/// Sorts the keys of every object.
fn sorted(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map => {
            let mut pairs = Vec::new();
            for key in value.try_iter()? {
                let item = sorted(&value.get_item(&key)?)?;
                pairs.push((key, item));
            }
            pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
            Ok(Value::from_pairs(pairs))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter()?.map(|item| sorted(&item)).collect::<Result<Vec<_>, _>>().map(Value::from)
        }
        _ => Ok(value.clone()),
    }
}

/// Escapes all non-ASCII characters as `\uXXXX`.
fn escaped(text: &str) -> String {
    use std::fmt::Write as _;
    let mut result = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_ascii() {
            result.push(letter);
            continue;
        }
        for unit in letter.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(result, "\\u{unit:04x}");
        }
    }
    result
}

/// The layout of `json.dumps`.
struct Layout {
    item: String,
    key: String,
    indent: Option<String>,
    depth: usize,
    has_value: bool,
}

impl Layout {
    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| writer.write_all(indent.as_bytes()))
    }

    fn open<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: u8) -> io::Result<()> {
        self.depth += 1;
        self.has_value = false;
        writer.write_all(&[bracket])
    }

    fn close<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: u8) -> io::Result<()> {
        self.depth -= 1;
        if self.has_value {
            self.new_line(writer)?;
        }
        self.has_value = true;
        writer.write_all(&[bracket])
    }

    fn next<W: ?Sized + Write>(&self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.new_line(writer)
    }
}

impl Formatter for Layout {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b'[')
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b']')
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b'{')
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b'}')
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }
}
