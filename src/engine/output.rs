//! Outputs of a run to the API that submitted it.

use crate::events::{Alternative, FinishReason, RunEnd, TokenMeasurement};
use crate::model::llama::AttentionRow;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Output of a run, in order. Dropping the receiver cancels the run within a token.
#[derive(Debug, Clone)]
pub enum Output {
    /// Text appended to the answer. Only a `Retract` can remove it.
    Text(TextDelta),
    /// Removes the end of what was sent: a mod backtracked further than the holdback.
    Retract {
        /// Unicode scalar values to remove from the end. Can be more than the characters of the tokens, since text that
        /// could now become a stop string is sent again; 0 for tokens without text.
        chars: usize,
        /// Tokens to remove that the client has received.
        tokens: usize,
    },
    /// Probabilities of the prompt's tokens, if requested; before any text.
    Prompt(Vec<(TokenMeasurement, Vec<Alternative>)>),
    /// Progress of the prompt, if requested.
    Progress(PromptProgress),
    /// End of the run; always the last output.
    Ended(Arc<RunEnd>),
}

/// Text with its tokens.
#[derive(Debug, Clone, Default)]
pub struct TextDelta {
    /// Complete UTF-8; may be empty if a token only began a character.
    pub text: String,
    /// Tokens, each with the model's most probable alternatives; the list is empty for forced tokens.
    pub tokens: Vec<(TokenMeasurement, Vec<Alternative>)>,
    /// Attention row of each of `tokens`, if requested; `None` for a token that a mod forced without a decode of its
    /// own.
    pub rows: Vec<Option<Arc<AttentionRow>>>,
    /// Number of tokens of earlier deltas that a mod removed, from the end, in runs with `per_token`; they are removed
    /// before `tokens` are added.
    pub retracted: usize,
    /// Reason for the end of the run, on the last delta if it is known.
    pub last: Option<FinishReason>,
}

/// Progress of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptProgress {
    /// Tokens of the prompt.
    pub total: u32,
    /// Tokens whose state was cached.
    pub cached: u32,
    /// Tokens evaluated so far, including `cached`.
    pub processed: u32,
    /// Microseconds since the run got its slot.
    pub elapsed_us: u64,
}

/// Metrics of a run that are known before it ends.
#[derive(Debug, Default)]
pub struct RunMetrics {
    /// Slot of the run.
    pub slot: OnceLock<u32>,
    /// Timing of the prompt, once it is decoded.
    pub prompt: OnceLock<PromptTiming>,
}

/// Timing of a prompt.
#[derive(Debug, Clone, Copy)]
pub struct PromptTiming {
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Tokens whose state was cached.
    pub cached: u32,
    /// Microseconds from slot assignment to the first logits.
    pub elapsed_us: u64,
    /// Time of the first logits.
    pub at: Instant,
}

/// Progress of a run after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunProgress {
    /// Tokens in the answer.
    pub generated: u32,
    /// Activity of the run.
    pub activity: RunActivity,
    /// Time for which the run was active, without pauses.
    pub active_time: Duration,
}

/// Activity of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunActivity {
    /// Waits for a slot.
    Queued,
    /// Has a slot and is decoded.
    Running,
    /// Is paused and has a slot.
    Paused,
    /// Has lost its slot, by a pause or to a queued run.
    Preempted,
    /// Has ended.
    Finished,
}

/// Outcome of a request to end the reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReasoning {
    /// The reasoning ends with the next tokens.
    Ended,
    /// The run is not reasoning.
    NotReasoning,
    /// The run was started without a [`crate::engine::ReasoningBudget`].
    NoBudget,
}
