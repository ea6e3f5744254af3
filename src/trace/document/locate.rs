//! The slow pass over a payload that the fast pass rejected. It compares the payload with the expected structure and
//! reports the first mismatch: its JSON path, the expected and the found value.

use super::integer::{self, Integer};
use super::run_details::{
    EXPECTED_METADATA, EXPECTED_VALUE, MAX_DURATION_US, MAX_METADATA, MAX_SEED, MAX_TOKENS, is_accepted_key,
    is_accepted_value,
};
use super::time::{self, Timestamp};
use super::{DocumentError, MAX_REQUEST_ID_BYTES, raw};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

/// The objects of the document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    Document,
    Request,
    ThunderRun,
    Event,
    ModCall,
    ModLog,
    Action,
}

/// The expected type of a field.
#[derive(Clone, Copy)]
enum FieldKind {
    Text,
    /// A string that is not empty.
    Name,
    RequestId,
    Integer,
    Integers,
    /// An integer from 0 to this one.
    Unsigned(i64),
    Number,
    Bool,
    Time,
    /// The metadata of a run.
    Metadata,
    /// Any JSON.
    Raw,
    Choice(&'static [&'static str]),
    Object(ObjectKind),
    List(ObjectKind),
}

const EVENT_TYPES: FieldKind = FieldKind::Choice(&["Prefilled", "ForwardPass", "Sampled", "Added"]);
const LOG_LEVELS: FieldKind = FieldKind::Choice(&["DEBUG", "INFO", "WARNING", "ERROR"]);
const ACTION_TYPES: FieldKind = FieldKind::Choice(&[
    "Noop",
    "AdjustedPrefill",
    "ForceTokens",
    "ForceOutput",
    "Backtrack",
    "AdjustedLogits",
    "ToolCalls",
    "EmitError",
]);
const RUN_STATUSES: FieldKind = FieldKind::Choice(&["running", "done", "cancelled", "failed", "interrupted"]);
const FINISH_REASONS: FieldKind = FieldKind::Choice(&["stop", "length", "tool_calls", "cancelled", "error"]);
const END_CAUSES: FieldKind = FieldKind::Choice(&[
    "client_stop",
    "regenerate",
    "timeout",
    "cancel",
    "disconnect",
    "shutdown",
    "engine_stopped",
    "not_recorded",
    "out_of_memory",
    "decode_failed",
    "invalid_logits",
]);

