//! `generation_settings`: the parameters of a run under llama-server's names.

use super::body::ControlVectorBody;
use super::fields::Fields;
use super::parameters;
use crate::engine::{Limits, SamplingParams};
use crate::events::{TokenId, shortest_f64};
use crate::model::llama::{AdapterSet, SamplerStage, ScaledAdapter, ScaledVector};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// Parts of a request that the settings report besides its sampling parameters and limits.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReportedOptions {
    pub(crate) stream: bool,
    /// `n_predict` as sent; -1 for as many tokens as fit.
    pub(crate) n_predict: i64,
    /// Number of probabilities per token; 0 for none.
    pub(crate) n_probs: usize,
    /// Report probabilities after the sampling stages instead of the model's.
    pub(crate) after_sampler: bool,
    pub(crate) timings_per_token: bool,
    pub(crate) adapters: AdapterSet,
    pub(crate) echoed: EchoedParameters,
}

impl ReportedOptions {
    /// Returns the options that all routes read alike. The route adds its own.
    pub(crate) fn from_fields(fields: Fields<'_>) -> Self {
        Self {
            n_predict: parameters::n_predict(fields),
            echoed: EchoedParameters::new(|name| fields.get(name).cloned()),
            ..Self::default()
        }
    }
}

/// Parameters repeated as sent.
#[derive(Debug, Clone)]
pub(crate) struct EchoedParameters {
    n_keep: Value,
    n_discard: Value,
    n_cache_reuse: Value,
    grammar: Value,
    backend_sampling: Value,
    speculative_types: Value,
    speculative_n_max: Value,
    speculative_n_min: Value,
    speculative_p_min: Value,
}

impl EchoedParameters {
    /// Returns the values that `sent` has, and llama-server's defaults of the others.
    fn new(sent: impl Fn(&str) -> Option<Value>) -> Self {
        let sent_or = |name: &str, default: Value| sent(name).unwrap_or(default);
        Self {
            n_keep: sent_or("n_keep", 0.into()),
            n_discard: sent_or("n_discard", 0.into()),
            n_cache_reuse: sent_or("n_cache_reuse", 0.into()),
            grammar: sent_or("grammar", "".into()),
            backend_sampling: sent_or("backend_sampling", false.into()),
            speculative_types: sent_or("speculative.types", "none".into()),
            speculative_n_max: sent_or("speculative.n_max", 0.into()),
            speculative_n_min: sent_or("speculative.n_min", 0.into()),
            speculative_p_min: sent_or("speculative.p_min", 0.0.into()),
        }
    }
}

impl Default for EchoedParameters {
    fn default() -> Self {
        Self::new(|_| None)
    }
}

/// A list that is always empty.
pub(crate) type EmptyList = [u32; 0];

/// An addition to a token's logit.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct TokenBias {
    /// Null if the token is never sampled.
    bias: Option<f64>,
    token: TokenId,
}

/// The parameters of a run under llama-server's names.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct GenerationSettings {
    /// Seed actually used, even if -1 was requested, so that the run can be repeated.
    pub(crate) seed: u32,
    temperature: f64,
    top_k: i32,
    top_p: f64,
    min_p: f64,
    repeat_last_n: i32,
    repeat_penalty: f64,
    presence_penalty: f64,
    frequency_penalty: f64,
    dynatemp_range: f64,
    dynatemp_exponent: f64,
    top_n_sigma: f64,
    xtc_probability: f64,
    xtc_threshold: f64,
    typical_p: f64,
    dry_multiplier: f64,
    dry_base: f64,
    dry_allowed_length: i32,
    dry_penalty_last_n: i32,
    dry_sequence_breakers: Vec<String>,
    mirostat: u8,
    mirostat_tau: f64,
    mirostat_eta: f64,
    adaptive_target: f64,
    adaptive_decay: f64,
    min_keep: usize,
    /// Sampling stages, in order.
    #[schema(value_type = Vec<String>)]
    samplers: Vec<SamplerStage>,
    stop: Vec<String>,
    /// Like `n_predict`.
    max_tokens: i64,
    /// Maximum tokens of the answer; -1 for as many as fit.
    n_predict: i64,
    /// The value in the request.
    #[schema(value_type = Value)]
    n_keep: Value,
    /// The value in the request.
    #[schema(value_type = Value)]
    n_discard: Value,
    n_indent: u32,
    /// The value in the request.
    #[schema(value_type = Value)]
    n_cache_reuse: Value,
    /// Maximum duration in milliseconds; 0 for no limit.
    t_max_predict_ms: u64,
    ignore_eos: bool,
    stream: bool,
    logit_bias: Vec<TokenBias>,
    n_probs: usize,
    /// The value in the request.
    #[schema(value_type = Value)]
    grammar: Value,
    grammar_lazy: bool,
    #[schema(value_type = Vec<u32>)]
    grammar_triggers: EmptyList,
    #[schema(value_type = Vec<u32>)]
    preserved_tokens: EmptyList,
    chat_format: &'static str,
    reasoning_format: &'static str,
    reasoning_in_content: bool,
    generation_prompt: &'static str,
    /// The value in the request.
    #[schema(value_type = Value)]
    #[serde(rename = "speculative.types")]
    speculative_types: Value,
    /// The value in the request.
    #[schema(value_type = Value)]
    #[serde(rename = "speculative.n_max")]
    speculative_n_max: Value,
    /// The value in the request.
    #[schema(value_type = Value)]
    #[serde(rename = "speculative.n_min")]
    speculative_n_min: Value,
    /// The value in the request.
    #[schema(value_type = Value)]
    #[serde(rename = "speculative.p_min")]
    speculative_p_min: Value,
    timings_per_token: bool,
    post_sampling_probs: bool,
    /// The value in the request.
    #[schema(value_type = Value)]
    backend_sampling: Value,
    /// Active adapters: `{id, scale}`.
    #[schema(value_type = Vec<Object>)]
    lora: Vec<ScaledAdapter>,
    /// Active control vectors; absent if there are none.
    #[schema(value_type = Vec<ControlVectorBody>)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    steering: Vec<ScaledVector>,
}

