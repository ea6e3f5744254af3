//! Outputs of a run to the API that submitted it.

use crate::events::{Alternative, FinishReason, RunEnd, TokenId, TokenMeasurement};
use crate::model::llama::AttentionRow;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Output of a run, in order. Dropping the receiver cancels the run within a token.
#[derive(Debug, Clone)]
pub enum Output {
    /// Text appended to the answer. Only a `Retract` can remove it.
    Text(TextDelta),
    /// Removes the end of the sent text: a mod backtracked further than the holdback.
    Retract {
        /// Unicode scalar values to remove from the end; 0 if the tokens have no text. Can exceed the text of `tokens`:
        /// text that could now become part of a stop string is removed, too, and sent again later.
        chars: usize,
        /// Tokens to remove from the end.
        tokens: usize,
    },
    /// Probabilities of the prompt's tokens, if requested; before any text.
    PromptProbabilities(Vec<MeasuredToken>),
    /// Progress of the prompt, if requested.
    PromptProgress(PromptProgress),
    /// End of the run; always the last output.
    Ended(Arc<RunEnd>),
}

/// Text with its tokens.
#[derive(Debug, Clone, Default)]
pub struct TextDelta {
    /// Complete characters; may be empty if a token has only the first bytes of a character.
    pub text: String,
    /// Tokens of the text.
    pub tokens: Vec<MeasuredToken>,
    /// Attention row of each of `tokens`, if requested; `None` for a token that a mod forced and that needed no decode.
    pub rows: Vec<Option<Arc<AttentionRow>>>,
    /// Reason for the end of the run, if this delta is known to be the last.
    pub last: Option<FinishReason>,
}

/// A token of a prompt or an answer.
#[derive(Debug, Clone)]
pub struct MeasuredToken {
    /// Token, text and probability.
    pub measurement: TokenMeasurement,
    /// Most probable tokens at its position; none for a forced token.
    pub alternatives: Vec<Alternative>,
    /// True if the token adds nothing to the text of the answer, such as a control token. Its own text is then its name.
    pub is_hidden: bool,
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
    /// Number of the run's slot plus 1; 0 before it has a slot.
    slot: AtomicU32,
    /// Timing of the prompt, once it is decoded.
    pub prompt: OnceLock<PromptTiming>,
    /// Generated tokens after the end of the answer's text: those of a stop string. Set before the end, if there are any.
    pub tokens_after_text: OnceLock<Vec<TokenId>>,
    /// Number of tokens in the KV cache at the end of the run. Set before the end.
    pub kv_len: OnceLock<u32>,
}

impl RunMetrics {
    /// Returns the slot of the run, or the last one if it was preempted; `None` before it has a slot. A run that
    /// continues after it was preempted may get another slot.
    #[must_use]
    pub fn slot(&self) -> Option<u32> {
        self.slot.load(Relaxed).checked_sub(1)
    }

    pub(super) fn set_slot(&self, slot: u32) {
        self.slot.store(slot + 1, Relaxed);
    }
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

/// Progress of a run, as reported to its control handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunProgress {
    /// Tokens in the answer.
    pub generated: u32,
    /// Activity of the run.
    pub activity: RunActivity,
    /// True if a client has paused the run, with or without a slot.
    pub is_paused: bool,
    /// Time since the request, without pauses.
    pub active_time: Duration,
}

/// Activity of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunActivity {
    /// Waits for a slot.
    Queued,
    /// Has a slot and is being decoded.
    Running,
    /// Is paused and has a slot.
    Paused,
    /// Has lost its slot, because of a pause or because a queued run needed it.
    Preempted,
    /// Has ended.
    Finished,
}

/// Outcome of a request to end the reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReasoningOutcome {
    /// The end of the reasoning is appended next.
    Ended,
    /// The run is not reasoning.
    NotReasoning,
    /// The run was started without a [`crate::engine::ReasoningBudget`].
    NoBudget,
}
