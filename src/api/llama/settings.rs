//! `generation_settings`: what a run was generated with, under llama-server's names.

use super::ask::Answer;
use crate::engine::{Limits, SamplingParams};
use serde_json::{Map, Value, json};

/// Parameters that are shown as they were sent.
pub(super) const ECHOED: &[&str] = &["n_keep", "n_discard", "n_cache_reuse", "grammar", "backend_sampling"];

/// The settings of a run. The seed is the one that was drawn with, also where -1 was asked for, so that the run can be
/// repeated.
pub(in crate::api) fn settings(sampling: &SamplingParams, limits: &Limits, answer: &Answer) -> Value {
    let bias: Vec<Value> = sampling
        .logit_bias
        .iter()
        .map(|&(token, bias)| json!({ "bias": bias.is_finite().then_some(bias), "token": token }))
        .collect();
    let drawing = json!({
        "seed": sampling.seed,
        "temperature": shortest(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": shortest(sampling.top_p),
        "min_p": shortest(sampling.min_p),
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": shortest(sampling.repeat_penalty),
        "presence_penalty": shortest(sampling.presence_penalty),
        "frequency_penalty": shortest(sampling.frequency_penalty),
    });
    // Three objects, since the macro does not take as many fields as one would have.
    let rest = json!({
        "stop": limits.stop,
        "max_tokens": answer.n_predict,
        "n_predict": answer.n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "n_indent": limits.min_indent,
        "n_cache_reuse": 0,
        "t_max_predict_ms": limits.max_time.map_or(0, |time| time.as_millis() as u64),
        "ignore_eos": limits.ignore_eos,
        "stream": answer.stream,
        "logit_bias": bias,
        "n_probs": answer.n_probs,
        "grammar": "",
        "grammar_lazy": false,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": false,
        "generation_prompt": "",
        "speculative.types": "none",
        "speculative.n_max": 0,
        "speculative.n_min": 0,
        "speculative.p_min": 0.0,
        "timings_per_token": answer.timings_per_token,
        "post_sampling_probs": answer.post_sampling,
        "backend_sampling": false,
        "lora": [],
    });
    let mut settings = Map::new();
    for part in [drawing, further(sampling), rest] {
        settings.extend(part.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
    }
    for (name, value) in &answer.sent {
        settings.insert(name.clone(), value.clone());
    }
    Value::Object(settings)
}

/// The less common parameters of the sampler chain.
fn further(sampling: &SamplingParams) -> Value {
    json!({
        "dynatemp_range": shortest(sampling.dynatemp_range),
        "dynatemp_exponent": shortest(sampling.dynatemp_exponent),
        "top_n_sigma": shortest(sampling.top_n_sigma),
        "xtc_probability": shortest(sampling.xtc_probability),
        "xtc_threshold": shortest(sampling.xtc_threshold),
        "typical_p": shortest(sampling.typical_p),
        "dry_multiplier": shortest(sampling.dry_multiplier),
        "dry_base": shortest(sampling.dry_base),
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "dry_sequence_breakers": sampling.dry_sequence_breakers,
        "mirostat": sampling.mirostat,
        "mirostat_tau": shortest(sampling.mirostat_tau),
        "mirostat_eta": shortest(sampling.mirostat_eta),
        "adaptive_target": shortest(sampling.adaptive_target),
        "adaptive_decay": shortest(sampling.adaptive_decay),
        "min_keep": sampling.min_keep,
        "samplers": sampling.samplers,
    })
}

/// The double that is written like the float: 0.8, not 0.800000011920929.
pub(super) fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}
