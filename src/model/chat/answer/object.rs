//! Parser of a call that is an object with name and arguments.

use super::AnswerFormat;
use super::call::{CallProgress, CallText};
use super::json::{ByteEffect, Scanner};
use super::output::AnswerOutput;
use crate::model::chat::syntax::CallShape;
use serde_json::Value;

/// Keys that models use for the name.
const NAMES: &[&str] = &["name", "tool_name"];
/// Keys that models use for the arguments.
const ARGUMENTS: &[&str] = &["arguments", "parameters"];
/// Other keys that may start a bare call; an object with different keys is a JSON answer.
const OTHER_KEYS: &[&str] = &["type", "id", "tool_call_id", "function"];

/// The parser of one object.
#[derive(Debug)]
pub(super) struct ObjectParser {
    /// End of the parsed text.
    at: usize,
    /// True if no marker precedes the call.
    bare: bool,
    /// True if the name of the function was sent.
    has_begun: bool,
    scanner: Scanner,
    /// The last key of the object.
    key: String,
    /// Start of the object's first key.
    first_key: Option<usize>,
    /// Start of the last key.
    key_from: usize,
    /// Start of the current value.
    value_from: Option<usize>,
    /// Name of the function.
    name: Option<String>,
    /// Start of the arguments if they are an object, and the end of their sent part.
    arguments: Option<(usize, usize)>,
    arguments_end: Option<usize>,
    /// The arguments, if they are not written as an object.
    converted: Option<String>,
    /// True if the function's name may be the key of the arguments.
    by_key: bool,
    /// The keys that the template uses for the name and the arguments.
    template_keys: Option<(String, String)>,
}

impl ObjectParser {
    pub(super) fn new(shape: &CallShape, at: usize, bare: bool) -> Self {
        Self {
            at,
            bare,
            has_begun: false,
            scanner: Scanner::new(),
            key: String::new(),
            first_key: None,
            key_from: 0,
            value_from: None,
            name: None,
            arguments: None,
            arguments_end: None,
            converted: None,
            by_key: matches!(shape, CallShape::Json(keys) if keys.name.is_none()),
            template_keys: match shape {
                CallShape::Json(keys) => keys.name.clone().map(|name| (name, keys.arguments.clone())),
                _ => None,
            },
        }
    }

    pub(super) fn parse(&mut self, call: CallText<'_>, output: &mut AnswerOutput) -> CallProgress {
        let CallText { answer_format, text, .. } = call;
        for byte in text[self.at..].bytes() {
            let Ok(effect) = self.scanner.push(byte) else { return CallProgress::Failed(self.at) };
            let here = self.at;
            self.at += 1;
            let accepted = match effect {
                ByteEffect::Inside => Some(()),
                ByteEffect::KeyBegin => {
                    self.first_key.get_or_insert(here);
                    self.key_from = here;
                    Some(())
                }
                ByteEffect::KeyEnd => self.take_key(answer_format, &text[self.key_from..self.at]),
                ByteEffect::ValueBegin => {
                    self.value_from = Some(here);
                    if byte == b'{' && self.is_arguments() && self.has_no_arguments() {
                        self.arguments = Some((here, here));
                    }
                    Some(())
                }
                ByteEffect::ValueEnd => self.take_value(answer_format, text, self.at),
                ByteEffect::AfterValue => self.take_value(answer_format, text, here),
                ByteEffect::End => {
                    let accepted = match self.value_from {
                        Some(_) => self.take_value(answer_format, text, here),
                        None => Some(()),
                    };
                    let done = accepted.and_then(|()| self.finish(&text[..self.at], output));
                    return done.map_or(CallProgress::Failed(here), |()| CallProgress::Done(self.at));
                }
            };
            if accepted.is_none() {
                return CallProgress::Failed(here);
            }
        }
        self.emit(text, self.at, output);
        CallProgress::More
    }

    fn has_no_arguments(&self) -> bool {
        self.arguments.is_none() && self.converted.is_none()
    }

    fn is_arguments(&self) -> bool {
        if self.by_key {
            return self.name.as_ref() == Some(&self.key);
        }
        ARGUMENTS.contains(&self.key.as_str()) || self.template_keys.as_ref().is_some_and(|(_, key)| *key == self.key)
    }

