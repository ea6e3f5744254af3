//! Messages of the worker protocol, and validation of a worker's replies.

use super::shared_memory::{MemoryRegion, SharedMemory};
use crate::events::{EventType, Fault, LogLevel, TokenId};
use crate::model::Vocabulary;
use crate::mods::{Action, LogitEdit, ModException, schema_check};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Version of the protocol. The SDK is embedded in the binary, so both sides always agree.
pub const PROTOCOL: u32 = 1;

/// Maximum bytes kept of an exception's message and traceback.
const MAX_MESSAGE_BYTES: usize = 8 << 10;
const MAX_TRACEBACK_BYTES: usize = 256 << 10;
/// Maximum bytes of an error with which a mod ends its run.
const MAX_ERROR_BYTES: usize = 64 << 10;
/// Maximum bytes of the tool calls of an action, as JSON.
const MAX_TOOL_CALLS_BYTES: usize = 1 << 20;
/// Maximum bytes of a text that is encoded for a worker. A longer one would delay the supervisor beyond the deadline.
pub const MAX_TEXT_BYTES: usize = 1 << 20;

/// Message from the server to the worker.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ToWorker<'a> {
    /// Import the mod; the body is its source. Answered by `loaded` or `failed`.
    Load {
        protocol: u32,
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
        parameters: &'a Value,
        config: &'a Value,
        seed: u32,
        vocabulary: VocabularyInfo<'a>,
    },
    /// One event. Answered by `reply`, after any number of `query` and `log`.
    Call(CallHeader<'a>),
    /// The run has ended. Answered by `reply`.
    Finished { run: u64 },
    /// Answer to `query`. For `encode`: the tokens. For `vocabulary`: the control tokens, and as body `u32` offsets (one
    /// more than tokens), then the bytes of all pieces.
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

/// Serialises a header, which cannot fail for these types.
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
    pub tokens: (u64, usize),
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits: Option<(u64, usize)>,
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
    /// The import failed.
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
    /// Name within the module.
    pub entrypoint: String,
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

/// Action as JSON.
#[derive(Deserialize)]
#[serde(tag = "type")]
pub enum WireAction {
    Noop,
    AdjustedPrefill {
        tokens: Vec<TokenId>,
        max_steps: Option<u32>,
    },
    AdjustedLogits {
        edit: WireEdit,
        temperature: Option<f32>,
    },
    ForceTokens {
        tokens: Vec<TokenId>,
    },
    Backtrack {
        n: u32,
        tokens: Vec<TokenId>,
    },
    ForceOutput {
        tokens: Vec<TokenId>,
    },
    ToolCalls {
        tool_calls: Value,
    },
    EmitError {
        message: String,
        /// True if the mod was written for Quote.
        #[serde(default)]
        is_quote: bool,
    },
}

/// Location of an edit of the logits.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireEdit {
    /// No edit.
    Keep,
    /// The shared memory has the new logits.
    Memory,
    /// The body has values to set.
    Set,
    /// The body has values to add.
    Add,
}

impl WireAction {
    /// Converts to an action and validates it against the vocabulary. `logits` is the region of the call's logits.
    ///
    /// # Errors
    /// The invalid value, and what is expected.
    pub fn check(
        self,
        body: &[u8],
        vocabulary: &Vocabulary,
        memory: &SharedMemory,
        logits: Option<&MemoryRegion>,
    ) -> Result<Action, String> {
        let action = match self {
            Self::Noop => Action::Noop,
            Self::AdjustedPrefill { tokens, max_steps } => Action::AdjustedPrefill { tokens, max_steps },
            Self::ForceTokens { tokens } => Action::ForceTokens(tokens),
            Self::Backtrack { n, tokens } => Action::Backtrack { n, tokens },
            Self::ForceOutput { tokens } => Action::ForceOutput(tokens),
            Self::ToolCalls { tool_calls } => Action::ToolCalls(tool_calls),
            Self::EmitError { message, is_quote } => {
                Action::EmitError { message, fault: if is_quote { Fault::QuoteMod } else { Fault::Mod } }
            }
            Self::AdjustedLogits { edit, temperature } => {
                if let Some(temperature) =
                    temperature.filter(|temperature| !(temperature.is_finite() && *temperature >= 0.0))
                {
                    return Err(format!("token_temp must be a number of 0 or more, got {temperature}"));
                }
                let edit = match edit {
                    WireEdit::Keep => LogitEdit::Keep,
                    WireEdit::Set => LogitEdit::Set(sparse(body)?),
                    WireEdit::Add => LogitEdit::Add(sparse(body)?),
                    WireEdit::Memory => {
                        let slot = logits.ok_or("logits can only be edited at ForwardPass")?;
                        let values = memory
                            .read(slot, vocabulary.len())
                            .map_err(|error| format!("the shared memory cannot be read: {error}"))?;
                        LogitEdit::Replace(values)
                    }
                };
                Action::AdjustedLogits { edit, temperature }
            }
        };
        check_values(&action, vocabulary)?;
        Ok(action)
    }
}

