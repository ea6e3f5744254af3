//! Speculative decoding: a drafter predicts the next tokens of a run, from its earlier tokens or with a draft model,
//! and one decode gives the logits after all of them.
//!
//! The run processes these logits in order, exactly as after decodes of single tokens: it samples with its own sampler
//! and dispatches every event to its mods. A drafted token is accepted if the run samples it; otherwise the logits
//! after it are dropped. Drafts therefore change the speed of an answer, but not how its tokens are sampled.

pub mod account;
pub mod draft_context;
pub mod ngram;
pub mod run_speculation;

use crate::model::Model;
use crate::model::llama::CacheType;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Settings of speculative decoding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpeculationOptions {
    /// Source of drafts.
    pub drafter: DrafterKind,
    /// Maximum tokens of a draft.
    pub max_draft: usize,
    /// Minimum tokens of a draft; a shorter one is not used.
    pub min_draft: usize,
    /// Minimum length of a match: number of last tokens that must have an earlier occurrence.
    pub min_match: usize,
    /// Minimum probability of a draft model's token, 0 to 1; the draft ends before a less probable token.
    pub min_probability: f32,
    /// True if a run drafts only while measured times show that this is faster than decodes without drafts.
    pub adaptive: bool,
}

impl SpeculationOptions {
    /// Maximum of [`SpeculationOptions::max_draft`].
    pub const MAX_DRAFT: usize = 64;

    /// Returns true if runs draft tokens.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.drafter != DrafterKind::None && self.max_draft > 0
    }
}

impl Default for SpeculationOptions {
    fn default() -> Self {
        Self {
            drafter: DrafterKind::default(),
            max_draft: 16,
            min_draft: 0,
            min_match: 3,
            min_probability: 0.0,
            adaptive: true,
        }
    }
}

/// Source of drafts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DrafterKind {
    /// No drafts: every decode generates one token of each run.
    #[default]
    None,
    /// Prompt lookup: the tokens that follow an earlier occurrence of the last tokens in prompt and answer.
    Ngram,
    /// A draft model, see [`DraftModel`].
    Model,
    /// Prompt lookup; the draft model if that finds nothing.
    NgramThenModel,
}

impl DrafterKind {
    /// Returns true if drafts come from earlier tokens.
    #[must_use]
    pub fn uses_ngrams(self) -> bool {
        matches!(self, Self::Ngram | Self::NgramThenModel)
    }

    /// Returns true if drafts come from a draft model.
    #[must_use]
    pub fn uses_model(self) -> bool {
        matches!(self, Self::Model | Self::NgramThenModel)
    }
}

/// A draft model, which is smaller than the main model and has a compatible vocabulary, see [`Model::check_draft`].
#[derive(Clone)]
pub struct DraftModel {
    /// The model.
    pub model: Arc<Model>,
    /// Threads that draft tokens; `None` for those of the main model.
    pub threads: Option<i32>,
    /// Threads that decode prompts; `None` for those of the main model.
    pub threads_batch: Option<i32>,
    /// Type of the keys in its KV cache.
    pub cache_type_k: CacheType,
    /// Type of the values in its KV cache.
    pub cache_type_v: CacheType,
}

impl DraftModel {
    /// Returns the draft model with the threads of the main model and a KV cache of 16 bits.
    #[must_use]
    pub fn new(model: Arc<Model>) -> Self {
        let (cache_type_k, cache_type_v) = (CacheType::F16, CacheType::F16);
        Self { model, threads: None, threads_batch: None, cache_type_k, cache_type_v }
    }
}

impl std::fmt::Debug for DraftModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DraftModel").field("model", &self.model.name()).finish_non_exhaustive()
    }
}

/// Limits of the drafts of one run; `None` for the value in [`SpeculationOptions`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct DraftLimits {
    /// Maximum tokens of a draft; 0 for no drafts.
    pub max: Option<u32>,
    /// Minimum tokens of a draft.
    pub min: Option<u32>,
    /// Minimum probability of a draft model's token.
    #[serde(default)]
    pub min_probability: Option<f32>,
}
