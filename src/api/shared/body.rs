//! Descriptions of the request fields that several protocols share. Bodies are read field by field, so that every error
//! names the field; these types only describe them in the `OpenAPI` document.

use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use utoipa::ToSchema;

/// Fields that every request for a generation accepts. `null` counts as absent.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) struct GenerationFields {
    /// Name of the model, optionally followed by mods: `model/mod`. Default is the server's default model.
    model: Option<String>,
    /// Mods in the order in which they are called.
    mods: Option<Vec<ModSelection>>,
    /// Answer with server-sent events.
    #[schema(default = false)]
    stream: Option<bool>,
    /// Maximum tokens of the answer; -1 for the rest of the context. Also `n_predict` and `max_completion_tokens`.
    max_tokens: Option<i64>,
    /// Maximum forward passes; default is 4 times the maximum tokens plus 256.
    #[schema(minimum = 1)]
    max_steps: Option<u32>,
    /// Maximum duration of the generation in milliseconds; 0 for no limit.
    #[schema(default = 0)]
    t_max_predict_ms: Option<i64>,
    /// Strings that end the answer: one or a list.
    #[schema(value_type = Option<Vec<String>>)]
    stop: Option<Value>,
    /// Tokens that end the answer, by id or text.
    #[schema(value_type = Option<Vec<Value>>)]
    stop_tokens: Option<Vec<Value>>,
    /// Prevent the model from ending the answer.
    #[schema(default = false)]
    ignore_eos: Option<bool>,
    /// Seed of the sampler; -1 for a random one.
    seed: Option<i64>,
    /// Temperature; 0 selects the most probable token.
    #[schema(minimum = 0, maximum = 100, default = 0.8)]
    temperature: Option<f64>,
    /// Number of most probable tokens to sample from; 0 for all.
    #[schema(default = 40)]
    top_k: Option<i32>,
    /// Nucleus sampling.
    #[schema(minimum = 0, maximum = 1, default = 0.95)]
    top_p: Option<f64>,
    /// Minimum probability, relative to the most probable token.
    #[schema(minimum = 0, maximum = 1, default = 0.05)]
    min_p: Option<f64>,
    /// Locally typical sampling; 1 for none.
    #[schema(minimum = 0, maximum = 1, default = 1)]
    typical_p: Option<f64>,
    /// Maximum distance from the highest logit in standard deviations; -1 for none.
    #[schema(minimum = -1, maximum = 100, default = -1)]
    top_n_sigma: Option<f64>,
    #[schema(minimum = 0, maximum = 1, default = 0)]
    xtc_probability: Option<f64>,
    #[schema(minimum = 0, maximum = 1, default = 0.1)]
    xtc_threshold: Option<f64>,
    /// Penalty on repeated tokens; 1 for none.
    #[schema(minimum = 0.01, maximum = 100, default = 1)]
    repeat_penalty: Option<f64>,
    /// Number of last tokens that count as repeated; -1 for all.
    #[schema(default = 64)]
    repeat_last_n: Option<i32>,
    #[schema(minimum = -10, maximum = 10, default = 0)]
    presence_penalty: Option<f64>,
    #[schema(minimum = -10, maximum = 10, default = 0)]
    frequency_penalty: Option<f64>,
    #[schema(minimum = 0, maximum = 100, default = 0)]
    dry_multiplier: Option<f64>,
    #[schema(minimum = 0, maximum = 100, default = 1.75)]
    dry_base: Option<f64>,
    #[schema(default = 2)]
    dry_allowed_length: Option<i32>,
    /// -1 for the whole context.
    #[schema(default = 64)]
    dry_penalty_last_n: Option<i32>,
    /// Strings that end a repetition; also as one string with a JSON list.
    dry_sequence_breakers: Option<Vec<String>>,
    /// 0 for none, 1 or 2 for the version.
    #[schema(minimum = 0, maximum = 2, default = 0)]
    mirostat: Option<u8>,
    #[schema(default = 5)]
    mirostat_tau: Option<f64>,
    #[schema(default = 0.1)]
    mirostat_eta: Option<f64>,
    #[schema(minimum = 0, maximum = 100, default = 0)]
    dynatemp_range: Option<f64>,
    #[schema(minimum = 0, maximum = 100, default = 1)]
    dynatemp_exponent: Option<f64>,
    /// -1 for none.
    #[schema(minimum = -1, maximum = 1, default = -1)]
    adaptive_target: Option<f64>,
    #[schema(minimum = 0, maximum = 0.99, default = 0.9)]
    adaptive_decay: Option<f64>,
    #[schema(default = 0)]
    min_keep: Option<u32>,
    /// Sampling stages in order, as names or as one string of letters.
    #[schema(value_type = Option<Value>)]
    samplers: Option<Value>,
    /// Additions to logits: an object that maps tokens to numbers, or a list of `[token, number]`.
    #[schema(value_type = Option<Value>)]
    logit_bias: Option<Value>,
    /// Tokens that are never sampled, by id or text.
    #[schema(value_type = Option<Vec<Value>>)]
    banned_tokens: Option<Vec<Value>>,
    /// Grammar in GBNF, or in Lark's format after `%llguidance`.
    grammar: Option<String>,
    /// JSON schema of the answer.
    #[schema(value_type = Option<Value>)]
    json_schema: Option<Value>,
    /// `{type: "text"}`, `{type: "json_object", schema?}` or `{type: "json_schema", json_schema: {schema}}`.
    #[schema(value_type = Option<Object>)]
    response_format: Option<Value>,
    /// Unique id of the run, up to 256 bytes.
    request_id: Option<String>,
    /// Label of the user; if it is missing, `safety_identifier`, then `prompt_cache_key`.
    user: Option<String>,
    safety_identifier: Option<String>,
    prompt_cache_key: Option<String>,
    /// Labels of the run, up to 16.
    metadata: Option<HashMap<String, String>>,
    /// The label `session_id` of the run, outside of `metadata`.
    session_id: Option<String>,
    /// Recording: true, false, `required`, `best-effort` or `off`.
    #[schema(value_type = Option<Value>)]
    record: Option<Value>,
    /// Record the attention of each token: true, false, or `{"heads": "all"}` or `{"heads": [[layer, head], …]}` to store
    /// the rows of individual heads too.
    #[schema(value_type = Option<Value>)]
    attention: Option<Value>,
    /// Record the logits of the most probable tokens after each layer (logit lens).
    #[schema(default = false)]
    lens: Option<bool>,
    /// Slot to run in; -1 for any.
    #[schema(default = -1)]
    id_slot: Option<i32>,
    /// Reuse the KV cache of a matching prefix.
    #[schema(default = true)]
    cache_prompt: Option<bool>,
    /// Behavior when the context is full: `stop`, `shift` or `evict`.
    context_policy: Option<String>,
    /// Tokens of the prompt that a context shift keeps; -1 for all.
    #[schema(default = 0)]
    n_keep: Option<i32>,
    /// Tokens that a context shift removes; 0 for half.
    #[schema(default = 0)]
    n_discard: Option<i32>,
    /// Minimum tokens of a cached part of the prompt that is reused at another position; 0 disables the reuse.
    #[schema(default = 0)]
    n_cache_reuse: Option<i32>,
    /// Minimum indentation of lines in whitespace characters.
    #[schema(maximum = 1000, default = 0)]
    n_indent: Option<u32>,
    /// Maximum tokens of a draft; 0 for no drafts. Default is `--spec-draft-n-max`.
    #[serde(rename = "speculative.n_max")]
    speculative_n_max: Option<u32>,
    /// Minimum tokens of a draft. Default is `--spec-draft-n-min`.
    #[serde(rename = "speculative.n_min")]
    speculative_n_min: Option<u32>,
    /// Minimum probability of a drafted token. Default is `--spec-draft-p-min`.
    #[serde(rename = "speculative.p_min")]
    #[schema(minimum = 0, maximum = 1)]
    speculative_p_min: Option<f64>,
    /// Scales of LoRA adapters; adapters that are not listed are not applied.
    lora: Option<Vec<AdapterScaleBody>>,
    /// Control vectors, in place of those with a default scale; up to 64.
    steering: Option<Vec<ControlVectorBody>>,
    /// Number of probabilities per token.
    #[schema(minimum = 0, maximum = 1000, default = 0)]
    n_probs: Option<u32>,
    /// Report probabilities after the sampling stages.
    #[schema(default = false)]
    post_sampling_probs: Option<bool>,
    /// Seconds without an event after which a stream sends a comment; -1 for none.
    sse_ping_interval: Option<i64>,
}

