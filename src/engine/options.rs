//! Settings of the engine.

use crate::engine::speculation::{DraftModel, SpeculationOptions};
use crate::events::StoredHeads;
use crate::model::llama::{AttentionCapture, CacheType};
use chrono::{DateTime, Utc};
use std::path::PathBuf;
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