impl ObjectKind {
    /// Returns name and type of each field, and true for required fields.
    const fn fields(self) -> &'static [(&'static str, FieldKind, bool)] {
        match self {
            Self::Document => &[
                ("request", FieldKind::Object(Self::Request), true),
                ("events", FieldKind::List(Self::Event), false),
                ("mod_calls", FieldKind::List(Self::ModCall), false),
                ("mod_logs", FieldKind::List(Self::ModLog), false),
                ("actions", FieldKind::List(Self::Action), false),
            ],
            Self::Request => &[
                ("request_id", FieldKind::RequestId, true),
                ("created_at", FieldKind::Time, false),
                ("completed_at", FieldKind::Time, false),
                ("model", FieldKind::Text, false),
                ("user_api_key", FieldKind::Text, false),
                ("max_tokens", FieldKind::Integer, false),
                ("temperature", FieldKind::Number, false),
                ("mod_text", FieldKind::Text, false),
                ("system_prompt", FieldKind::Text, false),
                ("user_prompt", FieldKind::Text, false),
                ("system_prompt_token_ids", FieldKind::Integers, false),
                ("user_prompt_token_ids", FieldKind::Integers, false),
                ("active_mod_name", FieldKind::Text, false),
                ("final_text", FieldKind::Text, false),
                ("final_token_ids", FieldKind::Integers, false),
                ("inference_stats", FieldKind::Raw, false),
                ("thunder_run", FieldKind::Object(Self::ThunderRun), false),
            ],
            Self::ThunderRun => &[
                ("status", RUN_STATUSES, false),
                ("finish_reason", FINISH_REASONS, false),
                ("end_cause", END_CAUSES, false),
                ("message", FieldKind::Text, false),
                ("seed", FieldKind::Unsigned(MAX_SEED), false),
                ("metadata", FieldKind::Metadata, false),
                ("prompt_preview", FieldKind::Text, false),
                ("prompt_tokens", FieldKind::Unsigned(MAX_TOKENS), false),
                ("cached_tokens", FieldKind::Unsigned(MAX_TOKENS), false),
                ("completion_tokens", FieldKind::Unsigned(MAX_TOKENS), false),
                ("first_token_us", FieldKind::Unsigned(MAX_DURATION_US), false),
                ("prompt_us", FieldKind::Unsigned(MAX_DURATION_US), false),
                ("generation_us", FieldKind::Unsigned(MAX_DURATION_US), false),
            ],
            Self::Event => &[
                ("event_type", EVENT_TYPES, true),
                ("step", FieldKind::Integer, true),
                ("sequence_order", FieldKind::Integer, true),
                ("created_at", FieldKind::Time, false),
                ("details", FieldKind::Raw, false),
                ("prompt_length", FieldKind::Integer, false),
                ("tokens_so_far_len", FieldKind::Integer, false),
                ("max_steps", FieldKind::Integer, false),
                ("input_text", FieldKind::Text, false),
                ("top_tokens", FieldKind::Raw, false),
                ("sampled_token", FieldKind::Integer, false),
                ("token_text", FieldKind::Text, false),
                ("added_tokens", FieldKind::Integers, false),
                ("added_token_count", FieldKind::Integer, false),
                ("forced", FieldKind::Bool, false),
            ],
            Self::ModCall => &[
                ("event_sequence_order", FieldKind::Integer, true),
                ("mod_name", FieldKind::Name, true),
                ("event_type", EVENT_TYPES, true),
                ("step", FieldKind::Integer, true),
                ("created_at", FieldKind::Time, false),
                ("execution_time_ms", FieldKind::Number, false),
                ("exception_occurred", FieldKind::Bool, false),
                ("exception_message", FieldKind::Text, false),
                ("exception_traceback", FieldKind::Text, false),
            ],
            Self::ModLog => &[
                ("mod_call_sequence", FieldKind::Integer, true),
                ("mod_name", FieldKind::Name, true),
                ("log_message", FieldKind::Text, true),
                ("log_level", LOG_LEVELS, false),
                ("created_at", FieldKind::Time, false),
            ],
            Self::Action => &[
                ("mod_call_sequence", FieldKind::Integer, true),
                ("action_type", ACTION_TYPES, true),
                ("action_order", FieldKind::Integer, true),
                ("created_at", FieldKind::Time, false),
                ("details", FieldKind::Raw, false),
                ("new_prompt", FieldKind::Text, false),
                ("new_length", FieldKind::Integer, false),
                ("adjusted_max_steps", FieldKind::Integer, false),
                ("token_count", FieldKind::Integer, false),
                ("tokens_preview", FieldKind::Text, false),
                ("backtrack_steps", FieldKind::Integer, false),
                ("backtrack_token_count", FieldKind::Integer, false),
                ("logits_shape", FieldKind::Text, false),
                ("temperature", FieldKind::Number, false),
                ("has_tool_calls", FieldKind::Bool, false),
                ("tool_calls", FieldKind::Raw, false),
                ("error_message", FieldKind::Text, false),
            ],
        }
    }
}

impl fmt::Display for FieldKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text => f.write_str("a string"),
            Self::Name => f.write_str("a string that is not empty"),
            Self::RequestId => write!(f, "a string of 1 to {MAX_REQUEST_ID_BYTES} bytes"),
            Self::Integer => f.write_str(integer::EXPECTED),
            Self::Integers => f.write_str("an array of integers"),
            Self::Unsigned(max) => write!(f, "an integer from 0 to {max}"),
            Self::Number => f.write_str("a number"),
            Self::Bool => f.write_str("true or false"),
            Self::Time => f.write_str(time::EXPECTED),
            Self::Metadata => f.write_str(EXPECTED_METADATA),
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

