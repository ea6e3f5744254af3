//! A step of a recorded run from which a new run continues.

use crate::events::{RunParent, TokenId, TraceItem};
use crate::model::llama::SamplingParams;
use serde_json::Value;
use std::sync::Arc;

/// The part of a recorded run before one of its steps. A run that starts from it continues with the same tokens, the
/// same state of the random number generator and the same mod states.
#[derive(Debug, Clone)]
pub struct ForkPoint {
    /// Recorded items before the step; the events are numbered from 0 without gaps.
    pub items: Arc<[TraceItem]>,
    /// Number of the step.
    pub step: u32,
    /// Sampling parameters of the recorded run, each with the first step that used them. Never empty.
    pub sampling: Vec<(u32, SamplingParams)>,
    /// For each mod of the request, the step from which on it must repeat its recorded actions; `None` for a mod that
    /// the recorded run did not have.
    pub mods_repeat_from: Vec<Option<u32>>,
    /// Tokens that are appended before the model continues.
    pub tokens: Vec<TokenId>,
    /// Parameters of the steps before this one. The new run records them, so that it can be forked at those steps, too.
    pub earlier_parameters: Value,
    /// The recorded run, shown as the parent in the list of runs.
    pub parent: RunParent,
}
