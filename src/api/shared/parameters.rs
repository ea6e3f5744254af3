//! Parameters that every protocol accepts: sampling, limits, stop strings, biases, token lists, and Thunder's own
//! fields.

use super::fields::{Fields, integer, invalid_value};
use crate::engine::{DraftLimits, Limits, Overflow, RecordPolicy, SamplerStage, SamplingParams};
use crate::events::{RunMetadata, TokenId, system};
use crate::model::Vocabulary;
use crate::server::ApiError;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::RangeInclusive;

/// Maximum length of `request_id` in bytes.
const MAX_ID_BYTES: usize = 256;
/// Maximum stop strings of a run: the end of the answer is compared with all of them at every token.
const MAX_STOP_STRINGS: usize = 1024;
/// Maximum total length of the stop strings in bytes.
const MAX_STOP_BYTES: usize = 64 << 10;
/// Maximum bias in OpenAI's API; llama-server has no limit.
const MAX_OPENAI_BIAS: f32 = 100.0;
/// Sampler stages that llama-server removed but its clients still send; they are ignored.
const REMOVED_SAMPLERS: [&str; 3] = ["tfs", "tfs_z", "tfs-z"];
/// Names of the field for the maximum answer length. The first one present applies, as with llama-server.
const MAX_TOKENS_FIELDS: [&str; 3] = ["n_predict", "max_completion_tokens", "max_tokens"];
/// Maximum length of a run's prompt preview in characters.
const MAX_PREVIEW_CHARS: usize = 300;

/// Returns the start of a text for lists of runs.
pub(crate) fn preview(text: &str) -> String {
    text.trim().chars().take(MAX_PREVIEW_CHARS).collect()
}

/// Parses the client's id of the run.
pub(crate) fn request_id(fields: Fields<'_>) -> Result<Option<String>, ApiError> {
    match fields.text("request_id")? {
        Some(id) if id.is_empty() || id.len() > MAX_ID_BYTES || id.chars().any(char::is_control) => {
            Err(ApiError::invalid(
                "request_id",
                format!("`request_id` must have 1 to {MAX_ID_BYTES} bytes and no control characters"),
            ))
        }
        id => Ok(id.map(str::to_owned)),
    }
}

/// Parses the user's name as sent by the client: `user`, or one of the two fields that replaced it in OpenAI's API.
pub(crate) fn user(fields: Fields<'_>) -> Result<Option<String>, ApiError> {
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        if let Some(label) = fields.text(name)? {
            return Ok(Some(label.chars().take(MAX_ID_BYTES).collect()));
        }
    }
    Ok(None)
}