/// Finds the first error in `text`, which should be an object of this kind. `reason` is the error of the fast pass.
pub fn find_problem(text: &str, shape: ObjectKind, reason: &str) -> DocumentError {
    let found = match serde_json::from_str::<&RawValue>(text) {
        Ok(value) => object(value, shape, "$"),
        Err(error) => Err(problem_at("$", "valid JSON", format!("a syntax error: {error}"))),
    };
    // If the slow pass finds no error, report the message of the fast pass.
    found.err().unwrap_or_else(|| problem_at("$", "a valid /ingest document", reason))
}

fn problem_at(path: &str, expected: impl Into<String>, found: impl Into<String>) -> DocumentError {
    DocumentError { path: path.into(), expected: expected.into(), found: found.into() }
}

fn object(value: &RawValue, shape: ObjectKind, path: &str) -> Result<(), DocumentError> {
    let Fields(fields) =
        serde_json::from_str(value.get()).map_err(|_| mismatch(path, &FieldKind::Object(shape), value))?;
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
            Some(value) if value.get() == "null" && required => return Err(mismatch(&path, &kind, value)),
            Some(value) if value.get() != "null" => check(value, kind, &path)?,
            _ => {}
        }
    }
    Ok(())
}

fn check(value: &RawValue, kind: FieldKind, path: &str) -> Result<(), DocumentError> {
    let json = value.get();
    let fits = match kind {
        FieldKind::Object(shape) => return object(value, shape, path),
        FieldKind::Metadata => return metadata(value, path),
        FieldKind::List(shape) => {
            return list(value, kind, path, |value, path| object(value, shape, path));
        }
        FieldKind::Integers => {
            return list(value, kind, path, |value, path| match value.get() {
                "null" => Err(mismatch(path, &FieldKind::Integer, value)),
                _ => check(value, FieldKind::Integer, path),
            });
        }
        FieldKind::Raw => {
            return raw::find_problem(json).map_or(Ok(()), |(expected, found)| Err(problem_at(path, expected, found)));
        }
        FieldKind::Text | FieldKind::Name | FieldKind::RequestId => match serde_json::from_str::<String>(json) {
            Ok(text) => match kind {
                FieldKind::Text => true,
                FieldKind::Name => !text.is_empty(),
                _ => (1..=MAX_REQUEST_ID_BYTES).contains(&text.len()),
            },
            Err(error) if json.starts_with('"') => {
                return Err(problem_at(path, kind.to_string(), format!("{} ({error})", shorten(json))));
            }
            Err(_) => false,
        },
        FieldKind::Integer => serde_json::from_str::<Integer>(json).is_ok(),
        FieldKind::Unsigned(max) => integer::is_unsigned(json, max),
        FieldKind::Number => serde_json::from_str::<f64>(json).is_ok(),
        FieldKind::Bool => matches!(json, "true" | "false"),
        FieldKind::Time => serde_json::from_str::<Timestamp>(json).is_ok(),
        FieldKind::Choice(names) => {
            serde_json::from_str::<Cow<'_, str>>(json).is_ok_and(|text| names.contains(&&*text))
        }
    };
    if fits { Ok(()) } else { Err(mismatch(path, &kind, value)) }
}