    fn is_name(&self) -> bool {
        let in_template = self.template_keys.as_ref().is_some_and(|(key, _)| *key == self.key);
        !self.by_key && (in_template || NAMES.contains(&self.key.as_str()))
    }

    fn take_key(&mut self, answer_format: &AnswerFormat, quoted: &str) -> Option<()> {
        self.key = serde_json::from_str(quoted).ok()?;
        if self.by_key && self.name.is_none() {
            self.by_key = answer_format.tools.iter().any(|tool| tool.name == self.key);
            if self.by_key {
                self.name = Some(self.key.clone());
            }
            return Some(());
        }
        let key = self.key.as_str();
        let expected = OTHER_KEYS.contains(&key) || self.is_name() || self.is_arguments();
        (expected || !self.bare).then_some(())
    }

    fn take_value(&mut self, answer_format: &AnswerFormat, text: &str, end: usize) -> Option<()> {
        let from = self.value_from.take()?;
        let value = &text[from..end];
        let key = self.key.as_str();
        if self.is_name() {
            let name: String = serde_json::from_str(value).ok()?;
            let known = answer_format.tools.iter().any(|tool| tool.name == name);
            if name.is_empty() || self.name.is_some() || (self.bare && !known) {
                return None;
            }
            self.name = Some(name);
        } else if self.is_arguments() {
            if let Some((begin, _)) = self.arguments {
                if begin != from {
                    return None;
                }
                self.arguments_end = Some(end);
                // serde rejects half of a surrogate pair, but the scanner accepts it.
                serde_json::from_str::<Value>(value).ok()?;
            } else if self.has_no_arguments() {
                self.converted = Some(object_text(serde_json::from_str(value).ok()?)?);
            } else {
                return None;
            }
        } else if self.bare && key == "type" && value != "\"function\"" {
            return None;
        }
        Some(())
    }

    /// Sends the name as soon as the arguments start, then the arguments up to `upto`.
    fn emit(&mut self, text: &str, upto: usize, output: &mut AnswerOutput) {
        let Some(name) = &self.name else { return };
        if let Some((_, sent_upto)) = &mut self.arguments {
            if !self.has_begun {
                output.begin_call(name);
                self.has_begun = true;
            }
            let upto = self.arguments_end.unwrap_or(upto);
            if upto > *sent_upto {
                output.push_arguments(&text[*sent_upto..upto]);
                *sent_upto = upto;
            }
        }
    }

    fn finish(&mut self, text: &str, output: &mut AnswerOutput) -> Option<()> {
        if self.name.is_none() {
            // OpenAI's format: {"type": "function", "function": {…}}.
            let from = self.object_start(text)?;
            let whole: Value = serde_json::from_str(&text[from..]).ok()?;
            let function = &whole["function"];
            self.name = Some(function["name"].as_str().filter(|name| !name.is_empty())?.to_owned());
            self.arguments = None;
            let arguments = ARGUMENTS.iter().find_map(|key| function.get(key)).cloned().unwrap_or(Value::Null);
            self.converted = Some(object_text(arguments)?);
        }
        self.emit(text, text.len(), output);
        if !self.has_begun {
            output.begin_call(self.name.as_deref()?);
            self.has_begun = true;
            output.push_arguments(self.converted.as_deref().unwrap_or("{}"));
        }
        output.end_call();
        Some(())
    }

    fn object_start(&self, text: &str) -> Option<usize> {
        // The first key is inside the object, with only whitespace before it.
        text[..self.first_key?].rfind('{')
    }
}

/// Returns arguments as the text of a JSON object. They may also be missing, or a string with the text of an object.
fn object_text(value: Value) -> Option<String> {
    match value {
        Value::Null => Some("{}".into()),
        Value::String(text) if text.trim().is_empty() => Some("{}".into()),
        Value::String(text) => serde_json::from_str::<Value>(&text).ok().filter(Value::is_object).map(|_| text),
        Value::Object(_) => Some(value.to_string()),
        _ => None,
    }
}
