use super::Action;
use crate::events::{EventType, LogLevel, RunId, TokenId};
use crate::model::Vocabulary;
use crate::model::chat::answer::AnswerFormat;
use crate::model::grammar::GrammarCompiler;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// What stays the same during a run.
#[derive(Debug, Clone)]
pub struct RunView {
    /// The run.
    pub run_id: RunId,
    /// The client's id of it.
    pub request_id: String,
    /// The model's name.
    pub model: String,
    /// Its vocabulary, to encode and decode with.
    pub vocabulary: Arc<Vocabulary>,
    /// The messages, as sent; `None` for a raw completion.
    pub conversation: Option<Value>,
    /// The tools, as sent.
    pub tools: Option<Value>,
    /// How the model writes its answers, and whether this one begins within a thought.
    pub answer_format: Arc<AnswerFormat>,
    /// Sampling parameters and limits, as recorded.
    pub parameters: Value,
    /// Random seed of the run.
    pub seed: u32,
    /// Compiles grammars for the model, for mods that hold an answer to one.
    pub grammars: Arc<GrammarCompiler>,
}

/// One event, as a mod sees it.
#[derive(Debug)]
pub struct Call<'a> {
    /// The run.
    pub run: &'a Arc<RunView>,
    /// The step, 0 for `Prefilled`.
    pub step: u32,
    /// The whole sequence: prompt, then generated tokens. At `Added` the added tokens are its end.
    pub sequence: &'a [TokenId],
    /// How many of them are the prompt.
    pub prompt_len: usize,
    /// Generated tokens that a full context has let go: they stand in the answer, and not in `sequence`.
    pub evicted: usize,
    /// Limit of generated tokens.
    pub max_steps: u32,
    /// What happened.
    pub event: CallEvent<'a>,
}

/// The part of a call that depends on the event.
#[derive(Debug)]
pub enum CallEvent<'a> {
    /// `sequence` is the prompt.
    Prefilled,
    /// Logits of shape `(vocab)`, no temperature or penalty applied, as the mod before left them.
    ForwardPass {
        /// One per token of the vocabulary.
        logits: &'a [f32],
    },
    /// `token` was drawn; it is not in `sequence`.
    Sampled {
        /// The token.
        token: TokenId,
        /// Its text, lossy.
        text: &'a str,
        /// Natural logarithm of its probability in the model's full distribution.
        logprob: f32,
    },
    /// `tokens` were appended.
    Added {
        /// They are the end of `sequence`.
        tokens: &'a [TokenId],
        /// For each the natural logarithm of its probability in the model's full distribution, where it is known.
        logprobs: &'a [Option<f32>],
        /// Whether they were forced.
        forced: bool,
    },
}

impl Call<'_> {
    /// The event's type.
    #[must_use]
    pub const fn event_type(&self) -> EventType {
        match self.event {
            CallEvent::Prefilled => EventType::Prefilled,
            CallEvent::ForwardPass { .. } => EventType::ForwardPass,
            CallEvent::Sampled { .. } => EventType::Sampled,
            CallEvent::Added { .. } => EventType::Added,
        }
    }

    /// The tokens generated so far.
    #[must_use]
    pub fn generated(&self) -> &[TokenId] {
        &self.sequence[self.prompt_len..]
    }

    /// How many tokens the answer has, those included that a full context has let go.
    #[must_use]
    pub fn length(&self) -> usize {
        self.generated().len() + self.evicted
    }
}

/// What came back from a call.
#[derive(Debug, Default)]
pub struct Reply {
    /// The action, or what went wrong; an exception counts as Noop.
    pub action: Option<Action>,
    /// Set when the mod raised, overran its deadline or died.
    pub exception: Option<ModException>,
    /// What it printed and logged, in order.
    pub logs: Vec<ModLogLine>,
    /// How long the mod itself took. The engine measures a reply that leaves this at zero.
    pub elapsed: Duration,
}

impl Reply {
    /// Go on, nothing to say.
    #[must_use]
    pub fn noop() -> Self {
        Self::default()
    }
}

impl From<Action> for Reply {
    fn from(action: Action) -> Self {
        Self { action: Some(action), ..Self::default() }
    }
}

/// A failed call.
#[derive(Debug, Clone)]
pub struct ModException {
    /// One line.
    pub message: String,
    /// Where it was raised.
    pub traceback: Option<String>,
}

/// A line that a mod wrote.
#[derive(Debug, Clone)]
pub struct ModLogLine {
    /// Its level.
    pub level: LogLevel,
    /// The line.
    pub message: String,
}

/// Takes the reply to a call that was answered with `Pending`. Dropped without a reply, it reports an exception,
/// so that a run never waits for a mod that is gone.
pub struct ReplySender {
    deliver: Option<Box<dyn FnOnce(Reply) + Send>>,
    watched: bool,
}

impl ReplySender {
    /// Delivers to `deliver`.
    pub fn new(deliver: impl FnOnce(Reply) + Send + 'static) -> Self {
        Self { deliver: Some(Box::new(deliver)), watched: false }
    }

    /// The same for a caller that [looks](super::ModInstance::poll_reply) for the answer until it [lets go](super::ModInstance::stop_polling).
    #[must_use]
    pub fn polled(mut self) -> Self {
        self.watched = true;
        self
    }

    /// Whether the caller looks for the answer.
    #[must_use]
    pub fn is_polled(&self) -> bool {
        self.watched
    }

    /// Delivers the reply.
    pub fn reply(mut self, reply: Reply) {
        if let Some(deliver) = self.deliver.take() {
            deliver(reply);
        }
    }

    /// The same duty; `look` sees the reply on its way.
    #[must_use]
    pub fn inspected_by(mut self, look: impl FnOnce(&Reply) + Send + 'static) -> Self {
        match self.deliver.take() {
            Some(deliver) => {
                let mut observed = Self::new(move |reply| {
                    look(&reply);
                    deliver(reply);
                });
                observed.watched = self.watched;
                observed
            }
            None => self,
        }
    }

    /// Gives up the duty to answer, because the call was answered at once.
    pub fn disarm(mut self) {
        self.deliver = None;
    }
}

impl Drop for ReplySender {
    fn drop(&mut self) {
        if let Some(deliver) = self.deliver.take() {
            deliver(Reply {
                exception: Some(ModException { message: "the mod ended without an answer".into(), traceback: None }),
                ..Reply::default()
            });
        }
    }
}

/// A set of event types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventSet(u8);

impl EventSet {
    /// No event.
    pub const NONE: Self = Self(0);
    /// All four.
    pub const ALL: Self = Self(0b1111);

    /// The set of these events.
    #[must_use]
    pub fn of(events: &[EventType]) -> Self {
        Self(events.iter().fold(0, |bits, &event| bits | 1 << event as u8))
    }

    /// Whether the event is in it.
    #[must_use]
    pub const fn contains(self, event: EventType) -> bool {
        self.0 & (1 << event as u8) != 0
    }

    /// Both sets together.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