fn metadata(value: &RawValue, path: &str) -> Result<(), DocumentError> {
    let kind = FieldKind::Metadata;
    let entries: BTreeMap<String, &RawValue> =
        serde_json::from_str(value.get()).map_err(|_| mismatch(path, &kind, value))?;
    if entries.len() > MAX_METADATA {
        return Err(problem_at(path, kind.to_string(), format!("{} entries", entries.len())));
    }
    entries.into_iter().try_for_each(|(key, value)| {
        if !is_accepted_key(&key) {
            return Err(problem_at(path, kind.to_string(), format!("the key {}", shorten(&format!("{key:?}")))));
        }
        let fits = serde_json::from_str::<String>(value.get()).is_ok_and(|text| is_accepted_value(&text));
        let path = format!("{path}[{key:?}]");
        if fits { Ok(()) } else { Err(problem_at(&path, EXPECTED_VALUE, shorten(value.get()))) }
    })
}

fn list(
    value: &RawValue,
    kind: FieldKind,
    path: &str,
    check: impl Fn(&RawValue, &str) -> Result<(), DocumentError>,
) -> Result<(), DocumentError> {
    let entries: Vec<&RawValue> = serde_json::from_str(value.get()).map_err(|_| mismatch(path, &kind, value))?;
    entries.iter().enumerate().try_for_each(|(index, entry)| check(entry, &format!("{path}[{index}]")))
}

fn mismatch(path: &str, kind: &FieldKind, value: &RawValue) -> DocumentError {
    problem_at(path, kind.to_string(), shorten(value.get()))
}

/// Describes a found value: scalars as written and shortened, objects and arrays by their kind.
fn shorten(json: &str) -> String {
    const MAX_CHARS: usize = 60;
    match json.as_bytes().first() {
        Some(b'{') => "an object".into(),
        Some(b'[') => "an array".into(),
        _ if json.chars().count() > MAX_CHARS => json.chars().take(MAX_CHARS).chain(['…']).collect(),
        _ => json.into(),
    }
}

/// The fields of an object in order, including duplicates.
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

#[cfg(test)]
mod tests {
    use super::{
        ACTION_TYPES, END_CAUSES, EVENT_TYPES, FINISH_REASONS, FieldKind, LOG_LEVELS, ObjectKind, RUN_STATUSES,
    };
    use crate::trace::document::DocumentWire;
    use serde_json::{Value, json};
    use std::collections::{BTreeMap, BTreeSet};
    use utoipa::{PartialSchema, ToSchema};

    fn texts(list: &Value) -> BTreeSet<&str> {
        list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
    }

    #[test]
    fn slow_pass_knows_the_fields_of_the_fast_pass() {
        let mut schemas = vec![("IngestDocument".to_owned(), DocumentWire::schema())];
        DocumentWire::schemas(&mut schemas);
        let schemas = json!(schemas.into_iter().collect::<BTreeMap<_, _>>());
        for (kind, name) in [
            (ObjectKind::Document, "IngestDocument"),
            (ObjectKind::Request, "IngestRequest"),
            (ObjectKind::ThunderRun, "IngestThunderRun"),
            (ObjectKind::Event, "IngestEvent"),
            (ObjectKind::ModCall, "IngestModCall"),
            (ObjectKind::ModLog, "IngestModLog"),
            (ObjectKind::Action, "IngestAction"),
        ] {
            let properties: BTreeSet<&str> =
                schemas[name]["properties"].as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(kind.fields().iter().map(|(field, ..)| *field).collect::<BTreeSet<_>>(), properties, "{name}");
            let required = kind.fields().iter().filter(|(.., required)| *required).map(|(field, ..)| *field);
            assert_eq!(required.collect::<BTreeSet<_>>(), texts(&schemas[name]["required"]), "{name}");
        }
        for (kind, name) in [
            (EVENT_TYPES, "EventType"),
            (LOG_LEVELS, "LogLevel"),
            (ACTION_TYPES, "ActionType"),
            (RUN_STATUSES, "RunStatus"),
            (FINISH_REASONS, "FinishReason"),
            (END_CAUSES, "EndCause"),
        ] {
            let FieldKind::Choice(names) = kind else { unreachable!("the constants are choices") };
            assert_eq!(names.iter().copied().collect::<BTreeSet<_>>(), texts(&schemas[name]["enum"]), "{name}");
        }
    }
}
