//! Limits and stop strings of a run.

use super::tokens::bounded_tokens;
use crate::api::shared::fields::{Fields, integer, invalid_value};
use crate::engine::Limits;
use crate::model::Vocabulary;
use crate::server::ApiError;
use serde_json::Value;
use std::time::Duration;

/// Maximum stop strings of a run: the end of the answer is compared with all of them at every token.
const MAX_STOP_STRINGS: usize = 1024;
/// Maximum total length of the stop strings in bytes.
const MAX_STOP_BYTES: usize = 64 << 10;
/// Names of the field for the maximum answer length. The first one present applies, as with llama-server.
pub(crate) const MAX_TOKENS_FIELDS: [&str; 3] = ["n_predict", "max_completion_tokens", "max_tokens"];

/// Smallest `max_tokens` that a route accepts.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MinTokens {
    /// 0 tokens: the run only evaluates the prompt.
    Zero,
    One,
}

/// Returns the maximum answer length as sent; -1 for as many tokens as fit.
pub(crate) fn n_predict(fields: Fields<'_>) -> i64 {
    fields.first_present(&MAX_TOKENS_FIELDS).and_then(|(_, value)| integer(value)).map_or(-1, |count| count.max(-1))
}

/// Parses the limits of a run. `room` is the number of tokens left in the context after the prompt.
pub(crate) fn limits(
    fields: Fields<'_>,
    vocabulary: &Vocabulary,
    room: u32,
    min_tokens: MinTokens,
) -> Result<Limits, ApiError> {
    let min_tokens = match min_tokens {
        MinTokens::Zero => 0,
        MinTokens::One => 1,
    };
    let requested = match fields.first_present(&MAX_TOKENS_FIELDS) {
        Some((name, value)) => {
            const MAX: i64 = i32::MAX as i64;
            let is_default = !fields.is_sent(name);
            match integer(value) {
                // llama-server's value for as many tokens as fit; its flag also accepts other negative numbers.
                Some(count) if count == -1 || (is_default && count < 0) => None,
                Some(count) if is_default => Some(count.clamp(min_tokens, MAX) as u32),
                Some(count) if (min_tokens..=MAX).contains(&count) => Some(count as u32),
                _ => {
                    let expected = format!("an integer between {min_tokens} and {MAX}, or -1 for as many as fit");
                    return Err(invalid_value(name, &expected, value));
                }
            }
        }
        None => None,
    };
    let max_tokens = requested.map_or(room, |requested| requested.min(room));
    let default = Limits::new(max_tokens);
    let max_steps = fields.integer("max_steps", 1..=i64::from(u32::MAX))?.map(|steps| steps as u32);
    Ok(Limits {
        max_steps: max_steps.unwrap_or(default.max_steps),
        has_requested_max_steps: max_steps.is_some(),
        stop: stop(fields)?,
        stop_tokens: bounded_tokens(fields, "stop_tokens", vocabulary)?,
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        min_indent: fields.integer("n_indent", 0..=1000)?.unwrap_or(0) as u32,
        max_time: fields
            .integer("t_max_predict_ms", -1..=i64::from(u32::MAX))?
            .and_then(|ms| u64::try_from(ms).ok().filter(|&ms| ms > 0))
            .map(Duration::from_millis),
        requested_max_tokens: requested,
        ..default
    })
}

/// Parses the stop strings.
fn stop(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    let texts = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(one @ Value::String(_)) => std::slice::from_ref(one),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(invalid_value("stop", "a string or a list of strings", other)),
    };
    if texts.len() > MAX_STOP_STRINGS {
        let detail = format!("`stop` must have at most {MAX_STOP_STRINGS} strings, got {}", texts.len());
        return Err(ApiError::invalid("stop", detail));
    }
    let read = |text: &Value| match text.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(invalid_value("stop", "a string or a list of strings", text)),
    };
    let texts: Vec<String> = texts.iter().map(read).collect::<Result<_, _>>()?;
    let bytes: usize = texts.iter().map(String::len).sum();
    if bytes > MAX_STOP_BYTES {
        let detail = format!("`stop` must have at most {MAX_STOP_BYTES} bytes in all its strings, got {bytes}");
        return Err(ApiError::invalid("stop", detail));
    }
    Ok(texts.into_iter().filter(|text| !text.is_empty()).collect())
}
