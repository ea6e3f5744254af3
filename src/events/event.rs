use super::{Measurements, RawJson, TokenId};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The four event types of the decode loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, PartialOrd, Ord, ToSchema)]
pub enum EventType {
    /// The prompt is tokenized but not decoded yet.
    Prefilled,
    /// The model has computed logits; no token is sampled yet.
    ForwardPass,
    /// A token is sampled but not appended yet.
    Sampled,
    /// Tokens are appended to the sequence.
    Added,
}

impl EventType {
    /// All four types. A run begins with `Prefilled`; the other types follow in this order in each step.
    pub const ALL: [Self; 4] = [Self::Prefilled, Self::ForwardPass, Self::Sampled, Self::Added];

    /// Returns the name used in JSON and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prefilled => "Prefilled",
            Self::ForwardPass => "ForwardPass",
            Self::Sampled => "Sampled",
            Self::Added => "Added",
        }
    }

    /// Returns the event type with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}

/// One event, in the format of the `/ingest` document. Fields that do not apply to its type are usually absent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    /// The type of the event.
    pub event_type: EventType,
    /// 0 for `Prefilled`, then 1, 2, 3 …; it never decreases.
    pub step: i32,
    /// Position among all events of the run: 0, 1, 2 …
    pub sequence_order: i32,
    /// Time of the event; `None` if the payload of another engine has no time.
    pub created_at: Option<DateTime<Utc>>,
    /// The full event object of another engine. Thunder leaves it empty and fills `measured`.
    pub details: Option<RawJson>,
    /// Tokens in the prompt (`Prefilled`).
    pub prompt_length: Option<i32>,
    /// Number of tokens generated so far (`Prefilled`).
    pub tokens_so_far_len: Option<i32>,
    /// Maximum number of generated tokens (`Prefilled`).
    pub max_steps: Option<i32>,
    /// The last 70 characters of the sequence (`ForwardPass`).
    pub input_text: Option<String>,
    /// Most probable next tokens in the payload of another engine (`ForwardPass`). Thunder uses `measured.model`.
    pub top_tokens: Option<RawJson>,
    /// The sampled token (`Sampled`).
    pub sampled_token: Option<TokenId>,
    /// Text of the sampled token (`Sampled`).
    pub token_text: Option<String>,
    /// The appended tokens (`Added`).
    pub added_tokens: Option<Vec<TokenId>>,
    /// Number of appended tokens (`Added`).
    pub added_token_count: Option<i32>,
    /// True if a mod forced the tokens (`Added`).
    pub forced: Option<bool>,
    /// Thunder's measurements. For ingested events they are parsed from `details`.
    pub measured: Option<Box<Measurements>>,
}

impl Event {
    /// Creates an event; the fields without a parameter are empty.
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
