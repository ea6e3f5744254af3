//! Derivation of the form of calls from renderings of known calls: the text before, inside, between and after calls.

use super::probe::{IDS, KEYS, KnownCall, NAMES, Probe, VALUES, call, typed_arguments, with_arguments};
use super::segments::{common_end, common_start, segments};
use crate::model::chat::pattern::{Pattern, Placeholder};
use crate::model::chat::syntax::{CallForm, CallShape, Keys, Tags};
use serde_json::{Value, json};
use std::ops::Range;

/// Maximum positions to search for an object.
const MAX_TRIES: usize = 64;

/// A call in a rendering.
struct LocatedCall {
    /// Start of the object or the name.
    start: usize,
    end: usize,
    shape: RenderedShape,
}

/// Rendered texts around the name, the keys and the values of a call.
#[derive(Debug, Clone, PartialEq)]
enum RenderedShape {
    Json { name: Option<String>, arguments: String, head: String, tail: String },
    Named { middle: String },
    Braces { quote: String },
    Python,
    Tagged { to_key: String, middle: String },
}

/// Derives the form of calls. `rest` returns a rendering's text after the start of the assistant's message, and
/// `tail` is the text after an answer without calls.
pub(super) fn derive(probe: &Probe<'_>, rest: &dyn Fn(&str) -> String, tail: Option<&str>) -> Option<CallForm> {
    let ended = |text: &str, end: usize| {
        let after = text[end..].to_owned();
        let common = tail.map_or(0, |tail| common_end(&after, tail));
        replace_with_marks(&after[..after.len() - common])
    };
    let one = rest(&probe.calls(&[call(0)])?);
    let single = locate(&one, 0, 0)?;
    let two = probe.calls(&[call(0), call(1)]).map(|text| rest(&text));
    let pair = two.as_ref().and_then(|two| {
        let first = locate(two, 0, 0)?;
        let second = locate(two, first.end, 1)?;
        Some((first, second))
    });
    let (before, mut between, mut after) = match (&two, &pair) {
        (Some(two), Some((first, second))) => (
            replace_with_marks(&two[..first.start]),
            Some(replace_with_marks(&two[first.end..second.start])),
            ended(two, second.end),
        ),
        _ => (replace_with_marks(&one[..single.start]), None, ended(&one, single.end)),
    };
    let shape = match &pair {
        Some((first, second)) => merge(&first.shape, &second.shape)?,
        None => single.shape,
    };
    let shape = match shape {
        RenderedShape::Json { name, arguments, head, tail } => {
            CallShape::Json(Keys { name, arguments, head: Pattern::new(&head), tail: Pattern::new(&tail) })
        }
        RenderedShape::Named { middle } => CallShape::named(&middle),
        RenderedShape::Braces { quote } => CallShape::Braces { quote },
        RenderedShape::Python => CallShape::Python,
        RenderedShape::Tagged { to_key, middle } => {
            let (tags, ending) = tags(probe, rest, &to_key, &middle, &after)?;
            after = after.strip_prefix(ending.as_str())?.to_owned();
            between = match between {
                Some(between) => Some(between.strip_prefix(ending.as_str())?.to_owned()),
                None => None,
            };
            CallShape::Tagged(tags)
        }
    };
    Some(split_block_text(&before, between.as_deref(), &after, shape))
}

/// Separates the text of a block from that of each call in it.
fn split_block_text(before: &str, between: Option<&str>, after: &str, shape: CallShape) -> CallForm {
    let (open, each, end, separator, close) = match between {
        Some(between) => {
            let (open, each) = before.split_at(before.len() - common_end(before, between));
            let between = &between[..between.len() - each.len()];
            let (end, close) = after.split_at(common_start(after, between));
            (open, each, end, &between[end.len()..], close)
        }
        None if before.trim_end().ends_with('[') => (before, "", "", ", ", after),
        None => ("", before, after, "", ""),
    };
    let form = CallForm::new(each, shape, end, separator);
    match (open.trim_end().strip_suffix('['), close.trim_start().strip_prefix(']')) {
        (Some(open), Some(close)) => form.in_list(open, close),
        _ => form.in_block(open, close),
    }
}

/// Replaces the names, ids and keys of the known calls with marks.
fn replace_with_marks(text: &str) -> String {
    let mut text = text.to_owned();
    for (words, placeholder) in [(NAMES, Placeholder::Name), (IDS, Placeholder::Id), (KEYS, Placeholder::Key)] {
        for word in words {
            text = text.replace(word, &placeholder.mark().to_string());
        }
    }
    text
}

