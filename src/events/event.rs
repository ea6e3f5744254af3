use super::{Measurements, RawJson, TokenId};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// The four events of the decode loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, PartialOrd, Ord)]
pub enum EventType {
    /// The prompt is tokenized and not yet decoded.
    Prefilled,
    /// The model has run, nothing is sampled yet.
    ForwardPass,
    /// A token was drawn and is not yet appended.
    Sampled,
    /// Tokens were appended to the sequence.
    Added,
}

impl EventType {
    /// All four, in the order in which they occur within a step.
    pub const ALL: [Self; 4] = [Self::Prefilled, Self::ForwardPass, Self::Sampled, Self::Added];

    /// The name as it stands on the wire and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prefilled => "Prefilled",
            Self::ForwardPass => "ForwardPass",
            Self::Sampled => "Sampled",
            Self::Added => "Added",
        }
    }

    /// The event of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}

/// One event, in the shape of the `/ingest` document; fields that do not concern its type are usually absent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    /// Which of the four.
    pub event_type: EventType,
    /// 0 for `Prefilled`, then 1, 2, 3 …; never decreases.
    pub step: i32,
    /// 0, 1, 2 … over all events of the run.
    pub sequence_order: i32,
    /// When it happened; `None` where a foreign payload does not say.
    pub created_at: Option<DateTime<Utc>>,
    /// The full event object as somebody else's engine gave it. Our engine leaves it empty and fills `measured`.
    pub details: Option<RawJson>,
    /// Tokens in the prompt (`Prefilled`).
    pub prompt_length: Option<i32>,
    /// Generated tokens so far (`Prefilled`).
    pub tokens_so_far_len: Option<i32>,
    /// Most tokens that may be generated (`Prefilled`).
    pub max_steps: Option<i32>,
    /// The last 70 characters of the sequence (`ForwardPass`).
    pub input_text: Option<String>,
    /// Most probable next tokens as a foreign payload gave them (`ForwardPass`). Ours are in `measured.model`.
    pub top_tokens: Option<RawJson>,
    /// The token drawn (`Sampled`).
    pub sampled_token: Option<TokenId>,
    /// Its text (`Sampled`).
    pub token_text: Option<String>,
    /// The tokens appended (`Added`).
    pub added_tokens: Option<Vec<TokenId>>,
    /// How many were appended (`Added`).
    pub added_token_count: Option<i32>,
    /// Whether a mod forced them (`Added`).
    pub forced: Option<bool>,
    /// What our engine measured. For a stored or foreign event it is read back from `details`.
    pub measured: Option<Box<Measurements>>,
}

impl Event {
    /// An event with nothing but its place in the run.
    #[must_use]
    pub fn new(event_type: EventType, step: i32, sequence_order: i32, created_at: Option<DateTime<Utc>>) -> Self {
        Self {
            event_type,
            step,
            sequence_order,
            created_at,
            details: None,
            prompt_length: None,
            tokens_so_far_len: None,
            max_steps: None,
            input_text: None,
            top_tokens: None,
            sampled_token: None,
            token_text: None,
            added_tokens: None,
            added_token_count: None,
            forced: None,
            measured: None,
        }
    }
}
