//! Speculative decoding: a drafter guesses the next tokens of a run, and one decode gives the logits after all of them.
//!
//! The run processes these logits one after the other, exactly as after decodes of one token each: it samples with its own
//! sampler from the model's logits and offers every event to its mods. The logits after a guess count only if the run
//! continued with that token; the others are dropped. So drafts change how fast an answer is generated, never the answer.
//!
//! Nothing here knows a run, a mod or the model.

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
    /// Minimum number of last tokens that must occur earlier for a draft from there.
    pub min_match: usize,
    /// True if a run drafts only while that is faster than decodes of one token, by the measured times of decodes.
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
    /// Earlier occurrences of the last tokens in the prompt and the answer.
    Ngram,
}

/// Limits of the drafts of one run, which override those of [`SpeculationOptions`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftLimits {
    /// Maximum tokens of a draft; 0 for no drafts.
    pub max: Option<u32>,
    /// Minimum tokens of a draft.
    pub min: Option<u32>,
}
