//! Speculative decoding: a drafter predicts the next tokens of a run, and one decode gives the logits after all of
//! them.
//!
//! The run processes these logits in order, exactly as after decodes of single tokens: it samples with its own sampler
//! and dispatches every event to its mods. A drafted token is accepted if the run samples it; otherwise the logits
//! after it are dropped. So drafts change the speed of an answer, but never the answer.

pub mod account;
pub mod lookahead;
pub mod ngram;

use serde::{Deserialize, Serialize};

/// Settings of speculative decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpeculationOptions {
    /// Source of drafts.
    pub drafter: DrafterKind,
    /// Maximum tokens of a draft.
    pub max_draft: usize,
    /// Minimum tokens of a draft; a shorter one is not used.
    pub min_draft: usize,
    /// Minimum length of a match: number of last tokens that must have an earlier occurrence.
    pub min_match: usize,
    /// True if a run drafts only while measured times show that this is faster than decodes without drafts.
    pub adaptive: bool,
}

impl SpeculationOptions {
    /// Maximum tokens of a draft.
    pub const MAX_DRAFT: usize = 64;

    /// Returns true if runs draft tokens.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.drafter != DrafterKind::None && self.max_draft > 0
    }
}

impl Default for SpeculationOptions {
    fn default() -> Self {
        Self { drafter: DrafterKind::default(), max_draft: 16, min_draft: 0, min_match: 3, adaptive: true }
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
}

/// Limits of the drafts of one run; `None` for those of [`SpeculationOptions`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftLimits {
    /// Maximum tokens of a draft; 0 for no drafts.
    pub max: Option<u32>,
    /// Minimum tokens of a draft.
    pub min: Option<u32>,
}
