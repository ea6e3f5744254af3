//! Sampling parameters.

use super::bias::{logit_bias, sum_by_token, without_unknown_tokens};
use super::tokens::bounded_tokens;
use crate::api::shared::fields::{Fields, invalid_value};
use crate::engine::{SamplerStage, SamplingParams};
use crate::events::system;
use crate::model::Vocabulary;
use crate::server::ApiError;
use serde::Deserialize;
use serde_json::Value;
use std::ops::RangeInclusive;

/// Maximum bias in OpenAI's API; llama-server has no limit.
const MAX_OPENAI_BIAS: f32 = 100.0;
/// Sampling stages that llama-server removed but its clients still send; they are ignored.
const REMOVED_SAMPLERS: [&str; 3] = ["tfs", "tfs_z", "tfs-z"];

/// Field of the sampling stages.
pub(super) const SAMPLERS: &str = "samplers";

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
        Some(value) if fields.is_sent("logit_bias") => {
            logit_bias(value, vocabulary, if fields.is_lenient() { f32::MAX } else { MAX_OPENAI_BIAS })?
        }
        // The flag, which applies to all models, ignores tokens that a model lacks, as in llama-server.
        Some(value) => logit_bias(&without_unknown_tokens(value, vocabulary), vocabulary, f32::MAX)?,
        None => Vec::new(),
    };
    let banned = bounded_tokens(fields, "banned_tokens", vocabulary)?;
    bias.extend(banned.into_iter().map(|token| (token, f32::NEG_INFINITY)));
    sum_by_token(&mut bias);
    // In requests, llama-server no longer has a value for the whole context.
    let min_window = if fields.is_lenient() && fields.is_sent("repeat_last_n") { 0 } else { -1 };
    let min_top_k = if fields.is_lenient() { i64::from(i32::MIN) } else { -1 };
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
            base if base < 1.0 && (fields.is_lenient() || !fields.is_sent("dry_base")) => default.dry_base,
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

/// Parses the sampling stages.
fn samplers(fields: Fields<'_>) -> Result<Option<Vec<SamplerStage>>, ApiError> {
    let Some(value) = fields.get(SAMPLERS) else { return Ok(None) };
    let stages = sampler_stages(value)?;
    if !fields.is_sent(SAMPLERS) {
        // llama-server ignores unknown stages in its flags.
        return Ok(Some(stages.into_iter().flatten().collect()));
    }
    stages.into_iter().collect::<Result<_, _>>().map(Some).map_err(|name| {
        let known: Vec<String> =
            SamplerStage::NAMES.iter().map(|(_, name, letter)| format!("{name} ({letter})")).collect();
        ApiError::invalid(SAMPLERS, format!("`samplers`: unknown stage {name:?}; known stages: {}", known.join(", ")))
    })
}

/// Returns the stages of a list of names, of names separated by `;`, or of letters. An unknown stage is its name.
pub(super) fn sampler_stages(value: &Value) -> Result<Vec<Result<SamplerStage, String>>, ApiError> {
    let invalid = |value: &Value| invalid_value(SAMPLERS, "a list of names, or letters", value);
    let names: Vec<&str> = match value {
        Value::String(text) if text.contains([';', '_', '-']) => text.split(';').collect(),
        Value::String(letters) => {
            let stage = |letter: char| SamplerStage::from_letter(letter).ok_or_else(|| letter.to_string());
            return Ok(letters.chars().map(stage).collect());
        }
        Value::Array(names) => {
            names.iter().map(|name| name.as_str().ok_or_else(|| invalid(name))).collect::<Result<_, _>>()?
        }
        other => return Err(invalid(other)),
    };
    let kept = names.into_iter().filter(|name| !REMOVED_SAMPLERS.contains(name));
    Ok(kept.map(|name| SamplerStage::from_name(name).ok_or_else(|| name.to_owned())).collect())
}

/// Parses the strings that end a repetition for the DRY penalty: a list, or a list in JSON as one string, also without
/// its brackets, as clients of `KoboldCPP` and text-generation-webui send it.
fn sequence_breakers(fields: Fields<'_>) -> Result<Option<Vec<String>>, ApiError> {
    const FIELD: &str = "dry_sequence_breakers";
    const MAX_BREAKERS: usize = 64;
    let Some(value) = fields.get(FIELD) else { return Ok(None) };
    let breakers: Option<Vec<String>> = match value {
        Value::String(text) if text.trim_start().starts_with('[') => serde_json::from_str(text).ok(),
        Value::String(text) => serde_json::from_str(&format!("[{text}]")).ok(),
        list => Vec::deserialize(list).ok(),
    };
    let breakers = breakers.filter(|breakers| breakers.len() <= MAX_BREAKERS);
    breakers.map(Some).ok_or_else(|| invalid_value(FIELD, &format!("a list of at most {MAX_BREAKERS} strings"), value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sequence_breakers_are_a_list_or_its_json() {
        let parse = |value: Value| {
            let body = json!({ "dry_sequence_breakers": value });
            sequence_breakers(Fields::new(&body).unwrap()).map_err(|error| error.problem().detail)
        };
        let expected = Some(["\n", ":", ",\"*"].map(str::to_owned).to_vec());
        for value in [json!(["\n", ":", ",\"*"]), json!(r#" ["\n", ":", ",\"*"]"#), json!(r#""\n", ":", ",\"*""#)] {
            assert_eq!(parse(value.clone()), Ok(expected.clone()), "{value}");
        }
        assert_eq!(parse(json!("")), Ok(Some(Vec::new())));
        assert_eq!(parse(Value::Null), Ok(None));
        for value in [json!("a,b"), json!("[1]"), json!([1]), json!(5), json!(vec!["a"; 65])] {
            let error = parse(value.clone()).unwrap_err();
            assert!(error.contains("must be a list of at most 64 strings"), "{value}: {error}");
        }
    }
}
