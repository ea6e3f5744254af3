//! A step of a recorded run from which a new run continues.

use crate::events::{RunParent, TokenId, TraceItem};
use crate::model::llama::SamplingParams;
use serde_json::Value;
use std::sync::Arc;

/// The part of a recorded run before one of its steps. A run that starts from it keeps the tokens, the position of the
/// random number generator and the states of its mods.
#[derive(Debug, Clone)]
pub struct ForkPoint {
    /// The recorded items before the step; the events are numbered from 0 without gaps.
    pub items: Arc<[TraceItem]>,
    /// Number of the step.
    pub step: u32,
    /// Sampling parameters of the recorded run, each with the first step that used them; at least one.
    pub sampling: Vec<(u32, SamplingParams)>,
    /// For each mod of the request, the first step from which its recorded actions must repeat; `None` for a mod that the
    /// recorded run did not have.
    pub mods_repeat_from: Vec<Option<u32>>,
    /// Tokens that are appended before the model continues.
    pub tokens: Vec<TokenId>,
    /// Record of the parameters before the step, for forks of the new run.
    pub earlier: Value,
    /// The recorded run, for the list of runs.
    pub parent: RunParent,
}
