//! Settings of the engine and of speculative decoding.

use crate::events::StoredHeads;
use crate::model::Model;
use crate::model::llama::{AttentionCapture, CacheType};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Default of [`EngineOptions::max_unread_time`]: longer than a reader stops at a full page, and as long as a client may
/// take to send one message. Without a limit, clients that never read would keep their slots.
pub const MAX_UNREAD_TIME: Duration = Duration::from_mins(10);

/// Settings of the engine.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Context size of each slot, in tokens.
    pub ctx_size: u32,
    /// Number of slots: runs that decode at the same time.
    pub parallel: u32,
    /// Threads that decode generated tokens.
    pub threads: i32,
    /// Threads that decode prompts.
    pub threads_batch: i32,
    /// Maximum tokens in one decode.
    pub batch_size: u32,
    /// Maximum tokens in one physical batch (ubatch).
    pub ubatch_size: u32,
    /// Capture of attention.
    pub attention: AttentionCapture,
    /// Type of the keys in the KV cache.
    pub cache_type_k: CacheType,
    /// Type of the values in the KV cache; a quantized type needs flash attention.
    pub cache_type_v: CacheType,
    /// Minimum fraction of the prompt that must match the tokens of a slot for the run to prefer that slot; 0 ignores
    /// the tokens of slots.
    pub slot_prompt_similarity: f32,
    /// Maximum bytes of the host cache, which keeps earlier states of slots; 0 keeps none.
    pub cache_ram_bytes: usize,
    /// Speculative decoding.
    pub speculation: SpeculationOptions,
    /// Draft model of speculative decoding, if `speculation` uses one.
    pub draft_model: Option<DraftModel>,
    /// Time after which a run ends if its client does not read; see [`MAX_UNREAD_TIME`].
    pub max_unread_time: Duration,
    /// Folder that caches the hashes of model files.
    pub hash_cache: Option<PathBuf>,
    /// Maximum tokens in the answer of any run; `None` for as many as the context holds.
    pub max_tokens: Option<u32>,
    /// Encodes attention reduced over heads for storage.
    pub encode_attention: AttentionEncodeFn,
    /// Encodes the attention rows of selected heads for storage.
    pub encode_heads: HeadEncodeFn,
    /// Source of the current time.
    pub clock: Clock,
}

/// Function that returns the current time. Tests pass a fixed clock to repeat runs exactly.
pub type Clock = fn() -> DateTime<Utc>;

/// Function that encodes `[layer][head][position]` probabilities as the tiers T0 and T1 of `trace::attention`,
/// from `(probabilities, layers, heads, positions)`. Returns `None` for a row that cannot be encoded.
pub type AttentionEncodeFn = fn(&[f32], usize, usize, usize) -> Option<(Vec<u8>, Vec<u8>)>;

/// Function that encodes the rows of the selected heads, from `(probabilities, layer ids, heads, selection)`.
pub type HeadEncodeFn = fn(&[f32], &[u16], u16, &StoredHeads) -> Vec<u8>;

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