/// The body of a chat completion.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) struct ChatCompletionRequest {
    messages: Vec<ChatMessageBody>,
    /// Functions offered to the model.
    tools: Option<Vec<ToolBody>>,
    /// `auto`, `none`, `required`, or `{type: "function", function: {name}}`.
    #[schema(value_type = Option<Value>)]
    tool_choice: Option<Value>,
    #[schema(default = true)]
    parallel_tool_calls: Option<bool>,
    /// Number of answers to generate.
    #[schema(minimum = 1, maximum = 32, default = 1)]
    n: Option<u32>,
    /// Report the log-probabilities of the answer's tokens.
    #[schema(default = false)]
    logprobs: Option<bool>,
    /// Alternatives per token; requires `logprobs`.
    #[schema(minimum = 0, maximum = 1000)]
    top_logprobs: Option<u32>,
    stream_options: Option<ChunkOptions>,
    /// Report the prompt and the settings.
    #[schema(default = false)]
    verbose: Option<bool>,
    /// Reasoning effort for templates that support it.
    reasoning_effort: Option<String>,
    /// `none` leaves reasoning in the text.
    reasoning_format: Option<String>,
    /// Allow reasoning.
    enable_thinking: Option<bool>,
    /// Maximum tokens of the reasoning; -1 for no limit. Also `thinking_budget_tokens` and `reasoning_budget`.
    reasoning_budget_tokens: Option<i64>,
    /// Text appended when the budget is spent.
    reasoning_budget_message: Option<String>,
    /// Allow a control request to end the reasoning.
    #[schema(default = false)]
    reasoning_control: Option<bool>,
    /// Variables of the chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Value>,
    #[schema(default = true)]
    add_generation_prompt: Option<bool>,
    /// Continue the last message instead of starting another: its content, or its reasoning if it has no content.
    /// `"content"` and `"reasoning_content"` are the same as true.
    #[schema(value_type = Option<Value>, default = false)]
    continue_final_message: Option<Value>,
    /// Add timings to every chunk of a stream.
    #[schema(default = false)]
    timings_per_token: Option<bool>,
    /// Send the progress of the prompt in a stream.
    #[schema(default = false)]
    return_progress: Option<bool>,
    #[serde(flatten)]
    generation: GenerationFields,
}