/// Parses the metadata of a run: `metadata`, with the limits of OpenAI's API, and `session_id`.
pub(crate) fn metadata(fields: Fields<'_>) -> Result<RunMetadata, ApiError> {
    const MAX_PAIRS: usize = 16;
    const MAX_KEY_CHARS: usize = 64;
    const MAX_VALUE_CHARS: usize = 512;
    let is_short = |text: &&str| text.chars().count() <= MAX_VALUE_CHARS;
    let expected = format!("a string of at most {MAX_VALUE_CHARS} characters");
    let mut pairs = Vec::new();
    if let Some(object) = fields.object("metadata")? {
        if object.len() > MAX_PAIRS {
            let found = format!("`metadata` must have at most {MAX_PAIRS} keys, got {}", object.len());
            return Err(ApiError::invalid("metadata", found));
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

/// Parses the sampling parameters.
pub(crate) fn sampling(fields: Fields<'_>, vocabulary: &Vocabulary) -> Result<SamplingParams, ApiError> {
    const MAX_WINDOW: i64 = 1 << 20;
    let default = SamplingParams::default();
    let number = |name: &str, range: RangeInclusive<f32>, default: f32| {
        fields.number(name, range).map(|value| value.unwrap_or(default))
    };
    let count = |name: &str, range: RangeInclusive<i64>, default: i32| {
        fields.integer(name, range).map(|value| value.map_or(default, |value| value as i32))
    };
    let seed = match fields.integer("seed", i64::MIN..=i64::MAX)? {
        // llama-server's values for a random seed.
        None | Some(-1 | 0xffff_ffff) => system::random(),
        // OpenAI's seeds have 64 bits, llama.cpp's have 32.
        Some(seed) => seed as u32,
    };
    let mut bias = match fields.get("logit_bias") {
        Some(value) => logit_bias(value, vocabulary, if fields.clamps_numbers() { f32::MAX } else { MAX_OPENAI_BIAS })?,
        None => Vec::new(),
    };
    let banned = bounded_tokens(fields, "banned_tokens", vocabulary)?;
    bias.extend(banned.into_iter().map(|token| (token, f32::NEG_INFINITY)));
    sum_by_token(&mut bias);
    // llama-server no longer has a value for "the whole context".
    let min_window = if fields.clamps_numbers() { 0 } else { -1 };
    let min_top_k = if fields.clamps_numbers() { i64::from(i32::MIN) } else { -1 };
    Ok(SamplingParams {
        samplers: samplers(fields)?.unwrap_or(default.samplers),
        min_keep: count("min_keep", 0..=MAX_WINDOW, 0)? as usize,
        temperature: number("temperature", 0.0..=100.0, default.temperature)?,
        dynatemp_range: number("dynatemp_range", 0.0..=100.0, default.dynatemp_range)?,
        dynatemp_exponent: number("dynatemp_exponent", 0.0..=100.0, default.dynatemp_exponent)?,
        top_k: count("top_k", min_top_k..=i64::from(i32::MAX), default.top_k)?.max(0),
        top_p: number("top_p", 0.0..=1.0, default.top_p)?,
        min_p: number("min_p", 0.0..=1.0, default.min_p)?,
        typical_p: number("typical_p", 0.0..=1.0, default.typical_p)?,
        top_n_sigma: number("top_n_sigma", -1.0..=100.0, default.top_n_sigma)?,
        xtc_probability: number("xtc_probability", 0.0..=1.0, default.xtc_probability)?,
        xtc_threshold: number("xtc_threshold", 0.0..=1.0, default.xtc_threshold)?,
        repeat_penalty: number("repeat_penalty", 0.01..=100.0, default.repeat_penalty)?,
        repeat_last_n: count("repeat_last_n", min_window..=MAX_WINDOW, default.repeat_last_n)?,
        presence_penalty: number("presence_penalty", -10.0..=10.0, default.presence_penalty)?,
        frequency_penalty: number("frequency_penalty", -10.0..=10.0, default.frequency_penalty)?,
        dry_multiplier: number("dry_multiplier", 0.0..=100.0, default.dry_multiplier)?,
        dry_base: match number("dry_base", 0.0..=100.0, default.dry_base)? {
            // A base below 1 would reduce the penalty with the length of the repetition.
            base if fields.clamps_numbers() && base < 1.0 => default.dry_base,
            base => base,
        },
        dry_allowed_length: count("dry_allowed_length", 0..=MAX_WINDOW, default.dry_allowed_length)?,
        dry_penalty_last_n: count("dry_penalty_last_n", -1..=MAX_WINDOW, default.dry_penalty_last_n)?,
        dry_sequence_breakers: sequence_breakers(fields)?.unwrap_or(default.dry_sequence_breakers),
        mirostat: count("mirostat", 0..=2, 0)? as u8,
        mirostat_tau: number("mirostat_tau", 0.0..=100.0, default.mirostat_tau)?,
        mirostat_eta: number("mirostat_eta", 0.0..=1.0, default.mirostat_eta)?,
        adaptive_target: number("adaptive_target", -1.0..=1.0, default.adaptive_target)?,
        adaptive_decay: number("adaptive_decay", 0.0..=0.99, default.adaptive_decay)?,
        seed,
        logit_bias: bias,
    })
}

/// Slot and cache settings of a run, its behaviour on a full context, and its drafts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotPlacement {
    pub(crate) slot: Option<u32>,
    pub(crate) cache_prompt: bool,
    pub(crate) cache_reuse: usize,
    pub(crate) overflow: Overflow,
    pub(crate) drafts: DraftLimits,
}

impl SlotPlacement {
    /// Returns the number of tokens that an answer can have after a prompt of that length.
    pub(crate) fn room(self, context: u32, prompt: usize) -> u32 {
        match self.overflow {
            Overflow::Stop => (context as usize).saturating_sub(prompt).max(1) as u32,
            Overflow::Shift { .. } | Overflow::Evict => i32::MAX as u32,
        }
    }
}

/// Parses the placement. `fields` include the server's defaults.
pub(crate) fn placement(fields: Fields<'_>) -> Result<SlotPlacement, ApiError> {
    let keep = fields.integer("n_keep", -1..=i64::from(i32::MAX))?.unwrap_or(0);
    let discard = fields.integer("n_discard", 0..=i64::from(i32::MAX))?.unwrap_or(0);
    let overflow = match fields.text("context_policy")? {
        None | Some("stop") => Overflow::Stop,
        // -1 is llama-server's value for the whole prompt.
        Some("shift") => Overflow::Shift { keep: usize::try_from(keep).ok(), discard: discard as usize },
        Some("evict") => Overflow::Evict,
        Some(other) => {
            return Err(invalid_value("context_policy", "\"stop\", \"shift\" or \"evict\"", &Value::from(other)));
        }
    };
    let tokens = |name| fields.integer(name, 0..=i64::from(i32::MAX)).map(|tokens| tokens.map(|tokens| tokens as u32));
    let slot = fields.integer("id_slot", -1..=i64::from(i32::MAX))?;
    Ok(SlotPlacement {
        slot: slot.and_then(|slot| u32::try_from(slot).ok()),
        cache_prompt: fields.flag("cache_prompt")?.unwrap_or(true),
        cache_reuse: fields.integer("n_cache_reuse", 0..=i64::from(i32::MAX))?.unwrap_or(0) as usize,
        overflow,
        drafts: DraftLimits { max: tokens("speculative.n_max")?, min: tokens("speculative.n_min")? },
    })
}

/// Parses the stages of the sampler chain: a list of names, names separated by `;`, or letters.
fn samplers(fields: Fields<'_>) -> Result<Option<Vec<SamplerStage>>, ApiError> {
    const FIELD: &str = "samplers";
    let Some(value) = fields.get(FIELD) else { return Ok(None) };
    let unknown = |name: &str| {
        let known: Vec<String> =
            SamplerStage::NAMES.iter().map(|(_, name, letter)| format!("{name} ({letter})")).collect();
        ApiError::invalid(FIELD, format!("`samplers`: unknown stage {name:?}; known stages: {}", known.join(", ")))
    };
    let by_name = |name: &str| SamplerStage::from_name(name).ok_or_else(|| unknown(name));
    let stages: Result<Vec<SamplerStage>, ApiError> = match value {
        Value::String(text) if text.contains([';', '_', '-']) => {
            text.split(';').filter(|name| !REMOVED_SAMPLERS.contains(name)).map(by_name).collect()
        }
        Value::String(letters) => letters
            .chars()
            .map(|letter| SamplerStage::from_letter(letter).ok_or_else(|| unknown(&letter.to_string())))
            .collect(),
        Value::Array(names) => names
            .iter()
            .filter(|name| name.as_str().is_none_or(|name| !REMOVED_SAMPLERS.contains(&name)))
            .map(|name| {
                name.as_str().ok_or_else(|| invalid_value(FIELD, "a list of names, or letters", name)).and_then(by_name)
            })
            .collect(),
        other => return Err(invalid_value(FIELD, "a list of names, or letters", other)),
    };
    stages.map(Some)
}

/// Parses the strings that end a repetition for the DRY penalty.
fn sequence_breakers(fields: Fields<'_>) -> Result<Option<Vec<String>>, ApiError> {
    const FIELD: &str = "dry_sequence_breakers";
    const MAX_BREAKERS: usize = 64;
    let Some(list) = fields.list(FIELD)? else { return Ok(None) };
    let texts: Option<Vec<String>> = list.iter().map(|text| text.as_str().map(str::to_owned)).collect();
    match texts {
        Some(texts) if texts.len() <= MAX_BREAKERS => Ok(Some(texts)),
        _ => {
            Err(invalid_value(FIELD, &format!("a list of at most {MAX_BREAKERS} strings"), &Value::Array(list.clone())))
        }
    }
}

/// Parses the limits of a run. `room` is the number of tokens left in the context after the prompt.
pub(crate) fn limits(fields: Fields<'_>, vocabulary: &Vocabulary, room: u32) -> Result<Limits, ApiError> {
    limits_with_min(1, fields, vocabulary, room)
}

/// Returns the maximum answer length as sent; -1 for as many tokens as fit.
pub(crate) fn n_predict(fields: Fields<'_>) -> i64 {
    fields.first_present(&MAX_TOKENS_FIELDS).and_then(|(_, value)| integer(value)).unwrap_or(-1)
}

/// Parses limits with a minimum answer length; with 0 tokens a run only evaluates the prompt.
pub(crate) fn limits_with_min(
    min_tokens: u32,
    fields: Fields<'_>,
    vocabulary: &Vocabulary,
    room: u32,
) -> Result<Limits, ApiError> {
    let requested = match fields.first_present(&MAX_TOKENS_FIELDS) {
        // -1 is llama-server's value for as many tokens as fit.
        Some((name, value)) if integer(value) != Some(-1) => {
            let count = integer(value).filter(|count| (i64::from(min_tokens)..=i64::from(i32::MAX)).contains(count));
            let expected = format!("an integer between {min_tokens} and {}, or -1 for as many as fit", i32::MAX);
            Some(count.ok_or_else(|| invalid_value(name, &expected, value))? as u32)
        }
        _ => None,
    };
    let max_tokens = requested.map_or(room, |requested| requested.min(room));
    let default = Limits::new(max_tokens);
    let max_steps = fields.integer("max_steps", 1..=i64::from(u32::MAX))?.map(|steps| steps as u32);
    Ok(Limits {
        max_steps: max_steps.unwrap_or(default.max_steps),
        stop: stop(fields)?,
        stop_tokens: bounded_tokens(fields, "stop_tokens", vocabulary)?,
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        min_indent: fields.integer("n_indent", 0..=1000)?.unwrap_or(0) as u32,
        max_time: fields
            .integer("t_max_predict_ms", -1..=i64::from(u32::MAX))?
            .and_then(|ms| u64::try_from(ms).ok().filter(|&ms| ms > 0))
            .map(std::time::Duration::from_millis),
        requested_max_tokens: requested,
        ..default
    })
}

/// Parses the stop strings.
pub(crate) fn stop(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
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

/// Parses a token id.
pub(crate) fn token(value: &Value, vocabulary: &Vocabulary) -> Option<TokenId> {
    let id = TokenId::try_from(integer(value)?).ok()?;
    vocabulary.contains(id).then_some(id)
}

/// Parses a list of token ids or of strings that are one token each.
pub(crate) fn tokens(fields: Fields<'_>, name: &str, vocabulary: &Vocabulary) -> Result<Vec<TokenId>, ApiError> {
    let one = |value: &Value| match value.as_str() {
        Some(text) => match vocabulary.encode(text, false, true)[..] {
            [token] => Ok(token),
            ref several => Err(ApiError::invalid(
                name,
                format!(
                    "`{name}`: the string {value} has {} tokens ({several:?}), expected one; send the token ids",
                    several.len()
                ),
            )),
        },
        None => token(value, vocabulary).ok_or_else(|| {
            invalid_value(name, &format!("a list of token ids below {}, or of strings", vocabulary.len()), value)
        }),
    };
    fields.list(name)?.into_iter().flatten().map(one).collect()
}

/// Parses a list of tokens with at most one entry per token of the vocabulary.
fn bounded_tokens(fields: Fields<'_>, name: &str, vocabulary: &Vocabulary) -> Result<Vec<TokenId>, ApiError> {
    check_entry_count(name, fields.list(name)?.map_or(0, Vec::len), vocabulary)?;
    tokens(fields, name, vocabulary)
}

/// Rejects a list with more entries than the vocabulary has tokens, before it is processed.
fn check_entry_count(name: &str, entries: usize, vocabulary: &Vocabulary) -> Result<(), ApiError> {
    let max = vocabulary.len();
    if entries <= max {
        return Ok(());
    }
    let detail =
        format!("`{name}` must have at most {max} entries, one for each token of the vocabulary, got {entries}");
    Err(ApiError::invalid(name, detail))
}

/// Adds up the biases of tokens that occur several times; the order is that of the first occurrence.
fn sum_by_token(biases: &mut Vec<(TokenId, f32)>) {
    let mut places: HashMap<TokenId, usize> = HashMap::with_capacity(biases.len());
    let mut sums: Vec<(TokenId, f32)> = Vec::with_capacity(biases.len());
    for &(token, bias) in &*biases {
        match places.entry(token) {
            Entry::Occupied(place) => {
                let sum = &mut sums[*place.get()].1;
                // A banned token stays banned with any additional bias.
                *sum = (*sum + bias).min(f32::MAX);
            }
            Entry::Vacant(place) => {
                place.insert(sums.len());
                sums.push((token, bias));
            }
        }
    }
    *biases = sums;
}

/// Parses biases up to `max_bias`: OpenAI's `{"id or text": bias}`, or llama-server's `[[id or text, bias or false], …]`.
pub(crate) fn logit_bias(
    value: &Value,
    vocabulary: &Vocabulary,
    max_bias: f32,
) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let expected = if max_bias < f32::MAX {
        format!("an object that maps tokens to a bias between -{max_bias} and {max_bias} (false bans the token)")
    } else {
        "an object that maps tokens to a bias, or a list of [token, bias] (false bans the token)".to_owned()
    };
    let refuse = || invalid_value("logit_bias", &expected, value);
    let bias = |value: &Value| match value {
        Value::Bool(false) => Some(f32::NEG_INFINITY),
        other => other.as_f64().map(|number| number as f32).filter(|number| number.abs() <= max_bias),
    };
    let named = |name: &str| match name.parse::<TokenId>() {
        Ok(id) => vocabulary.contains(id).then(|| vec![id]),
        Err(_) => Some(vocabulary.encode(name, false, true)),
    };
    let entries = value.as_object().map(Map::len).or_else(|| value.as_array().map(Vec::len));
    check_entry_count("logit_bias", entries.unwrap_or(0), vocabulary)?;
    let mut biases = Vec::new();
    let mut add = |tokens: Option<Vec<TokenId>>, value: &Value| -> Option<()> {
        let bias = bias(value)?;
        biases.extend(tokens?.into_iter().map(|token| (token, bias)));
        Some(())
    };
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                add(named(name), value).ok_or_else(refuse)?;
            }
        }
        Value::Array(list) => {
            for pair in list {
                let [of, value] = pair.as_array().map_or(&[][..], Vec::as_slice) else { return Err(refuse()) };
                let tokens = match of.as_str() {
                    Some(text) => Some(vocabulary.encode(text, false, true)),
                    None => token(of, vocabulary).map(|token| vec![token]),
                };
                add(tokens, value).ok_or_else(refuse)?;
            }
        }
        _ => return Err(refuse()),
    }
    Ok(biases)
}