impl GenerationSettings {
    /// Returns the settings of a run.
    pub(crate) fn new(sampling: &SamplingParams, limits: &Limits, options: &ReportedOptions) -> Self {
        let echoed = options.echoed.clone();
        let bias = |&(token, bias): &(TokenId, f32)| TokenBias { bias: bias.is_finite().then_some(bias.into()), token };
        Self {
            seed: sampling.seed,
            temperature: shortest_f64(sampling.temperature),
            top_k: sampling.top_k,
            top_p: shortest_f64(sampling.top_p),
            min_p: shortest_f64(sampling.min_p),
            repeat_last_n: sampling.repeat_last_n,
            repeat_penalty: shortest_f64(sampling.repeat_penalty),
            presence_penalty: shortest_f64(sampling.presence_penalty),
            frequency_penalty: shortest_f64(sampling.frequency_penalty),
            dynatemp_range: shortest_f64(sampling.dynatemp_range),
            dynatemp_exponent: shortest_f64(sampling.dynatemp_exponent),
            top_n_sigma: shortest_f64(sampling.top_n_sigma),
            xtc_probability: shortest_f64(sampling.xtc_probability),
            xtc_threshold: shortest_f64(sampling.xtc_threshold),
            typical_p: shortest_f64(sampling.typical_p),
            dry_multiplier: shortest_f64(sampling.dry_multiplier),
            dry_base: shortest_f64(sampling.dry_base),
            dry_allowed_length: sampling.dry_allowed_length,
            dry_penalty_last_n: sampling.dry_penalty_last_n,
            dry_sequence_breakers: sampling.dry_sequence_breakers.clone(),
            mirostat: sampling.mirostat,
            mirostat_tau: shortest_f64(sampling.mirostat_tau),
            mirostat_eta: shortest_f64(sampling.mirostat_eta),
            adaptive_target: shortest_f64(sampling.adaptive_target),
            adaptive_decay: shortest_f64(sampling.adaptive_decay),
            min_keep: sampling.min_keep,
            samplers: sampling.samplers.clone(),
            stop: limits.stop.clone(),
            max_tokens: options.n_predict,
            n_predict: options.n_predict,
            n_keep: echoed.n_keep,
            n_discard: echoed.n_discard,
            n_indent: limits.min_indent,
            n_cache_reuse: echoed.n_cache_reuse,
            t_max_predict_ms: limits.max_time.map_or(0, |time| time.as_millis() as u64),
            ignore_eos: limits.ignore_eos,
            stream: options.stream,
            logit_bias: sampling.logit_bias.iter().map(bias).collect(),
            n_probs: options.n_probs,
            grammar: echoed.grammar,
            grammar_lazy: false,
            grammar_triggers: [],
            preserved_tokens: [],
            chat_format: "Content-only",
            reasoning_format: "none",
            reasoning_in_content: false,
            generation_prompt: "",
            speculative_types: echoed.speculative_types,
            speculative_n_max: echoed.speculative_n_max,
            speculative_n_min: echoed.speculative_n_min,
            speculative_p_min: echoed.speculative_p_min,
            timings_per_token: options.timings_per_token,
            post_sampling_probs: options.after_sampler,
            backend_sampling: echoed.backend_sampling,
            lora: options.adapters.loras().to_vec(),
            steering: options.adapters.steering().to_vec(),
        }
    }
}