/// Merges the texts of two calls, which may differ by a number.
fn merge(first: &RenderedShape, second: &RenderedShape) -> Option<RenderedShape> {
    Some(match (first, second) {
        (RenderedShape::Json { name, arguments, head, tail }, RenderedShape::Json { head: other, .. }) => {
            RenderedShape::Json {
                name: name.clone(),
                arguments: arguments.clone(),
                head: merge_numbered(head, other)?,
                tail: tail.clone(),
            }
        }
        (RenderedShape::Named { middle }, RenderedShape::Named { middle: other }) => {
            RenderedShape::Named { middle: merge_numbered(middle, other)? }
        }
        (RenderedShape::Tagged { to_key, middle }, RenderedShape::Tagged { to_key: other, .. }) => {
            RenderedShape::Tagged { to_key: merge_numbered(to_key, other)?, middle: middle.clone() }
        }
        (first, second) if first == second => first.clone(),
        _ => return None,
    })
}

/// Merges two equal texts, or two that differ in one number, with a mark for it.
fn merge_numbered(first: &str, second: &str) -> Option<String> {
    if first == second {
        return Some(first.to_owned());
    }
    let start: usize = first.chars().zip(second.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    let (first, second) = (first.split_at(start), second.split_at(start));
    let digits = |text: &str| text.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (a, b) = (digits(first.1), digits(second.1));
    let same = a > 0 && b > 0 && first.1[a..] == second.1[b..];
    same.then(|| format!("{}{}{}", first.0, Placeholder::Index.mark(), &first.1[a..]))
}

/// Finds the known call in a rendering, from a byte on.
fn locate(text: &str, from: usize, index: usize) -> Option<LocatedCall> {
    let (name, key, value) = (NAMES[index], KEYS[index], VALUES[index]);
    let key_at = from + text[from..].find(key)?;
    let key_end = key_at + key.len();
    let name_at = from + text[from..key_at].rfind(name)?;
    let name_end = name_at + name.len();
    let value_at = key_end + text[key_end..].find(value)?;
    let value_end = value_at + value.len();
    let arguments = json!({ key: value });
    if let Some(call) = object(text, from..name_at, &arguments, name) {
        return Some(call);
    }
    let to_key = &text[name_end..key_at];
    let middle = &text[key_end..value_at];
    let (end, shape) = if let Some(brace) = to_key.rfind('{')
        && let Some((written, len)) = json_at(&text[name_end + brace..])
        && written == arguments
    {
        (name_end + brace + len, RenderedShape::Named { middle: replace_with_marks(&to_key[..brace]) })
    } else if to_key == "(" && middle.starts_with('=') && text[value_end..].find(')')? <= 1 {
        (value_end + text[value_end..].find(')')? + 1, RenderedShape::Python)
    } else if to_key == "{" && middle.starts_with(':') {
        let quote = middle[1..].to_owned();
        let close = format!("{quote}}}");
        text[value_end..].strip_prefix(close.as_str())?;
        (value_end + close.len(), RenderedShape::Braces { quote })
    } else {
        (value_end, RenderedShape::Tagged { to_key: replace_with_marks(to_key), middle: middle.to_owned() })
    };
    Some(LocatedCall { start: name_at, end, shape })
}

/// Finds a call that is an object, which starts within `range`.
fn object(text: &str, range: Range<usize>, arguments: &Value, name: &str) -> Option<LocatedCall> {
    for (at, _) in text[range.clone()].match_indices('{').take(MAX_TRIES) {
        let at = range.start + at;
        let Some((object, len)) = json_at(&text[at..]) else { continue };
        let inner = object.get("function").filter(|inner| inner.is_object()).unwrap_or(&object);
        let Some(members) = inner.as_object() else { continue };
        let key_of =
            |wanted: &dyn Fn(&Value) -> bool| members.iter().find(|(_, value)| wanted(value)).map(|(key, _)| key);
        let Some(arguments_key) = key_of(&|value| value == arguments) else { continue };
        let name_key = key_of(&|value| *value == name);
        if name_key.is_none() && arguments_key != name {
            continue;
        }
        // The innermost object is the one with the arguments.
        let key = arguments.as_object()?.keys().next()?;
        let begin = text[at..at + len].find(&format!("\"{key}\"")).and_then(|key| text[at..at + key].rfind('{'))?;
        let (_, arguments_len) = json_at(&text[at + begin..])?;
        let shape = RenderedShape::Json {
            name: name_key.cloned(),
            arguments: if name_key.is_some() { arguments_key.clone() } else { String::new() },
            head: replace_with_marks(&text[at..at + begin]),
            tail: replace_with_marks(&text[at + begin + arguments_len..at + len]),
        };
        return Some(LocatedCall { start: at, end: at + len, shape });
    }
    None
}

/// Parses the JSON value at the start of a text; returns it with its length.
fn json_at(text: &str) -> Option<(Value, usize)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let value = values.next()?.ok()?;
    Some((value, values.byte_offset()))
}

