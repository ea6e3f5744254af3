//! The slow pass over a payload that the fast one did not take: walks it along the shape it should have, and names the
//! first value that differs with its JSON path, what was expected and what was found.

use super::time::{self, Timestamp};
use super::{DocumentError, MOST_REQUEST_ID_BYTES, raw};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// The objects of the document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Document,
    Request,
    Event,
    ModCall,
    ModLog,
    Action,
}

/// What a field takes.
#[derive(Clone, Copy)]
enum Kind {
    Text,
    /// Text that is not empty.
    Name,
    RequestId,
    Integer,
    Integers,
    Number,
    Bool,
    Time,
    /// Any JSON.
    Raw,
    Choice(&'static [&'static str]),
    Object(Shape),
    List(Shape),
}

const EVENT_TYPES: Kind = Kind::Choice(&["Prefilled", "ForwardPass", "Sampled", "Added"]);
const LOG_LEVELS: Kind = Kind::Choice(&["DEBUG", "INFO", "WARNING", "ERROR"]);
const ACTION_TYPES: Kind = Kind::Choice(&[
    "Noop",
    "AdjustedPrefill",
    "ForceTokens",
    "ForceOutput",
    "Backtrack",
    "AdjustedLogits",
    "ToolCalls",
    "EmitError",
]);

impl Shape {
    /// Name, kind, required.
    const fn fields(self) -> &'static [(&'static str, Kind, bool)] {
        match self {
            Self::Document => &[
                ("request", Kind::Object(Self::Request), true),
                ("events", Kind::List(Self::Event), false),
                ("mod_calls", Kind::List(Self::ModCall), false),
                ("mod_logs", Kind::List(Self::ModLog), false),
                ("actions", Kind::List(Self::Action), false),
            ],
            Self::Request => &[
                ("request_id", Kind::RequestId, true),
                ("created_at", Kind::Time, false),
                ("completed_at", Kind::Time, false),
                ("model", Kind::Text, false),
                ("user_api_key", Kind::Text, false),
                ("max_tokens", Kind::Integer, false),
                ("temperature", Kind::Number, false),
                ("mod_text", Kind::Text, false),
                ("system_prompt", Kind::Text, false),
                ("user_prompt", Kind::Text, false),
                ("system_prompt_token_ids", Kind::Integers, false),
                ("user_prompt_token_ids", Kind::Integers, false),
                ("active_mod_name", Kind::Text, false),
                ("final_text", Kind::Text, false),
                ("final_token_ids", Kind::Integers, false),
                ("inference_stats", Kind::Raw, false),
            ],
            Self::Event => &[
                ("event_type", EVENT_TYPES, true),
                ("step", Kind::Integer, true),
                ("sequence_order", Kind::Integer, true),
                ("created_at", Kind::Time, false),
                ("details", Kind::Raw, false),
                ("prompt_length", Kind::Integer, false),
                ("tokens_so_far_len", Kind::Integer, false),
                ("max_steps", Kind::Integer, false),
                ("input_text", Kind::Text, false),
                ("top_tokens", Kind::Raw, false),
                ("sampled_token", Kind::Integer, false),
                ("token_text", Kind::Text, false),
                ("added_tokens", Kind::Integers, false),
                ("added_token_count", Kind::Integer, false),
                ("forced", Kind::Bool, false),
            ],
            Self::ModCall => &[
                ("event_sequence_order", Kind::Integer, true),
                ("mod_name", Kind::Name, true),
                ("event_type", EVENT_TYPES, true),
                ("step", Kind::Integer, true),
                ("created_at", Kind::Time, false),
                ("execution_time_ms", Kind::Number, false),
                ("exception_occurred", Kind::Bool, false),
                ("exception_message", Kind::Text, false),
                ("exception_traceback", Kind::Text, false),
            ],
            Self::ModLog => &[
                ("mod_call_sequence", Kind::Integer, true),
                ("mod_name", Kind::Name, true),
                ("log_message", Kind::Text, true),
                ("log_level", LOG_LEVELS, false),
                ("created_at", Kind::Time, false),
            ],
            Self::Action => &[
                ("mod_call_sequence", Kind::Integer, true),
                ("action_type", ACTION_TYPES, true),
                ("action_order", Kind::Integer, true),
                ("created_at", Kind::Time, false),
                ("details", Kind::Raw, false),
                ("new_prompt", Kind::Text, false),
                ("new_length", Kind::Integer, false),
                ("adjusted_max_steps", Kind::Integer, false),
                ("token_count", Kind::Integer, false),
                ("tokens_preview", Kind::Text, false),
                ("backtrack_steps", Kind::Integer, false),
                ("backtrack_token_count", Kind::Integer, false),
                ("logits_shape", Kind::Text, false),
                ("temperature", Kind::Number, false),
                ("has_tool_calls", Kind::Bool, false),
                ("tool_calls", Kind::Raw, false),
                ("error_message", Kind::Text, false),
            ],
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text => f.write_str("a string"),
            Self::Name => f.write_str("a string that is not empty"),
            Self::RequestId => write!(f, "a string of 1 to {MOST_REQUEST_ID_BYTES} bytes"),
            Self::Integer => f.write_str("an integer from -2147483648 to 2147483647"),
            Self::Integers => f.write_str("an array of integers"),
            Self::Number => f.write_str("a number"),
            Self::Bool => f.write_str("true or false"),
            Self::Time => f.write_str(time::EXPECTED),
            Self::Raw => f.write_str("JSON"),
            Self::Choice(names) => {
                let (last, others) = names.split_last().unwrap_or((&"", &[]));
                for (index, name) in others.iter().enumerate() {
                    write!(f, "{}\"{name}\"", if index == 0 { "" } else { ", " })?;
                }
                write!(f, " or \"{last}\"")
            }
            Self::Object(_) => f.write_str("an object"),
            Self::List(_) => f.write_str("an array of objects"),
        }
    }
}

