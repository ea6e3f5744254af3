//! Parser of a call with arguments in tags. Each complete argument becomes a member of the JSON arguments.

mod value_type;

use super::call::{CallProgress, CallText, MAX_NAME, PartialMatch, parse_name, skip_space};
use super::output::AnswerOutput;
use super::{AnswerFormat, TextEnd, len_before_partial_marker, literals};
use crate::model::chat::pattern::{PatternMatch, Placeholder, match_literal};
use crate::model::chat::syntax::{CallShape, Tags};
use serde_json::{Map, Value};
use value_type::{ArgumentsSchema, ValueType, container_schema, unclosed_string};

/// Maximum nesting of values that are also written in tags.
const MAX_DEPTH: usize = 60;

/// Delimiters of unparsed text in XML.
const CDATA: (&str, &str) = ("<![CDATA[", "]]>");

/// The parser of one call.
#[derive(Debug)]
pub(super) struct TaggedParser {
    at: usize,
    name: Option<String>,
    /// Number of sent arguments.
    count: usize,
    /// The argument with the current value.
    open: Option<Argument>,
}

#[derive(Debug)]
struct Argument {
    key: String,
    /// Type of the value according to its tag.
    type_name: Option<String>,
    from: usize,
    /// The text that ends the value.
    close: String,
    /// The text that starts a nested value with the same end.
    nested: Option<String>,
    depth: usize,
    /// End of the searched text.
    searched: usize,
}

impl TaggedParser {
    pub(super) fn new(at: usize) -> Self {
        Self { at, name: None, count: 0, open: None }
    }

    pub(super) fn parse(&mut self, call: CallText<'_>, output: &mut AnswerOutput) -> CallProgress {
        let CallText { answer_format, form, text, text_end } = call;
        let CallShape::Tagged(tags) = &form.shape else { return CallProgress::Failed(self.at) };
        if self.name.is_none() {
            match parse_name(call, self.at, &tags.after_name) {
                PartialMatch::Found((name, end)) => {
                    output.begin_call(name);
                    self.name = Some(name.to_owned());
                    self.at = end;
                }
                PartialMatch::More => return CallProgress::More,
                PartialMatch::No => return CallProgress::Failed(self.at),
            }
        }
        loop {
            if self.open.is_none() {
                match self.open_argument(call, tags) {
                    PartialMatch::Found(true) => {}
                    PartialMatch::Found(false) => {
                        output.end_members(self.count);
                        return CallProgress::Done(self.at);
                    }
                    PartialMatch::More => return CallProgress::More,
                    PartialMatch::No => return CallProgress::Failed(self.at),
                }
            }
            let Some(argument) = &mut self.open else { return CallProgress::More };
            let Some(end) = argument.find_end(text, tags) else {
                if text_end == TextEnd::Cut {
                    self.emit_cut(call, tags, output);
                }
                return CallProgress::More;
            };
            let written = strip_line_breaks(&text[argument.from..end], tags);
            let values = ValueParser::new(tags, answer_format, self.name.as_deref());
            let schema = values.arguments.argument(&argument.key);
            let value = values.parse(&schema, argument.type_name.as_deref(), written, 0);
            output.push_member(self.count, &argument.key, &value);
            self.count += 1;
            self.at = end + argument.close.len();
            self.open = None;
        }
    }