/// Derives the tags of a call, and the rendered text that ends a value.
fn tags(
    probe: &Probe<'_>,
    rest: &dyn Fn(&str) -> String,
    to_key: &str,
    middle: &str,
    after: &str,
) -> Option<(Tags, String)> {
    let both = json!({ KEYS[0]: VALUES[0], KEYS[1]: VALUES[1] });
    let text = rest(&probe.calls(&[with_arguments(0, both)])?);
    let first = locate(&text, 0, 0)?;
    let next = first.end + text[first.end..].find(KEYS[1])?;
    // A value may end with its own key.
    let between = text[first.end..next].replace(KEYS[0], &Placeholder::Key.mark().to_string());
    let mut ending = between[..common_start(&between, after)].to_owned();
    if let Some(key) = ending.find(Placeholder::Key.mark()) {
        let mut end = 0;
        for segment in segments(&ending) {
            end += segment.len();
            if end > key {
                break;
            }
        }
        ending.truncate(end);
    }
    let ending = ending.trim_end().to_owned();
    let lines = middle.ends_with('\n') && ending.starts_with('\n');
    let after_value = if lines { ending.trim_start() } else { &ending }.to_owned();
    let to_next = &between[ending.len()..];
    let (after_name, before_key) = to_key.split_at(to_key.len() - common_end(to_key, to_next));
    let (middle, type_names) = type_names(probe, rest, middle);
    let middle = Pattern::new(&middle);
    if after_value.is_empty() || middle.marker().is_none() || Pattern::new(before_key).marker().is_none() {
        return None;
    }
    let tags =
        Tags { after_name: after_name.into(), before_key: before_key.into(), middle, after_value, type_names, lines };
    Some((tags, ending))
}

/// Derives the text between key and value, with a mark for the type name, and the type names.
fn type_names(probe: &Probe<'_>, rest: &dyn Fn(&str) -> String, middle: &str) -> (String, Vec<(&'static str, String)>) {
    let none = (middle.to_owned(), Vec::new());
    let Some(text) = probe.calls(&[with_arguments(0, typed_arguments())]).map(|text| rest(&text)) else { return none };
    let after_key = |key: &str| {
        let key = text.find(&format!("\"{key}\""))? + key.len() + 1;
        Some(&text[key..])
    };
    let Some(number) = after_key("amount").and_then(|text| text.split_once("7421")).map(|(middle, _)| middle) else {
        return none;
    };
    if number == middle {
        return none;
    }
    // The type is in quotes.
    let same: usize = middle.bytes().zip(number.bytes()).take_while(|(a, b)| a == b).count();
    let Some(begin) = middle.as_bytes()[..same].iter().rposition(|&byte| byte == b'"').map(|at| at + 1) else {
        return none;
    };
    let type_name = |text: &str| text.strip_prefix(&middle[..begin])?.split('"').next().map(str::to_owned);
    let Some(string) = type_name(middle) else { return none };
    let end = begin + string.len();
    let mut type_names = vec![("string", string)];
    for (name, key) in [("number", "amount"), ("boolean", "flag"), ("object", "nested"), ("array", "rows")] {
        if let Some(found) = after_key(key).and_then(type_name) {
            type_names.push((name, found));
        }
    }
    (format!("{}{}{}", &middle[..begin], Placeholder::TypeName.mark(), &middle[end..]), type_names)
}

/// Returns renderings of known calls to test a form with.
pub(super) fn samples(probe: &Probe<'_>) -> Vec<(String, Vec<KnownCall>)> {
    let both = json!({ KEYS[0]: VALUES[0], KEYS[1]: VALUES[1] });
    let samples = [
        vec![call(0)],
        vec![with_arguments(0, both)],
        vec![with_arguments(1, typed_arguments())],
        vec![call(0), call(1)],
        vec![with_arguments(0, json!({}))],
    ];
    samples.into_iter().filter_map(|calls| Some((probe.calls(&calls)?, calls))).collect()
}
