//! Calls of mods, and their replies.

use super::Action;
use crate::events::{EventType, ImageRecord, ImageTile, LogLevel, RunId, Tenant, TokenId};
use crate::model::Vocabulary;
use crate::model::chat::answer::AnswerFormat;
use crate::model::grammar::GrammarCompiler;
use crate::model::llama::{HiddenStates, NoHiddenStates};
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An image of the prompt, for mods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PromptImage {
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// The first placeholder of each tile.
    pub tokens: Vec<TokenId>,
}

impl PromptImage {
    /// Returns the recorded images of a prompt.
    #[must_use]
    pub fn from_records(records: &[ImageRecord], prompt: &[TokenId]) -> Vec<Self> {
        let first = |tile: &ImageTile| prompt.get(tile.start as usize).copied();
        let image = |record: &ImageRecord| Self {
            sha256: record.sha256.clone(),
            width: record.width,
            height: record.height,
            tokens: record.tiles.iter().filter_map(first).collect(),
        };
        records.iter().map(image).collect()
    }
}

/// Properties of a run. While it is active, only the stop tokens can change.
#[derive(Debug, Clone)]
pub struct RunView {
    /// Id of the run.
    pub run_id: RunId,
    /// Owner of the run; mods do not see it.
    pub owner: Option<Tenant>,
    /// Id chosen by the client.
    pub request_id: String,
    /// Name of the model.
    pub model: String,
    /// Vocabulary of the model, for encoding and decoding.
    pub vocabulary: Arc<Vocabulary>,
    /// Messages as sent; `None` for a raw completion.
    pub conversation: Option<Value>,
    /// Tools as sent.
    pub tools: Option<Value>,
    /// Images of the prompt.
    pub images: Vec<PromptImage>,
    /// Format of the model's answers; it also states whether this answer begins within reasoning.
    pub answer_format: Arc<AnswerFormat>,
    /// Sampling parameters and limits, as recorded.
    pub parameters: Value,
    /// Tokens that end the answer, in addition to the end-of-generation tokens of the vocabulary.
    pub stop_tokens: Vec<TokenId>,
    /// Random seed of the run.
    pub seed: u32,
    /// Compiler of grammars for the model, for mods that constrain the answer.
    pub grammars: Arc<GrammarCompiler>,
    /// Number of layers whose hidden states mods can read.
    pub hidden_layers: Result<u16, NoHiddenStates>,
}

impl RunView {
    /// Returns true if the token ends the answer. With `ignore_eos`, end-of-generation tokens are never sampled, but those
    /// that a mod forces still end the answer.
    #[must_use]
    pub fn ends_answer(&self, token: TokenId) -> bool {
        self.vocabulary.ends_answer(token, &self.stop_tokens)
    }
}

/// One event, as passed to a mod.
#[derive(Debug)]
pub struct Call<'a> {
    /// Properties of the run.
    pub run: &'a Arc<RunView>,
    /// Step; 0 for `Prefilled`.
    pub step: u32,
    /// Whole sequence: prompt, then generated tokens. At `Added`, it ends with the added tokens.
    pub sequence: &'a [TokenId],
    /// Length of the prompt in tokens.
    pub prompt_len: usize,
    /// Number of generated tokens evicted by a full context: they are part of the answer but not of `sequence`.
    pub evicted: usize,
    /// Index in `sequence` of the first token that followed all evicted ones; 0 if none were evicted.
    pub evictions_end: usize,
    /// Maximum tokens in the answer. The worker protocol and Quote name it `max_steps`.
    pub max_tokens: u32,
    /// Event with its data.
    pub event: CallEvent<'a>,
}

/// Event-specific part of a call.
#[derive(Debug)]
pub enum CallEvent<'a> {
    /// The prompt is ready; `sequence` is the prompt.
    Prefilled,
    /// Logits before temperature and penalties, after the edits of earlier mods.
    ForwardPass {
        /// One value per token of the vocabulary.
        logits: &'a [f32],
        /// Hidden states of the last token, after the layers that the mods of the run read. `None` if they were not
        /// captured, e.g. because the token belongs to an image.
        hidden_states: Option<&'a HiddenStates>,
    },
    /// `token` was sampled; it is not in `sequence` yet.
    Sampled {
        /// Drawn token.
        token: TokenId,
        /// Text of the token; bytes that are not UTF-8 are replaced.
        text: &'a str,
        /// Natural logarithm of its probability in the model's full distribution.
        logprob: f32,
    },
    /// `tokens` were appended.
    Added {
        /// Appended tokens, the end of `sequence`.
        tokens: &'a [TokenId],
        /// Natural logarithm of the probability of each token in the model's full distribution, if known.
        logprobs: &'a [Option<f32>],
        /// True if the tokens were forced.
        forced: bool,
    },
}

impl Call<'_> {
    /// Returns the type of the event.
    #[must_use]
    pub const fn event_type(&self) -> EventType {
        match self.event {
            CallEvent::Prefilled => EventType::Prefilled,
            CallEvent::ForwardPass { .. } => EventType::ForwardPass,
            CallEvent::Sampled { .. } => EventType::Sampled,
            CallEvent::Added { .. } => EventType::Added,
        }
    }

    /// Returns the generated tokens that are in the context.
    #[must_use]
    pub fn generated_in_context(&self) -> &[TokenId] {
        &self.sequence[self.prompt_len..]
    }

    /// Returns the number of tokens of the answer, including those evicted by a full context.
    #[must_use]
    pub fn answer_len(&self) -> usize {
        self.generated_in_context().len() + self.evicted
    }

    /// Returns true if the last of the added tokens ends the answer.
    #[must_use]
    pub fn ends_answer(&self) -> bool {
        matches!(self.event, CallEvent::Added { tokens: [.., last], .. } if self.run.ends_answer(*last))
    }

    /// Returns true if the run ends after this event, unless a mod changes the answer: its end was added, or it has the
    /// maximum number of tokens. The end of a run with a full context is not known.
    #[must_use]
    pub fn is_last_event(&self) -> bool {
        self.answer_len() >= self.max_tokens as usize || self.ends_answer()
    }
}