/// A mod of a run.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) enum ModSelection {
    /// Name of the mod.
    Name(String),
    /// A mod with a configuration.
    Configured {
        /// Name of the mod.
        name: String,
        /// Configuration of the mod; the mod defines its fields.
        #[schema(value_type = Option<Value>)]
        config: Option<Value>,
    },
}

/// The scale of a LoRA adapter.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) struct AdapterScaleBody {
    /// Id of the adapter, from `GET /lora-adapters`.
    id: u32,
    scale: f64,
}

/// A control vector of a run.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) struct ControlVectorBody {
    /// Name of the vector, from `GET /api/v1/control-vectors`.
    name: String,
    /// Factor of its directions.
    #[schema(minimum = -1000, maximum = 1000, default = 1)]
    scale: Option<f64>,
    /// First and last layer that it is added to, counted from 0; default is the server's range.
    layers: Option<[u32; 2]>,
    /// Expected hash of its directions, as recorded; another vector is rejected with status 409.
    fingerprint: Option<String>,
}

/// Options of a stream.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(crate) struct ChunkOptions {
    /// Send a last chunk with token counts.
    #[schema(default = false)]
    include_usage: Option<bool>,
}

/// A message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct ChatMessageBody {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    role: String,
    /// A text, or a list of parts: `{type: "text", text}`, and `{type: "image_url", image_url: {url}}` with a data URL or
    /// a URL that the server may fetch.
    #[schema(value_type = Option<Value>)]
    content: Option<Value>,
    /// Tool calls of the assistant: `{id, type: "function", function: {name, arguments}}`.
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
    /// Id of the call whose result the message contains, if the role is `tool`.
    tool_call_id: Option<String>,
    /// Reasoning of the assistant.
    reasoning_content: Option<String>,
}

/// A function offered to the model.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct ToolBody {
    /// Always `function`.
    r#type: String,
    function: ToolFunctionBody,
}

/// The name and the parameters of a function.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct ToolFunctionBody {
    /// Up to 128 letters, digits, `_`, `-` and `.`.
    name: String,
    description: Option<String>,
    /// JSON schema of the arguments.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Value>,
    /// Constrain the arguments to the schema.
    #[schema(default = false)]
    strict: Option<bool>,
}
