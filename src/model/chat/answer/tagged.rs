//! A call whose parameters stand in tags: each becomes a member of the arguments once it is complete.

use super::call::{Step, name_len};
use super::{Match, Message, Over, Piece, Reading, literal, say_arguments, say_call, say_called};
use crate::model::chat::family::Tags;
use serde_json::Value;

/// Longest name or key.
const LONGEST_NAME: usize = 200;

/// Reads one call.
#[derive(Debug)]
pub(super) struct Tagged {
    tags: Tags,
    at: usize,
    name: Option<String>,
    count: usize,
}

/// What a look at the text gave.
enum Look<T> {
    Found(T),
    More,
    No,
}

impl Tagged {
    pub(super) fn new(tags: Tags, at: usize) -> Self {
        Self { tags, at, name: None, count: 0 }
    }

    pub(super) fn read(
        &mut self,
        reading: &Reading,
        text: &str,
        over: Option<Over>,
        said: &mut bool,
        pieces: &mut Vec<Piece>,
        message: &mut Message,
    ) -> Step {
        if self.name.is_none() {
            match self.take_name(text, over.is_some()) {
                Look::Found(name) => {
                    say_call(pieces, message, &name);
                    *said = true;
                    self.name = Some(name);
                }
                Look::More => return Step::More,
                Look::No => return Step::Failed(self.at),
            }
        }
        loop {
            match self.parameter(text, over.is_some()) {
                Look::Found(Some((key, value))) => {
                    let value = self.json(reading, &key, value);
                    self.say_member(&key, &value, pieces, message);
                }
                Look::Found(None) => {
                    say_arguments(pieces, message, if self.count == 0 { "{}" } else { "}" });
                    say_called(pieces, message);
                    return Step::Done(self.at);
                }
                Look::More => {
                    if over.is_some_and(|over| over.cut) {
                        self.say_cut(reading, text, pieces, message);
                    }
                    return Step::More;
                }
                Look::No => return Step::Failed(self.at),
            }
        }
    }

    fn take_name(&mut self, text: &str, over: bool) -> Look<String> {
        let rest = &text[self.at..];
        let (open, close) = self.tags.name;
        match literal(rest, open) {
            Match::Begun if !open.is_empty() => return Look::More,
            Match::No => return Look::No,
            _ => {}
        }
        let rest = &rest[open.len()..];
        let len = name_len(rest);
        if len > LONGEST_NAME {
            return Look::No;
        }
        if len == rest.len() && !over {
            return Look::More;
        }
        if len == 0 {
            return Look::No;
        }
        match literal(&rest[len..], close) {
            Match::Begun if !close.is_empty() => Look::More,
            Match::No => Look::No,
            _ => {
                self.at += open.len() + len + close.len();
                Look::Found(rest[..len].to_owned())
            }
        }
    }

    /// The next parameter, or `None` at the end of the call.
    fn parameter<'t>(&mut self, text: &'t str, over: bool) -> Look<Option<(String, &'t str)>> {
        let (key_open, key_close) = self.tags.key;
        let (value_open, value_close) = self.tags.value;
        let start = skip_space(text, self.at);
        let rest = &text[start..];
        if rest.is_empty() {
            return if over && self.tags.end.is_empty() { Look::Found(None) } else { Look::More };
        }
        match literal(rest, key_open) {
            Match::Whole => {}
            Match::Begun if !over => return Look::More,
            _ => {
                return match (self.tags.end, literal(rest, self.tags.end)) {
                    ("", _) => Look::Found(None),
                    (end, Match::Whole) => {
                        self.at = start + end.len();
                        Look::Found(None)
                    }
                    (_, Match::Begun) => Look::More,
                    (_, Match::No) => {
                        self.at = start;
                        Look::No
                    }
                };
            }
        }
        let key_from = start + key_open.len();
        let Some(key_len) = text[key_from..].find(key_close) else {
            return if text.len() - key_from > LONGEST_NAME + key_close.len() { Look::No } else { Look::More };
        };
        let key = text[key_from..key_from + key_len].trim();
        if key.is_empty() || key_len > LONGEST_NAME {
            return Look::No;
        }
        let mut value_from = key_from + key_len + key_close.len();
        if !value_open.is_empty() {
            value_from = skip_space(text, value_from);
            match literal(&text[value_from..], value_open) {
                Match::Whole => value_from += value_open.len(),
                Match::Begun => return Look::More,
                Match::No => return Look::No,
            }
        }
        let Some(len) = text[value_from..].find(value_close) else { return Look::More };
        self.at = value_from + len + value_close.len();
        Look::Found(Some((key.to_owned(), bare_lines(&text[value_from..value_from + len]))))
    }

    fn say_member(&mut self, key: &str, value: &str, pieces: &mut Vec<Piece>, message: &mut Message) {
        let before = if self.count == 0 { "{" } else { ", " };
        say_arguments(pieces, message, &format!("{before}{}: {value}", Value::from(key)));
        self.count += 1;
    }

    /// The value as JSON: by the schema, or as it looks where the schema says nothing.
    fn json(&self, reading: &Reading, key: &str, value: &str) -> String {
        if !self.is_text(reading, key)
            && let Ok(parsed) = serde_json::from_str::<Value>(value.trim())
        {
            return parsed.to_string();
        }
        Value::from(value).to_string()
    }

    fn is_text(&self, reading: &Reading, key: &str) -> bool {
        let tool = reading.tools.iter().find(|tool| Some(&tool.name) == self.name.as_ref());
        tool.is_some_and(|tool| tool.parameters["properties"][key]["type"] == "string")
    }

    /// The answer ended within a value: what there is of it, as a text that is not closed.
    fn say_cut(&mut self, reading: &Reading, text: &str, pieces: &mut Vec<Piece>, message: &mut Message) {
        let (key_open, key_close) = self.tags.key;
        let start = skip_space(text, self.at);
        let Some((key, value)) = text[start..].strip_prefix(key_open).and_then(|rest| rest.split_once(key_close))
        else {
            return;
        };
        let value = value.trim_start().strip_prefix(self.tags.value.0).unwrap_or_default();
        let quoted = Value::from(value.strip_prefix('\n').unwrap_or(value)).to_string();
        let open = if self.is_text(reading, key.trim()) { quoted.trim_end_matches('"') } else { value.trim() };
        self.say_member(key.trim(), open, pieces, message);
        self.at = text.len();
    }
}

fn skip_space(text: &str, at: usize) -> usize {
    text.len() - text[at..].trim_start().len()
}

/// Models put a value on lines of its own.
fn bare_lines(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}
