//! Descriptions of the attention API's requests. Requests are read field by field, so that every error names the field.

use crate::api::shared::body::{AdapterScaleBody, ControlVectorBody};
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

/// A request to generate from token ids.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) struct GenerateAttention {
    /// The client's id of the request, 1 to 256 bytes; generated if absent. Also the `request_id` of the run, unless an
    /// earlier run has it or `num_samples` is above 1.
    request_id: Option<String>,
    /// The complete context as token ids.
    input_ids: Vec<i32>,
    /// Maximum tokens of the answer; default is the rest of the context.
    max_new_tokens: Option<u32>,
    /// Temperature; 0 always selects the most probable token.
    temperature: Option<f64>,
    /// Nucleus sampling, 0 to 1.
    top_p: Option<f64>,
    /// Number of most probable tokens to sample from; 0 for all.
    top_k: Option<i32>,
    /// Penalty on repeated tokens; 1 for none.
    repetition_penalty: Option<f64>,
    /// The same seed gives the same tokens; -1 for a random seed.
    seed: Option<i64>,
    /// Tokens that end the answer; not part of it.
    stop_tokens: Option<Vec<i32>>,
    /// Tokens that are never sampled.
    banned_tokens: Option<Vec<i32>>,
    /// Strings that end the answer; part of it.
    stop: Option<Vec<String>>,
    /// Send attention with each token.
    #[schema(default = false)]
    return_attention: Option<bool>,
    attention_format: Option<AttentionFormat>,
    aggregation_mode: Option<AggregationMode>,
    /// One weight per layer; the default is described with `aggregation_mode`.
    layer_weights: Option<Vec<f64>>,
    /// Number of positions, with the format `sparse`.
    #[schema(default = 50)]
    attention_top_k: Option<u32>,
    /// `float32` or `float16`.
    #[schema(default = "float32")]
    attention_dtype: Option<String>,
    /// `base64`, `binary` or `array`. Default is `base64`, `array` for the format `aggregated`, and `binary` in
    /// `MessagePack`.
    attention_encoding: Option<String>,
    /// `json` or `msgpack`, on the WebSocket, also for errors; default is the format of the request.
    message_format: Option<String>,
    /// Send each token's log-probability. Default is true on the WebSocket, false over HTTP.
    logprobs: Option<LogprobsBody>,
    /// Alternatives per token. Default is 2 on the WebSocket; over HTTP, they are only sent if requested.
    #[schema(minimum = 0, maximum = 100)]
    top_logprobs: Option<u32>,
    /// Number of answers, numbered by `sample`, with consecutive seeds.
    #[schema(minimum = 1, maximum = 64, default = 1)]
    num_samples: Option<u32>,
    /// Send a `pruning_suggestion` before `done`.
    #[schema(default = false)]
    suggest_pruning: Option<bool>,
    /// Threshold: a sentence is suggested if all its tokens received less attention.
    #[schema(default = 0.05)]
    prune_below: Option<f64>,
    /// Sentences of `input_ids`; by default, they end at `.`, `!`, `?`, line breaks and control tokens.
    sentences: Option<Vec<SentenceRange>>,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
    /// Mods in the order in which they are called: names, or objects with `name` and `config`.
    #[schema(value_type = Option<Vec<Object>>)]
    mods: Option<Vec<Value>>,
    /// Scales of LoRA adapters; adapters that are not listed are not applied.
    lora: Option<Vec<AdapterScaleBody>>,
    /// Control vectors, in place of those with a default scale; up to 64.
    steering: Option<Vec<ControlVectorBody>>,
    /// Record the run.
    #[schema(default = true)]
    record: Option<bool>,
}

/// The log-probabilities of an answer's tokens.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) enum LogprobsBody {
    /// With or without them.
    Requested(bool),
    /// With this number of alternatives per token, up to 100.
    Alternatives(u32),
}

/// The format of attention.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) enum AttentionFormat {
    /// Every head of every layer; the default.
    PerLayer,
    /// One value per position.
    Aggregated,
    /// The positions with the most attention, each with the mean over the heads of each layer.
    Sparse,
    /// Statistics of each layer, entropies in bits.
    Viz,
}

/// The aggregation over heads and layers.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) enum AggregationMode {
    /// The default.
    Mean,
    Max,
    LastLayer,
    /// Mean weighted by `layer_weights`. The default weight is 0.5 + l / L for layer l = 0 … L - 1 of the L layers that
    /// have attention.
    WeightedLayers,
}

/// A sentence of the context.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) struct SentenceRange {
    turn_id: i64,
    sentence_id: i64,
    /// Index of the first token.
    start: usize,
    /// Index after the last token.
    end: usize,
}

/// A message that cancels a request.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct CancelAttention {
    /// The client's id of the request.
    request_id: String,
}

/// A message that requests a `pong`.
#[derive(Debug, ToSchema)]
pub(super) struct AttentionPing {}

/// A text to tokenize.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct TokenizeAttention {
    text: String,
    /// Add the BOS and EOS tokens if the model uses them.
    #[schema(default = false)]
    add_special_tokens: Option<bool>,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
}

/// Tokens to convert to text.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct DetokenizeAttention {
    token_ids: Vec<i32>,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
}