    /// Consumes the start of the next argument. Returns `Found(false)` at the end of the call.
    fn open_argument(&mut self, call: CallText<'_>, tags: &Tags) -> PartialMatch<bool> {
        let CallText { form, text, text_end, .. } = call;
        self.at = skip_space(text, self.at);
        let start = self.at;
        let rest = &text[start..];
        if rest.is_empty() {
            let complete = text_end == TextEnd::Complete && (self.count > 0 || form.after.is_blank());
            return if complete { PartialMatch::Found(false) } else { PartialMatch::More };
        }
        // A limit may have cut the answer within a tag.
        let may_continue = text_end != TextEnd::Complete;
        // Check for the end first, because it may start like another argument.
        let end = form.after.marker().unwrap_or_default();
        match match_literal(rest, end) {
            PatternMatch::Whole(_) if !end.is_empty() => return PartialMatch::Found(false),
            PatternMatch::Partial if may_continue => return PartialMatch::More,
            _ => {}
        }
        let from = match tags.before_key.match_whole(rest) {
            PatternMatch::Whole(len) => start + len,
            PatternMatch::Partial if may_continue => return PartialMatch::More,
            _ => return if end.is_empty() { PartialMatch::Found(false) } else { PartialMatch::No },
        };
        let marker = tags.middle.marker().unwrap_or_default();
        let Some(len) = text[from..].find(marker) else {
            return if text.len() - from > MAX_NAME + marker.len() { PartialMatch::No } else { PartialMatch::More };
        };
        let key = text[from..from + len].trim();
        if key.is_empty() || len > MAX_NAME {
            return PartialMatch::No;
        }
        let (matched, type_name) = tags.middle.match_with_word(&text[from + len..]);
        let PatternMatch::Whole(middle) = matched else {
            return if matched == PatternMatch::Partial { PartialMatch::More } else { PartialMatch::No };
        };
        let from = from + len + middle;
        let close = tags.after_value.replace(Placeholder::Key.mark(), key);
        let nested = (close != tags.after_value).then(|| opening_tag(tags, key));
        let (key, type_name) = (key.to_owned(), type_name.map(str::to_owned));
        self.open = Some(Argument { key, type_name, from, close, nested, depth: 0, searched: from });
        PartialMatch::Found(true)
    }

    /// Sends the incomplete value of an answer that a limit ended. A text becomes an unclosed string.
    fn emit_cut(&mut self, call: CallText<'_>, tags: &Tags, output: &mut AnswerOutput) {
        let CallText { answer_format, text, .. } = call;
        let Some(argument) = self.open.take() else { return };
        let value = &text[argument.from..];
        let value = &value[..len_before_partial_marker(value, [argument.close.as_str()])];
        let written = strip_line_breaks(value, tags);
        let values = ValueParser::new(tags, answer_format, self.name.as_deref());
        let schema = values.arguments.argument(&argument.key);
        let value_type = values.value_type(&schema, argument.type_name.as_deref());
        let unfinished = if let Some(text) = cut_unparsed_text(written) {
            unclosed_string(text)
        } else {
            // The start of a value may be that of the delimiter, which is not part of the value.
            let written = if CDATA.0.starts_with(written) { "" } else { written };
            value_type.parse_start(written).unwrap_or_else(|| written.trim().to_owned())
        };
        output.push_member(self.count, &argument.key, unfinished);
        self.at = text.len();
    }
}

impl Argument {
    /// Returns the end of the value; `None` if more text is needed. The next call does not search the same text again.
    fn find_end(&mut self, text: &str, tags: &Tags) -> Option<usize> {
        let is_unparsed = strip_line_breaks(&text[self.from..], tags).starts_with(CDATA.0);
        loop {
            let rest = &text[self.searched..];
            let close = rest.find(&self.close);
            let nested = self.nested.as_ref().filter(|_| !is_unparsed);
            let open = nested.and_then(|nested| rest[..close.unwrap_or(rest.len())].find(nested.as_str()));
            match (open, close) {
                (Some(at), _) => {
                    self.depth += 1;
                    self.searched += at + self.nested.as_ref().map_or(1, String::len);
                }
                (None, Some(at)) if self.depth > 0 => {
                    self.depth -= 1;
                    self.searched += at + self.close.len();
                }
                (None, Some(at)) => {
                    let end = self.searched + at;
                    if !is_unparsed || strip_line_breaks(&text[self.from..end], tags).ends_with(CDATA.1) {
                        return Some(end);
                    }
                    self.searched = end + self.close.len();
                }
                (None, None) => {
                    let longest = self.close.len().max(self.nested.as_ref().map_or(0, String::len));
                    let mut upto = text.len().saturating_sub(longest).max(self.searched);
                    while !text.is_char_boundary(upto) {
                        upto -= 1;
                    }
                    self.searched = upto;
                    return None;
                }
            }
        }
    }
}

/// Returns the tag before a value with this key.
fn opening_tag(tags: &Tags, key: &str) -> String {
    format!("{}{key}{}", tags.before_key.marker().unwrap_or_default(), tags.middle.marker().unwrap_or_default())
}

