//! Copies of a slot's state.

use super::conversation::history::SlotHistory;
use crate::events::TokenId;
use crate::model::llama::{AdapterSet, ImageSpans};
use bytes::Bytes;
use std::sync::Arc;

/// Saved state of a slot.
#[derive(Default)]
pub struct Snapshot {
    pub tokens: Vec<TokenId>,
    /// Adapters that it was computed with.
    pub adapters: AdapterSet,
    /// History of the conversation.
    pub history: SlotHistory,
    /// State as llama.cpp saves it; empty if there are no tokens.
    pub state: Vec<u8>,
    /// Images within which the sequence cannot be cut.
    pub images: ImageSpans,
}

/// Tokens whose KV state a slot holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotTokens {
    /// The tokens.
    pub tokens: Vec<TokenId>,
    /// Prompt tokens that the last run decoded, without the cached ones.
    pub processed: usize,
}

/// Saved state of a slot, encoded for clients.
#[derive(Debug, Clone)]
pub struct SlotSnapshot {
    /// Number of tokens.
    pub tokens: usize,
    /// Block in SES1 format.
    pub block: Bytes,
}

/// Identity of a control vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VectorIdentity {
    /// Name of the vector.
    pub name: Arc<str>,
    /// Hash of its directions.
    pub fingerprint: u128,
}

/// Identity of a model; a saved state is valid only for the same identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelIdentity {
    /// Hash of the model and of the settings that affect its computation.
    pub model: u128,
    /// Hashes of the LoRA adapters, by id.
    pub adapters: Vec<u128>,
    /// The control vectors.
    pub vectors: Vec<VectorIdentity>,
}
