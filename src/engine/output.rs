//! Outputs of a run to the API that submitted it.

use super::control::RunControl;
use super::status::RunMetrics;
use crate::events::{Alternative, FinishReason, RunEnd, RunId, TokenMeasurement};
use crate::model::llama::AttentionRow;
use std::sync::Arc;
use tokio::sync::mpsc;

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

/// A run that was accepted.
#[derive(Debug)]
pub struct Generation {
    /// Id of the run.
    pub run_id: RunId,
    /// Id chosen by the client, or the run's id as text.
    pub request_id: String,
    /// Metrics that are known before the run ends.
    pub metrics: Arc<RunMetrics>,
    /// Outputs of the run.
    pub output: mpsc::Receiver<Output>,
    /// Handle that controls the run.
    pub control: RunControl,
}