/// Removes the line breaks around a value on separate lines.
fn strip_line_breaks<'t>(value: &'t str, tags: &Tags) -> &'t str {
    if !tags.lines {
        return value;
    }
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// Returns the text of a value that starts with the delimiter of unparsed text and may be incomplete.
fn cut_unparsed_text(written: &str) -> Option<&str> {
    let text = written.strip_prefix(CDATA.0)?;
    Some(text.strip_suffix(CDATA.1).unwrap_or_else(|| &text[..len_before_partial_marker(text, [CDATA.1])]))
}

/// A parser of complete values in a call.
#[derive(Clone, Copy)]
struct ValueParser<'a> {
    tags: &'a Tags,
    arguments: ArgumentsSchema<'a>,
}

impl<'a> ValueParser<'a> {
    /// Creates a parser for calls of this tool.
    fn new(tags: &'a Tags, answer_format: &'a AnswerFormat, tool: Option<&str>) -> Self {
        let tool = answer_format.tools.iter().find(|candidate| Some(candidate.name.as_str()) == tool);
        let (root, strict) = tool.map_or((&Value::Null, false), |tool| (&tool.parameters, tool.strict));
        Self { tags, arguments: ArgumentsSchema { root, strict } }
    }

    /// Returns the type of a value according to its tag, or else to its schema.
    fn value_type(self, schema: &Value, type_name: Option<&str>) -> ValueType {
        let text = self.tags.type_names.iter().find(|(json, _)| *json == "string");
        if let (Some(type_name), Some((_, text))) = (type_name, text) {
            return if type_name == text { ValueType::Text } else { ValueType::Other };
        }
        ValueType::from_schema(schema, self.arguments)
    }

    /// Converts a value to the type in its tag or in the schema, or else to the type that its text looks like. `depth` is
    /// the number of elements around it.
    fn parse(self, schema: &Value, type_name: Option<&str>, written: &str, depth: usize) -> Value {
        if let Some(text) = written.strip_prefix(CDATA.0).and_then(|text| text.strip_suffix(CDATA.1)) {
            return text.into();
        }
        if let Some(value) = self.value_type(schema, type_name).parse(written) {
            return value;
        }
        if self.tags.after_value.contains(Placeholder::Key.mark())
            && let Some(value) = self.parse_elements(schema, written, depth)
        {
            return value;
        }
        literals::parse(written.trim()).unwrap_or_else(|| written.into())
    }

    /// Parses a value written as elements, each with its key: an object, or a list of `item`s.
    fn parse_elements(self, schema: &Value, written: &str, depth: usize) -> Option<Value> {
        let tags = self.tags;
        let (before, middle) = (tags.before_key.marker()?, tags.middle.marker()?);
        let mut rest = written.trim();
        if depth > MAX_DEPTH || !rest.starts_with(before) {
            return None;
        }
        let (first_key, _) = rest.strip_prefix(before)?.split_once(middle)?;
        let schema = container_schema(schema, self.arguments.root, first_key == "item");
        let mut members: Vec<(&str, Value)> = Vec::new();
        while !rest.is_empty() {
            let (key, _) = rest.strip_prefix(before)?.split_once(middle)?;
            let from = before.len() + key.len() + middle.len();
            let mut argument = Argument {
                key: key.to_owned(),
                type_name: None,
                from,
                close: tags.after_value.replace(Placeholder::Key.mark(), key),
                nested: Some(opening_tag(tags, key)),
                depth: 0,
                searched: from,
            };
            let end = argument.find_end(rest, tags)?;
            let member_schema = match (&schema["properties"][key], &schema["items"]) {
                (Value::Null, items) => items,
                (property, _) => property,
            };
            let written = strip_line_breaks(&rest[from..end], tags);
            members.push((key, self.parse(member_schema, None, written, depth + 1)));
            rest = rest[end + argument.close.len()..].trim_start();
        }
        let is_list = match schema["type"].as_str() {
            Some(name) => name == "array",
            None => members.iter().all(|(key, _)| *key == "item"),
        };
        Some(if is_list {
            members.into_iter().map(|(_, value)| value).collect()
        } else {
            Value::Object(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>())
        })
    }
}