/// The first thing that is wrong with `text` as an object of this shape. `reason` is what the fast pass said.
pub fn problem(text: &str, shape: Shape, reason: &str) -> DocumentError {
    let found = match serde_json::from_str::<&RawValue>(text) {
        Ok(value) => object(value, shape, "$"),
        Err(error) => Err(problem_at("$", "JSON", error.to_string())),
    };
    // The fast pass is the judge: where the walk finds nothing, its own words have to do.
    found.err().unwrap_or_else(|| problem_at("$", "a document as /ingest takes it", reason))
}

fn problem_at(path: &str, expected: impl Into<String>, found: impl Into<String>) -> DocumentError {
    DocumentError { path: path.into(), expected: expected.into(), found: found.into() }
}

fn object(value: &RawValue, shape: Shape, path: &str) -> Result<(), DocumentError> {
    let Fields(fields) = serde_json::from_str(value.get()).map_err(|_| differs(path, &Kind::Object(shape), value))?;
    for (index, (name, _)) in fields.iter().enumerate() {
        let known = shape.fields().iter().any(|(known, ..)| known == name);
        if known && fields[..index].iter().any(|(before, _)| before == name) {
            return Err(problem_at(&format!("{path}.{name}"), "the field once", "it twice in one object"));
        }
    }
    for &(name, kind, required) in shape.fields() {
        let path = format!("{path}.{name}");
        match fields.iter().find(|(field, _)| field == name).map(|(_, value)| *value) {
            None if required => return Err(problem_at(&path, kind.to_string(), "nothing; the field is required")),
            Some(value) if value.get() == "null" && required => return Err(differs(&path, &kind, value)),
            Some(value) if value.get() != "null" => check(value, kind, &path)?,
            _ => {}
        }
    }
    Ok(())
}

fn check(value: &RawValue, kind: Kind, path: &str) -> Result<(), DocumentError> {
    let json = value.get();
    let fits = match kind {
        Kind::Object(shape) => return object(value, shape, path),
        Kind::List(shape) => {
            return list(value, kind, path, |value, path| object(value, shape, path));
        }
        Kind::Integers => {
            return list(value, kind, path, |value, path| match value.get() {
                "null" => Err(differs(path, &Kind::Integer, value)),
                _ => check(value, Kind::Integer, path),
            });
        }
        Kind::Raw => {
            return raw::problem(json).map_or(Ok(()), |(expected, found)| Err(problem_at(path, expected, found)));
        }
        Kind::Text | Kind::Name | Kind::RequestId => match serde_json::from_str::<String>(json) {
            Ok(text) => match kind {
                Kind::Text => true,
                Kind::Name => !text.is_empty(),
                _ => (1..=MOST_REQUEST_ID_BYTES).contains(&text.len()),
            },
            Err(error) if json.starts_with('"') => {
                return Err(problem_at(path, kind.to_string(), format!("{} ({error})", shorten(json))));
            }
            Err(_) => false,
        },
        Kind::Integer => serde_json::from_str::<i32>(json).is_ok(),
        Kind::Number => serde_json::from_str::<f64>(json).is_ok(),
        Kind::Bool => matches!(json, "true" | "false"),
        Kind::Time => serde_json::from_str::<Timestamp>(json).is_ok(),
        Kind::Choice(names) => serde_json::from_str::<Cow<'_, str>>(json).is_ok_and(|text| names.contains(&&*text)),
    };
    if fits { Ok(()) } else { Err(differs(path, &kind, value)) }
}

fn list(
    value: &RawValue,
    kind: Kind,
    path: &str,
    check: impl Fn(&RawValue, &str) -> Result<(), DocumentError>,
) -> Result<(), DocumentError> {
    let entries: Vec<&RawValue> = serde_json::from_str(value.get()).map_err(|_| differs(path, &kind, value))?;
    entries.iter().enumerate().try_for_each(|(index, entry)| check(entry, &format!("{path}[{index}]")))
}

fn differs(path: &str, kind: &Kind, value: &RawValue) -> DocumentError {
    problem_at(path, kind.to_string(), shorten(value.get()))
}

/// What was found, as it stands in the payload: scalars themselves, the beginning of long ones, the kind of others.
fn shorten(json: &str) -> String {
    const MOST_CHARS: usize = 60;
    match json.as_bytes().first() {
        Some(b'{') => "an object".into(),
        Some(b'[') => "an array".into(),
        _ if json.chars().count() > MOST_CHARS => json.chars().take(MOST_CHARS).chain(['…']).collect(),
        _ => json.into(),
    }
}

/// The fields of an object in order, twice-named ones too.
struct Fields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Fields<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, &RawValue>()? {
                    fields.push((Cow::Owned(name), value));
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}