/// Reply of a mod to a call.
#[derive(Debug, Default)]
pub struct Reply {
    /// Action of the mod; `None` counts as Noop.
    pub action: Option<Action>,
    /// Set if the call failed, e.g. with an exception or at its deadline; the action is then Noop.
    pub exception: Option<ModException>,
    /// Lines that the mod printed and logged, in order.
    pub logs: Vec<ModLogLine>,
    /// Time that the mod took; zero if the mod did not measure it. See [`Reply::elapsed_since`].
    pub elapsed: Duration,
    /// True after [`Reply::validate_action`].
    pub is_validated: bool,
}

impl Reply {
    /// Returns a reply without action and log lines.
    #[must_use]
    pub fn noop() -> Self {
        Self::default()
    }

    /// Returns the reply of a failed call.
    #[must_use]
    pub fn failed(exception: ModException) -> Self {
        Self { exception: Some(exception), ..Self::default() }
    }

    /// Adds a log line.
    #[must_use]
    pub fn with_log(mut self, level: LogLevel, message: impl Into<String>) -> Self {
        self.logs.push(ModLogLine { level, message: message.into() });
        self
    }

    /// Sets the time of a call that began at `start`, unless the mod measured it.
    #[must_use]
    pub fn measured_since(mut self, start: Instant) -> Self {
        self.elapsed = self.elapsed_since(start);
        self
    }

    /// Returns the time that the mod took for a call that began at `start`.
    #[must_use]
    pub fn elapsed_since(&self, start: Instant) -> Duration {
        if self.elapsed.is_zero() { start.elapsed() } else { self.elapsed }
    }
}

impl From<Action> for Reply {
    fn from(action: Action) -> Self {
        Self { action: Some(action), ..Self::default() }
    }
}

/// Error of a failed call.
#[derive(Debug, Clone)]
pub struct ModException {
    /// Message, one line.
    pub message: String,
    /// Traceback.
    pub traceback: Option<String>,
}

impl ModException {
    /// Creates an exception without a traceback.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), traceback: None }
    }

    /// Creates the exception for an invalid action.
    #[must_use]
    pub fn invalid_action(event: EventType, problem: &str) -> Self {
        Self::new(format!("InvalidActionError at {}: {problem}", event.as_str()))
    }
}

/// A log line of a mod.
#[derive(Debug, Clone)]
pub struct ModLogLine {
    /// Level of the line.
    pub level: LogLevel,
    /// Text of the line.
    pub message: String,
}

impl ModLogLine {
    /// Returns the text for the log of the server, with escaped line breaks, which could forge an entry.
    #[must_use]
    pub fn escaped(&self) -> String {
        format!("{:?}", self.message)
    }
}

/// Sender for a reply that comes after the call has returned. Dropping it without a reply sends an exception, so that a
/// run never waits for a mod that has ended.
pub struct ReplySender {
    deliver: Option<Box<dyn FnOnce(Reply) + Send>>,
    is_polled: bool,
}

impl ReplySender {
    /// Creates a sender that passes the reply to `deliver`.
    pub fn new(deliver: impl FnOnce(Reply) + Send + 'static) -> Self {
        Self { deliver: Some(Box::new(deliver)), is_polled: false }
    }

    /// Marks the sender as polled: the caller [polls](super::ModInstance::poll_reply) for the reply until it calls
    /// [`stop_polling`](super::ModInstance::stop_polling).
    #[must_use]
    pub fn polled(mut self) -> Self {
        self.is_polled = true;
        self
    }

    /// Returns true if the caller polls for the reply.
    #[must_use]
    pub fn is_polled(&self) -> bool {
        self.is_polled
    }

    /// Sends the reply.
    pub fn reply(mut self, reply: Reply) {
        if let Some(deliver) = self.deliver.take() {
            deliver(reply);
        }
    }

    /// Adds a function that inspects the reply before it is delivered.
    #[must_use]
    pub fn inspected_by(mut self, inspect: impl FnOnce(&Reply) + Send + 'static) -> Self {
        match self.deliver.take() {
            Some(deliver) => {
                let mut observed = Self::new(move |reply| {
                    inspect(&reply);
                    deliver(reply);
                });
                observed.is_polled = self.is_polled;
                observed
            }
            None => self,
        }
    }
}

impl Drop for ReplySender {
    fn drop(&mut self) {
        if let Some(deliver) = self.deliver.take() {
            deliver(Reply::failed(ModException::new("the mod ended without a reply")));
        }
    }
}

/// A set of event types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventSet(u8);

impl EventSet {
    /// No event.
    pub const NONE: Self = Self(0);
    /// All four events.
    pub const ALL: Self = Self(0b1111);

    /// Creates the set of these events.
    #[must_use]
    pub fn new(events: &[EventType]) -> Self {
        Self(events.iter().fold(0, |bits, &event| bits | 1 << event as u8))
    }

    /// Returns true if the set contains the event.
    #[must_use]
    pub const fn contains(self, event: EventType) -> bool {
        self.0 & (1 << event as u8) != 0
    }

    /// Returns the union of both sets.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
