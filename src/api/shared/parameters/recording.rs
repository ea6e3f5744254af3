//! Fields that identify a run and determine how it is recorded.

use crate::api::shared::fields::{Fields, invalid_value};
use crate::engine::RecordPolicy;
use crate::events::{RunMetadata, is_reserved_request_id};
use crate::server::ApiError;
use serde_json::Value;

/// Maximum length of `request_id` in bytes, and of the user label in characters.
const MAX_ID_LEN: usize = 256;
/// Maximum length of a run's prompt preview in characters.
const MAX_PREVIEW_CHARS: usize = 300;

/// Returns the start of a text, for lists of runs.
pub(crate) fn preview(text: &str) -> String {
    text.trim().chars().take(MAX_PREVIEW_CHARS).collect()
}

/// Parses the client's id of the run.
pub(crate) fn request_id(fields: Fields<'_>) -> Result<Option<String>, ApiError> {
    match fields.text("request_id")? {
        Some(id) if id.is_empty() || id.len() > MAX_ID_LEN || id.chars().any(char::is_control) => {
            let expected = format!("a string of 1 to {MAX_ID_LEN} bytes without control characters");
            Err(invalid_value("request_id", &expected, &id.into()))
        }
        Some(id) if is_reserved_request_id(id) => {
            Err(invalid_value("request_id", "another id, because the API has a route of this name", &id.into()))
        }
        id => Ok(id.map(str::to_owned)),
    }
}

/// Parses the user label: `user`, or one of the two fields that replaced it in OpenAI's API.
pub(crate) fn user(fields: Fields<'_>) -> Result<Option<String>, ApiError> {
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        if let Some(label) = fields.text(name)? {
            return Ok(Some(label.chars().take(MAX_ID_LEN).collect()));
        }
    }
    Ok(None)
}

/// Parses the metadata of a run: `metadata`, with the limits of OpenAI's API, and `session_id`.
pub(crate) fn metadata(fields: Fields<'_>) -> Result<RunMetadata, ApiError> {
    const MAX_PAIRS: usize = 16;
    const MAX_KEY_CHARS: usize = RunMetadata::MAX_KEY_CHARS;
    const MAX_VALUE_CHARS: usize = RunMetadata::MAX_VALUE_CHARS;
    let is_short = |text: &&str| text.chars().count() <= MAX_VALUE_CHARS;
    let expected = format!("a string of at most {MAX_VALUE_CHARS} characters");
    let mut pairs = Vec::new();
    if let Some(object) = fields.object("metadata")? {
        if object.len() > MAX_PAIRS {
            let detail = format!("`metadata` must have at most {MAX_PAIRS} keys, got {}", object.len());
            return Err(ApiError::invalid("metadata", detail));
        }
        for (key, value) in object {
            if key.is_empty() || key.chars().count() > MAX_KEY_CHARS {
                let expected = format!("an object with keys of 1 to {MAX_KEY_CHARS} characters");
                return Err(invalid_value("metadata", &expected, &key.as_str().into()));
            }
            let text = value.as_str().filter(is_short);
            let text = text.ok_or_else(|| invalid_value(&format!("metadata.{key}"), &expected, value))?;
            pairs.push((key.clone(), text.to_owned()));
        }
    }
    if let Some(session) = fields.text(RunMetadata::SESSION)? {
        if !is_short(&session) {
            return Err(invalid_value(RunMetadata::SESSION, &expected, &session.into()));
        }
        pairs.retain(|(key, _)| key != RunMetadata::SESSION);
        pairs.push((RunMetadata::SESSION.to_owned(), session.to_owned()));
    }
    Ok(RunMetadata(pairs))
}

/// Parses `record`: the recording policy of the run.
pub(crate) fn record(fields: Fields<'_>) -> Result<RecordPolicy, ApiError> {
    match fields.get("record") {
        None | Some(Value::Bool(true)) => Ok(RecordPolicy::BestEffort),
        Some(Value::Bool(false)) => Ok(RecordPolicy::Off),
        Some(Value::String(word)) if word == "required" => Ok(RecordPolicy::Required),
        Some(Value::String(word)) if word == "best-effort" => Ok(RecordPolicy::BestEffort),
        Some(Value::String(word)) if word == "off" => Ok(RecordPolicy::Off),
        Some(other) => Err(invalid_value("record", "true, false, \"required\", \"best-effort\" or \"off\"", other)),
    }
}
