//! Messages of the worker protocol.

use super::wire_action::WireAction;
use crate::events::{EventType, LogLevel, TokenId};
use crate::model::llama::NoHiddenStates;
use crate::mods::{ModException, PromptImage, schema_check};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Maximum bytes kept of an exception's message.
const MAX_MESSAGE_BYTES: usize = 8 << 10;
/// Maximum bytes kept of an exception's traceback.
const MAX_TRACEBACK_BYTES: usize = 256 << 10;

/// Message from the server to the worker.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ToWorker<'a> {
    /// Import the mod; the body is its source. Answered by `loaded` or `failed`.
    Load {
        /// Name in tracebacks.
        file: &'a str,
        /// Name in `sys.modules`.
        module: &'a str,
        /// Function to serve; `None` lists all with `@mod`.
        entrypoint: Option<&'a str>,
        /// True for a scorer, whose function is `score`.
        scorer: bool,
    },
    /// An answer to score; the body is its text. Answered by `scored` or `failed`.
    Score { cell: &'a ScoredCell },
    /// A run that later calls refer to. Not answered.
    Run {
        run: u64,
        request_id: &'a str,
        model: &'a str,
        conversation: Option<&'a Value>,
        tools: Option<&'a Value>,
        images: &'a [PromptImage],
        parameters: &'a Value,
        config: &'a Value,
        seed: u32,
        vocabulary: VocabularyInfo<'a>,
        /// Number of layers whose hidden states can be read; `None` if there are none.
        layers: Option<u16>,
    },
    /// One event. Answered by `reply`, after any number of `query` and `log`.
    Call(CallHeader<'a>),
    /// The run has ended. Answered by `reply`.
    Finished { run: u64 },
    /// Answer to `query`. For `encode`: the tokens. For `vocabulary`: the control tokens, and as body `u32` offsets
    /// (one more than tokens), then the bytes of all pieces.
    Answer {
        #[serde(skip_serializing_if = "Option::is_none")]
        tokens: Option<Vec<TokenId>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        control: Option<Vec<TokenId>>,
        /// True if the vocabulary no longer exists.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        gone: bool,
    },
}

/// Properties of a cell of an experiment that a scorer receives.
#[derive(Debug, Clone, Serialize)]
pub struct ScoredCell {
    /// Number of the cell, from 0.
    pub cell: usize,
    /// Id of its run.
    pub run_id: String,
    /// The prompt.
    pub prompt: String,
    /// The list of mods.
    pub mods: Vec<Value>,
    /// The set of parameters.
    pub parameters: serde_json::Map<String, Value>,
    /// The seed.
    pub seed: u32,
    /// Finish reason of the run.
    pub finish_reason: &'static str,
    /// Tokens of the answer.
    pub completion_tokens: u32,
}

/// Serializes a header, which cannot fail for these types.
pub fn to_json(message: &ToWorker<'_>) -> Vec<u8> {
    serde_json::to_vec(message).unwrap_or_default()
}

/// Description of a vocabulary for a worker.
#[derive(Serialize)]
pub struct VocabularyInfo<'a> {
    pub id: usize,
    pub size: usize,
    pub eos: Option<TokenId>,
    pub bos: Option<TokenId>,
    pub end_of_generation: &'a [TokenId],
}

/// Header of a call; positions in the shared memory are (byte offset, number of elements).
#[derive(Serialize)]
pub struct CallHeader<'a> {
    pub run: u64,
    pub event: EventType,
    pub step: u32,
    pub max_steps: u32,
    pub prompt_len: usize,
    /// Number of generated tokens that a full context has evicted.
    pub evicted: usize,
    /// Index of the first token that followed all evicted ones; 0 if none were evicted.
    pub evictions_end: usize,
    pub tokens: (u64, usize),
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits: Option<(u64, usize)>,
    /// Hidden states of the layers that the mod reads, one after the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hidden_states: Option<(u64, usize)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<TokenId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<&'a str>,
    pub logprob: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub added: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forced: Option<bool>,
}

/// Message from the worker to the server.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FromWorker {
    /// The import succeeded.
    Loaded { handlers: Vec<HandlerInfo> },
    /// The import or the scoring failed.
    Failed(WireException),
    /// A line was printed or logged.
    Log { level: LogLevel, message: String },
    /// A query to the server.
    Query(WorkerQuery),
    /// The score of an answer.
    Scored { score: Option<f32> },
    /// The reply to a call. The body has sparse edits: `i32` tokens, then as many `f32` values.
    Reply(WorkerReply),
}

