//! Descriptions of the client messages of the streaming protocol. Messages are read field by field, so that every error
//! names the field.

use crate::api::shared::body::{AdapterScaleBody, ControlVectorBody};
use serde::Serialize;
use serde_json::Value;
use std::collections::HashMap;
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

/// A message that starts a run. The first message of a connection must be `config`, `resume` or `feedback`.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the message is read field by field; this describes it")]
pub(super) struct ConfigMessage {
    /// Name of the model, optionally followed by mods; default is the server's default model.
    model: Option<String>,
    #[schema(schema_with = prompt_schema)]
    prompt: Value,
    /// The client's id of the run, up to 256 bytes; must be unique.
    request_id: Option<String>,
    parameters: Option<StreamParameters>,
    options: Option<StreamOptionsBody>,
    /// Names of mods, or objects with `name` and `config`.
    #[schema(value_type = Option<Vec<Object>>)]
    mods: Option<Vec<Value>>,
    /// Scales of LoRA adapters; adapters that are not listed are not applied.
    lora: Option<Vec<AdapterScaleBody>>,
    /// Control vectors, in place of those with a default scale; up to 64.
    steering: Option<Vec<ControlVectorBody>>,
    /// Record the attention of each token: true, false, or `{"heads": "all"}` or `{"heads": [[layer, head], …]}` to store
    /// the rows of individual heads too.
    #[schema(value_type = Option<Value>)]
    attention: Option<Value>,
    /// Record the logits of the most probable tokens after each layer (logit lens).
    #[schema(default = false)]
    lens: Option<bool>,
    /// Recording: true, false, `required`, `best-effort` or `off`.
    #[schema(value_type = Option<Value>)]
    record: Option<Value>,
    /// Label of the user; if it is missing, `safety_identifier`, then `prompt_cache_key`.
    user: Option<String>,
    /// Labels of the run, up to 16.
    metadata: Option<HashMap<String, String>>,
    /// The label `session_id` of the run, outside of `metadata`.
    session_id: Option<String>,
}

fn prompt_schema() -> Object {
    let kinds = SchemaType::from_iter([Type::String, Type::Array]);
    ObjectBuilder::new().schema_type(kinds).description(Some("A string, or a list of strings and token ids.")).build()
}

/// Parameters of a run. All sampling parameters of the other routes are accepted too, e.g. `min_p`, `logit_bias` and
/// `samplers`. The action `modify` accepts sampling parameters and limits.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the message is read field by field; this describes it")]
pub(super) struct StreamParameters {
    /// Maximum tokens of the answer; default is the rest of the context. A value above `--max-tokens-limit` is
    /// rejected.
    max_tokens: Option<u32>,
    #[schema(minimum = 0, maximum = 100, default = 0.8)]
    temperature: Option<f64>,
    #[schema(minimum = 0, maximum = 1, default = 0.95)]
    top_p: Option<f64>,
    #[schema(minimum = -1, default = 40)]
    top_k: Option<i32>,
    #[schema(minimum = 0.01, maximum = 100, default = 1)]
    repetition_penalty: Option<f64>,
    /// Strings that end the answer.
    stop: Option<Vec<String>>,
    /// Token ids, or strings of one token each, that are never sampled.
    #[schema(value_type = Option<Vec<Object>>)]
    banned_tokens: Option<Vec<Value>>,
    /// Seed of the sampler; default is a random seed.
    seed: Option<i64>,
}

/// Options that shape the messages.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the message is read field by field; this describes it")]
pub(super) struct StreamOptionsBody {
    /// Send token messages; if false, send only the completion.
    #[schema(default = true)]
    stream: Option<bool>,
    /// Repeat the prompt in `generated_text`.
    #[schema(default = false)]
    echo_prompt: Option<bool>,
    /// Send `token_id`.
    #[schema(default = false)]
    include_token_ids: Option<bool>,
    /// Send `logprobs`.
    #[schema(default = false)]
    include_logprobs: Option<bool>,
    #[schema(minimum = 1, maximum = 100, default = 5)]
    top_logprobs: Option<u32>,
    /// Send `timing`.
    #[schema(default = false)]
    include_timing: Option<bool>,
    /// `delta` omits `generated_text` from token messages. With `cumulative`, the total size of the messages grows with
    /// the square of the text's length.
    generated_text: Option<GeneratedTextOption>,
    /// Maximum duration of the run in milliseconds, without pauses. A longer run ends with the error `timeout`.
    timeout_ms: Option<u32>,
}

/// The text in `generated_text` of token messages.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case", default = "cumulative")]
#[expect(dead_code, reason = "the message is read field by field; this describes it")]
pub(super) enum GeneratedTextOption {
    /// The text so far.
    Cumulative,
    /// No text.
    Delta,
}

/// A message that controls an active run: the run with `request_id`, or without it the newest run of this connection.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the message is read field by field; this describes it")]
pub(super) struct ControlMessage {
    action: ControlAction,
    /// The run's `request_id`.
    request_id: Option<String>,
    /// The parameters to change, with `modify`.
    parameters: Option<StreamParameters>,
}

/// An action on a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ToSchema)]
#[schema(rename_all = "snake_case")]
pub(super) enum ControlAction {
    /// Ends the run with a completion.
    Stop,
    /// Pauses the run. It keeps its slot for `--pause-timeout`; after that, other runs may use the slot.
    Pause,
    /// Continues a paused run.
    Resume,
    /// Ends the run without further messages and starts another one with the same, possibly modified configuration. Its
    /// `init` names the replaced run.
    Regenerate,
    /// Changes parameters from the next token on.
    Modify,
}

/// A rating of a run, which is stored with the run and shown in the dashboard.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the message is read field by field; this describes it")]
pub(super) struct FeedbackMessage {
    /// Rating from -1 (bad) to 1 (good).
    #[schema(minimum = -1, maximum = 1)]
    rating: f64,
    /// Comment, up to 10,000 characters.
    text: Option<String>,
    /// Index of the token in the answer, from 0.
    position: Option<u32>,
    /// The run's `request_id`.
    request_id: Option<String>,
}

/// A request for the messages of a run after index `after`.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ResumeMessage {
    r#type: &'static str,
    /// The run's `request_id`.
    request_id: String,
    /// The last index received.
    #[schema(default = 0, required = false)]
    after: usize,
}

impl ResumeMessage {
    pub(super) const fn new(request_id: String, after: usize) -> Self {
        Self { r#type: "resume", request_id, after }
    }
}

/// A message with the API key.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the message is read field by field; this describes it")]
pub(super) struct AuthMessage {
    /// The key.
    api_key: String,
}

/// A message without fields.
#[derive(Debug, ToSchema)]
pub(super) struct PingMessage {}
