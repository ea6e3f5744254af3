//! Reasons why the engine rejects a request.

use crate::events::TokenId;
use crate::model::grammar;
use crate::model::llama::{ImageError, UnsupportedAttention, UnsupportedLens};

/// Reason why a request was rejected.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The prompt does not fit.
    #[error(
        "the prompt has {prompt_tokens} tokens, which exceeds the available context size: this model's maximum context length is \
         {context} tokens"
    )]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt_tokens: usize,
        /// Context size of a slot, in tokens.
        context: usize,
    },
    /// The client requested more tokens than the server's maximum.
    #[error("`max_tokens` is {requested}, but the maximum of this server is {limit}; send a lower value or omit it")]
    TooManyTokens {
        /// Requested value.
        requested: u32,
        /// The server's limit.
        limit: u32,
    },
    /// The prompt does not fit, even without all messages that may be dropped.
    #[error(
        "the prompt has {prompt_tokens} tokens and does not fit even without all messages that may be dropped: this model's \
         maximum context length is {context} tokens; system messages, the last user message and the last answer are kept"
    )]
    NothingToDrop {
        /// Tokens in the prompt.
        prompt_tokens: usize,
        /// Context size of a slot, in tokens.
        context: usize,
    },
    /// The slot does not exist.
    #[error("slot {slot} does not exist; slots must be from 0 to {}", slots - 1)]
    NoSuchSlot {
        /// Requested value.
        slot: u32,
        /// Number of slots.
        slots: u32,
    },
    /// The prompt is empty.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt has a token that the model does not have.
    #[error("the prompt contains the token {token}, which is not in the vocabulary; ids must be from 0 to {}", vocabulary - 1)]
    UnknownToken {
        /// The token.
        token: TokenId,
        /// Tokens in the vocabulary.
        vocabulary: usize,
    },
    /// The prompt has a placeholder of an image that the server no longer has.
    #[error(
        "the prompt contains an image that is neither cached nor recorded; send the conversation with the image again, or start the server with --record-images"
    )]
    MissingImage,
    /// An image exceeds the physical batch, and must be decoded as a whole.
    #[error(
        "an image has {tokens} tokens, which this model decodes together, but a physical batch has {max}; start the server with \
         --batch-size {tokens} --ubatch-size {tokens}, or with a lower --image-max-tokens"
    )]
    UndividedImage {
        /// Tokens of the image.
        tokens: usize,
        /// Maximum tokens of a physical batch.
        max: usize,
    },
    /// An image could not be encoded.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Attention is turned off on this server.
    #[error("attention was requested, but the server runs with --attention off; start it with --attention auto or on")]
    AttentionOff,
    /// The model's attention cannot be captured.
    #[error("attention was requested, but the attention of the model '{model}' cannot be captured: {reason}")]
    AttentionUnsupported {
        /// Name of the model.
        model: String,
        /// The reason.
        reason: UnsupportedAttention,
    },
    /// The logit lens is turned off on this server.
    #[error("--attention off excludes the logit lens; start the server with --attention auto or on")]
    LensOff,
    /// The model has no logit lens.
    #[error("the model '{model}' has no logit lens: {reason}")]
    LensUnsupported {
        /// Name of the model.
        model: String,
        /// The reason.
        reason: UnsupportedLens,
    },
    /// The request selects an attention head that the model does not have.
    #[error("layer {layer}, head {head} does not exist; heads are 0 to {last}, and layers with attention are {layers:?}", last = heads.saturating_sub(1))]
    NoSuchHead {
        /// The requested layer.
        layer: u16,
        /// The requested head.
        head: u16,
        /// Layers with attention.
        layers: Vec<u16>,
        /// Heads per layer.
        heads: u16,
    },
    /// The attention rows of the selected heads would be too large.
    #[error(
        "the attention rows of {heads} heads take up to {} MiB for a prompt of {prompt_tokens} and an answer of {max_tokens} \
         tokens; at most {} MiB are stored per run: select fewer heads, or lower `max_tokens`",
        bytes.div_ceil(1 << 20), super::head_rows::MAX_BYTES >> 20
    )]
    HeadRowsTooLarge {
        /// Number of selected heads.
        heads: u64,
        /// Tokens of the prompt.
        prompt_tokens: u64,
        /// Maximum tokens of the answer.
        max_tokens: u64,
        /// Size of all rows.
        bytes: u64,
    },
    /// A mod rejected its configuration.
    #[error("mod '{name}': {message}")]
    ModConfig {
        /// Name of the mod.
        name: String,
        /// Message of the mod.
        message: String,
    },
    /// The constraint is invalid.
    #[error("`{field}`: {error}")]
    Constraint {
        /// Field of the request.
        field: String,
        /// Reason.
        error: grammar::GrammarError,
    },
    /// The model is an encoder.
    #[error("the model '{model}' generates no text: it is an encoder, for embeddings and scores")]
    NoGeneration {
        /// Name of the model.
        model: String,
    },
    /// The queue is full.
    #[error("the queue is full: {waiting} runs are waiting; try again later")]
    Busy {
        /// Runs in the queue.
        waiting: usize,
    },
    /// Another active run has the client's id.
    #[error(
        "`request_id` '{request_id}' is in use by an active run; send another one, or omit it to get the run's own id"
    )]
    RequestIdInUse {
        /// The id.
        request_id: String,
    },
    /// A mod of a forked run did not repeat its recorded actions when the recorded events were replayed.
    #[error(
        "the mod '{name}' does not repeat its recorded actions: at step {step} ({event}) it returned {recorded} in the recorded run \
         and returns {now} now; it may depend on the time, on its own randomness or on more logits than are recorded; fork \
         before that step, or with other `mods`"
    )]
    ModDiffers {
        /// Name of the mod.
        name: String,
        /// Step of the difference.
        step: i32,
        /// Event of the difference.
        event: &'static str,
        /// Recorded action.
        recorded: String,
        /// Action during the replay.
        now: String,
    },
    /// The recorded run cannot be continued.
    #[error("the run cannot be forked at step {step}: {reason}")]
    NotForkable {
        /// Requested step.
        step: u32,
        /// Reason.
        reason: String,
    },
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// The run has ended, or the engine has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the run has ended")]
pub struct RunOver;