/// Reply of a worker to a call.
#[derive(Deserialize)]
pub struct WorkerReply {
    pub action: Option<WireAction>,
    pub exception: Option<WireException>,
    pub elapsed_ns: u64,
    /// New number of last generated tokens that are held back from the client.
    #[serde(default)]
    pub holdback: Option<usize>,
    /// With `holdback`: see [`ModInstance::discard_from`](crate::mods::ModInstance::discard_from).
    #[serde(default)]
    pub discard_from: Option<usize>,
}

/// A function with `@mod`.
#[derive(Deserialize, Debug, Clone)]
pub struct HandlerInfo {
    /// Name used by runs.
    pub name: String,
    /// Description in one sentence.
    pub description: String,
    /// Events that it handles.
    pub handles: Vec<EventType>,
    /// Fields of its configuration with their defaults, if declared.
    pub config: Option<serde_json::Map<String, Value>>,
    /// JSON schema of its configuration, if declared.
    #[serde(default)]
    pub schema: Option<Value>,
    /// Maximum tokens that it removes.
    pub holdback: usize,
    /// Maximum number of workers, if declared.
    #[serde(default)]
    pub workers: Option<usize>,
    /// Layers whose hidden states it reads; negative numbers count from the end.
    #[serde(default)]
    pub hidden_states: Vec<i64>,
    /// Name within the module.
    pub entrypoint: String,
    /// True if another module of the package defines it.
    #[serde(default)]
    pub is_imported: bool,
}

/// Query of a worker about a vocabulary.
#[derive(Deserialize)]
pub struct WorkerQuery {
    /// Id of the vocabulary.
    pub vocabulary: usize,
    #[serde(flatten)]
    pub about: QueryKind,
}

/// Kind of a query.
#[derive(Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum QueryKind {
    /// Token ids of a text.
    Encode { text: String, add_special: bool },
    /// The whole vocabulary.
    Vocabulary,
}

/// Exception in a reply.
#[derive(Deserialize)]
pub struct WireException {
    message: String,
    traceback: Option<String>,
}

impl From<WireException> for ModException {
    fn from(wire: WireException) -> Self {
        // The SDK sends one line; more could forge log entries of the server.
        let mut message = wire.message.lines().next().unwrap_or_default().to_owned();
        message.truncate(message.floor_char_boundary(MAX_MESSAGE_BYTES));
        let traceback = wire.traceback.map(|mut text| {
            // The last exception and its position are at the end.
            text.drain(..text.ceil_char_boundary(text.len().saturating_sub(MAX_TRACEBACK_BYTES)));
            text
        });
        Self { message, traceback }
    }
}

impl HandlerInfo {
    /// Returns the layers whose hidden states the mod reads, in the order of their declaration. `known` is the number of
    /// layers of the model.
    ///
    /// # Errors
    /// The model or its server has no such hidden states.
    pub fn hidden_layers(&self, known: Result<u16, NoHiddenStates>) -> Result<Vec<u16>, String> {
        if self.hidden_states.is_empty() {
            return Ok(Vec::new());
        }
        let count = known.map_err(|reason| format!("the mod reads hidden states, but {reason}"))?;
        let resolve = |&layer: &i64| {
            let from_start = if layer < 0 { layer + i64::from(count) } else { layer };
            u16::try_from(from_start).ok().filter(|&layer| layer < count).ok_or_else(|| {
                format!(
                    "the mod reads the hidden states of layer {layer}, but the model has {count} layers: 0 to {}, or -{count} to -1",
                    count - 1
                )
            })
        };
        self.hidden_states.iter().map(resolve).collect()
    }

    /// Validates a request's configuration against the mod's declaration.
    ///
    /// # Errors
    /// The field that is unknown, missing or of the wrong type, and what is expected.
    pub fn check_config(&self, config: &Value) -> Result<(), String> {
        let Some(schema) = &self.schema else {
            let is_valid = config.is_null() || config.is_object();
            return is_valid
                .then_some(())
                .ok_or_else(|| format!("the configuration must be an object, got {}", schema_check::excerpt(config)));
        };
        let fields = schema_check::known_fields(config, schema)?;
        schema_check::first_error(&Value::Object(fields), schema).map_or(Ok(()), Err)
    }
}
