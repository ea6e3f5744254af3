//! What a surface gets of its run.

use super::control::RunControl;
use super::status::RunMetrics;
use crate::events::{Alternative, FinishReason, RunEnd, RunId, TokenMeasurement};
use crate::model::llama::AttentionRow;
use std::sync::Arc;
use tokio::sync::mpsc;

/// What a surface receives of its run, in order. Dropping the receiver cancels the run within a token.
#[derive(Debug, Clone)]
pub enum Output {
    /// Text was appended to the answer, and will not be taken back unless a `Retract` says so.
    Text(TextDelta),
    /// A mod took back more than the stream had held back: the last characters of the answer are gone, and the last tokens.
    Retract {
        /// Unicode scalar values to remove from the end. There may be more of them than of the tokens, since what could now become
        /// a stop string is sent again; and none, where the tokens had none.
        chars: usize,
        /// Tokens that the client was told of.
        tokens: usize,
    },
    /// How probable the tokens of the prompt were, where it was asked for; before any text.
    Prompt(Vec<(TokenMeasurement, Vec<Alternative>)>),
    /// How far the prompt is, where it was asked for.
    Progress(PromptProgress),
    /// The run is over; always the last output.
    Ended(Arc<RunEnd>),
}

/// Text, with the tokens it came from.
#[derive(Debug, Clone, Default)]
pub struct TextDelta {
    /// Complete UTF-8; may be empty when a token only began a character.
    pub text: String,
    /// The tokens, with the most probable alternatives of the model for each; the list is empty for forced tokens.
    pub tokens: Vec<(TokenMeasurement, Vec<Alternative>)>,
    /// The attention that each of `tokens` was drawn with, where it was asked for; `None` for a token that a mod put there
    /// without a decode of its own.
    pub rows: Vec<Option<Arc<AttentionRow>>>,
    /// Tokens of earlier deltas that a mod took back, the newest first, where each token was asked for; they went before
    /// `tokens` came.
    pub retracted: usize,
    /// Why the run ends with this, where that is known already.
    pub last: Option<FinishReason>,
}

/// How far a prompt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptProgress {
    /// Tokens of the prompt.
    pub total: u32,
    /// Tokens whose state was there already.
    pub cached: u32,
    /// Tokens that are there now, `cached` among them.
    pub processed: u32,
    /// Microseconds since the run got its slot.
    pub elapsed_us: u64,
}

/// A run that was accepted.
#[derive(Debug)]
pub struct Generation {
    /// Its id, known before the first token.
    pub run_id: RunId,
    /// The client's id, or ours as text.
    pub request_id: String,
    /// What becomes known of it before it ends.
    pub metrics: Arc<RunMetrics>,
    /// What happens to it.
    pub output: mpsc::Receiver<Output>,
    /// The way to it.
    pub control: RunControl,
}
