//! `generation_settings`: the parameters of a run under llama-server's names.

use crate::engine::{Limits, SamplingParams};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Client options that shape the response, not the generation.
#[derive(Debug, Clone)]
pub(crate) struct LlamaResponseOptions {
    pub(crate) stream: bool,
    /// `n_predict` as sent; -1 for as many tokens as fit.
    pub(crate) n_predict: i64,
    /// Number of probabilities per token; 0 for none.
    pub(crate) n_probs: usize,
    /// Report probabilities after the sampling stages instead of the model's.
    pub(crate) post_sampling: bool,
    pub(crate) return_tokens: bool,
    pub(crate) timings_per_token: bool,
    pub(crate) return_progress: bool,
    /// Paths to include in the response; empty for all.
    pub(crate) response_fields: Vec<String>,
    pub(crate) ping: Option<Duration>,
    /// Parameters to repeat as sent.
    pub(crate) sent: Map<String, Value>,
}

impl LlamaResponseOptions {
    /// Returns the defaults for a given answer length.
    pub(crate) fn new(n_predict: i64) -> Self {
        Self {
            stream: false,
            n_predict,
            n_probs: 0,
            post_sampling: false,
            return_tokens: false,
            timings_per_token: false,
            return_progress: false,
            response_fields: Vec::new(),
            ping: None,
            sent: Map::new(),
        }
    }
}

/// Parameters repeated as sent.
pub(crate) const ECHOED_FIELDS: &[&str] = &["n_keep", "n_discard", "n_cache_reuse", "grammar", "backend_sampling"];

/// Returns the settings of a run. The seed is the one actually used, even if -1 was requested, so that the run can be
/// repeated.
pub(crate) fn generation_settings(sampling: &SamplingParams, limits: &Limits, options: &LlamaResponseOptions) -> Value {
    let bias: Vec<Value> = sampling
        .logit_bias
        .iter()
        .map(|&(token, bias)| json!({ "bias": bias.is_finite().then_some(bias), "token": token }))
        .collect();
    let drawing = json!({
        "seed": sampling.seed,
        "temperature": to_shortest_f64(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": to_shortest_f64(sampling.top_p),
        "min_p": to_shortest_f64(sampling.min_p),
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": to_shortest_f64(sampling.repeat_penalty),
        "presence_penalty": to_shortest_f64(sampling.presence_penalty),
        "frequency_penalty": to_shortest_f64(sampling.frequency_penalty),
    });
    // Split into three objects because of the macro's recursion limit.
    let rest = json!({
        "stop": limits.stop,
        "max_tokens": options.n_predict,
        "n_predict": options.n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "n_indent": limits.min_indent,
        "n_cache_reuse": 0,
        "t_max_predict_ms": limits.max_time.map_or(0, |time| time.as_millis() as u64),
        "ignore_eos": limits.ignore_eos,
        "stream": options.stream,
        "logit_bias": bias,
        "n_probs": options.n_probs,
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
        "timings_per_token": options.timings_per_token,
        "post_sampling_probs": options.post_sampling,
        "backend_sampling": false,
        "lora": [],
    });
    let mut settings = Map::new();
    for part in [drawing, extended_sampling(sampling), rest] {
        settings.extend(part.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
    }
    for (name, value) in &options.sent {
        settings.insert(name.clone(), value.clone());
    }
    Value::Object(settings)
}

/// Returns the less common sampling parameters.
fn extended_sampling(sampling: &SamplingParams) -> Value {
    json!({
        "dynatemp_range": to_shortest_f64(sampling.dynatemp_range),
        "dynatemp_exponent": to_shortest_f64(sampling.dynatemp_exponent),
        "top_n_sigma": to_shortest_f64(sampling.top_n_sigma),
        "xtc_probability": to_shortest_f64(sampling.xtc_probability),
        "xtc_threshold": to_shortest_f64(sampling.xtc_threshold),
        "typical_p": to_shortest_f64(sampling.typical_p),
        "dry_multiplier": to_shortest_f64(sampling.dry_multiplier),
        "dry_base": to_shortest_f64(sampling.dry_base),
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "dry_sequence_breakers": sampling.dry_sequence_breakers,
        "mirostat": sampling.mirostat,
        "mirostat_tau": to_shortest_f64(sampling.mirostat_tau),
        "mirostat_eta": to_shortest_f64(sampling.mirostat_eta),
        "adaptive_target": to_shortest_f64(sampling.adaptive_target),
        "adaptive_decay": to_shortest_f64(sampling.adaptive_decay),
        "min_keep": sampling.min_keep,
        "samplers": sampling.samplers,
    })
}

/// Returns the double with the same decimal form as the float: 0.8, not 0.800000011920929.
pub(crate) fn to_shortest_f64(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}