fn sparse(body: &[u8]) -> Result<Vec<(TokenId, f32)>, String> {
    let (words, rest) = body.as_chunks::<4>();
    if !rest.is_empty() || words.len() % 2 != 0 {
        return Err(format!("an edit must be a list of tokens and values, got {} bytes", body.len()));
    }
    let (tokens, values) = words.split_at(words.len() / 2);
    Ok(tokens
        .iter()
        .zip(values)
        .map(|(&token, &value)| (TokenId::from_ne_bytes(token), f32::from_ne_bytes(value)))
        .collect())
}

fn check_values(action: &Action, vocabulary: &Vocabulary) -> Result<(), String> {
    let check_token = |token: TokenId| {
        if vocabulary.contains(token) {
            return Ok(());
        }
        Err(format!(
            "token {token} is not in the vocabulary; ids must be from 0 to {}",
            vocabulary.len().saturating_sub(1)
        ))
    };
    // −inf bans a token; the sampler cannot handle NaN and +inf.
    let is_usable = |value: f32| !value.is_nan() && value < f32::INFINITY;
    match action {
        Action::AdjustedPrefill { tokens, .. } if tokens.is_empty() => Err("the new prompt is empty".into()),
        Action::AdjustedPrefill { tokens, .. }
        | Action::ForceTokens(tokens)
        | Action::Backtrack { tokens, .. }
        | Action::ForceOutput(tokens) => tokens.iter().try_for_each(|&token| check_token(token)),
        Action::AdjustedLogits { edit: LogitEdit::Set(entries) | LogitEdit::Add(entries), .. }
            if entries.len() > vocabulary.len() =>
        {
            Err(format!("an edit must have at most one entry per token of the vocabulary, got {}", entries.len()))
        }
        Action::AdjustedLogits { edit: LogitEdit::Set(entries) | LogitEdit::Add(entries), .. } => {
            entries.iter().try_for_each(|&(token, value)| {
                check_token(token)?;
                is_usable(value).then_some(()).ok_or_else(|| format!("the logit of token {token} must not be {value}"))
            })
        }
        Action::AdjustedLogits { edit: LogitEdit::Replace(values), .. } => {
            // The loops have no early exit, so that the compiler vectorises them.
            let unusable: u32 = values.iter().map(|&value| u32::from(!is_usable(value))).sum();
            let possible: u32 = values.iter().map(|&value| u32::from(value > f32::NEG_INFINITY)).sum();
            if let (1.., Some(token)) = (unusable, values.iter().position(|&value| !is_usable(value))) {
                return Err(format!("the logit of token {token} must not be {}", values[token]));
            }
            if possible == 0 {
                return Err("all tokens are banned: every logit is -inf".into());
            }
            Ok(())
        }
        Action::ToolCalls(calls) => {
            let size = serde_json::to_vec(calls).map_or(0, |text| text.len());
            (size <= MAX_TOOL_CALLS_BYTES)
                .then_some(())
                .ok_or_else(|| format!("tool calls must have at most {MAX_TOOL_CALLS_BYTES} bytes, got {size}"))
        }
        Action::EmitError { message, .. } if message.len() > MAX_ERROR_BYTES => {
            Err(format!("the text of an error must have at most {MAX_ERROR_BYTES} bytes, got {}", message.len()))
        }
        _ => Ok(()),
    }
}

/// Encodes the vocabulary as the body of an answer.
pub fn vocabulary_body(vocabulary: &Vocabulary) -> Vec<u8> {
    let pieces =
        || (0..vocabulary.len()).map(|index| vocabulary.piece(TokenId::try_from(index).unwrap_or(TokenId::MAX)));
    let mut end = 0_u32;
    let mut bytes = end.to_ne_bytes().to_vec();
    for piece in pieces() {
        end += piece.len() as u32;
        bytes.extend_from_slice(&end.to_ne_bytes());
    }
    pieces().for_each(|piece| bytes.extend_from_slice(piece));
    bytes
}

/// Returns the control tokens of the vocabulary.
pub fn control_tokens(vocabulary: &Vocabulary) -> Vec<TokenId> {
    (0..TokenId::try_from(vocabulary.len()).unwrap_or(TokenId::MAX))
        .filter(|&token| vocabulary.is_control(token))
        .collect()
}

impl HandlerInfo {
    /// Validates a request's configuration against the mod's declaration.
    ///
    /// # Errors
    /// The field that is unknown, missing or of the wrong type, and what is expected.
    pub fn check_config(&self, config: &Value) -> Result<(), String> {
        let fields = match config {
            Value::Null => serde_json::Map::new(),
            Value::Object(fields) => fields.clone(),
            other => return Err(format!("the configuration must be an object, found {other}")),
        };
        let Some(schema) = &self.schema else { return Ok(()) };
        let known = schema["properties"].as_object();
        let is_known = |name: &str| known.is_some_and(|known| known.contains_key(name));
        match (fields.keys().find(|name| !is_known(name)), known) {
            (None, _) => {}
            (Some(name), Some(known)) if !known.is_empty() => {
                let known: Vec<&str> = known.keys().map(String::as_str).collect();
                return Err(format!("unknown field '{name}'; known fields: {}", known.join(", ")));
            }
            (Some(name), _) => return Err(format!("unknown field '{name}'; this mod has no configuration")),
        }
        schema_check::first_error(&Value::Object(fields), schema).map_or(Ok(()), Err)
    }
}