/// Parses `record`: the effect of a recording failure on the run.
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

/// Returns the prompt. An empty prompt becomes the BOS token, or the EOS token if there is none, because generation
/// needs at least one token.
pub(crate) fn or_start_token(prompt: Vec<TokenId>, vocabulary: &Vocabulary) -> Vec<TokenId> {
    let special = vocabulary.special();
    match special.bos.or(special.eos) {
        Some(token) if prompt.is_empty() => vec![token],
        _ => prompt,
    }
}

/// Parses a prompt: a string, a list of token ids, or a list of both. `add_special` applies to its start.
pub(crate) fn encode_prompt(
    value: &Value,
    name: &str,
    vocabulary: &Vocabulary,
    add_special: bool,
    parse_special: bool,
) -> Result<Vec<TokenId>, ApiError> {
    let expected = || format!("a string, or a list of strings and token ids below {}", vocabulary.len());
    let parts = match value {
        Value::String(text) => return Ok(vocabulary.encode(text, add_special, parse_special)),
        Value::Array(parts) => parts,
        other => return Err(invalid_value(name, &expected(), other)),
    };
    let mut tokens = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        match part {
            Value::String(text) => tokens.extend(vocabulary.encode(text, add_special && index == 0, parse_special)),
            id => tokens.push(token(id, vocabulary).ok_or_else(|| invalid_value(name, &expected(), id))?),
        }
    }
    Ok(tokens)
}
