//! KV state of all slots: the llama context, the tokens of each of its sequences, and the host cache.
//!
//! The token list of a slot always equals the content of its sequence in the context; only this module changes them.
//! Callers pass the tokens of a run and get back the number of tokens whose state is valid. A run counts only these: the
//! slot may have more, such as rejected tokens of a draft, until the next truncation.

mod common_chunks;
mod prefix_match;
mod snapshots;

use super::conversation::SlotHistory;
use super::host_cache::HostCache;
use super::prompt::StateKey;
use super::removal::KvRemoval;
use crate::events::{Scope, Tenant, TokenId};
use crate::model::llama::{AdapterSet, CheckpointPurpose, Context, Decoded, EmbeddingRows, TokenOutputs};
use crate::model::{ModelError, ShiftError};

/// KV state of all slots.
pub struct KvSlots<'model> {
    context: Context<'model>,
    slots: Vec<SlotState>,
    host_cache: HostCache,
    /// Context size of each slot, in tokens.
    ctx_size: usize,
}

/// State of one slot.
#[derive(Default)]
struct SlotState {
    /// Tenant of the newest run that decoded in the slot, or of the state that was restored.
    owner: Option<Tenant>,
    /// Tokens of the sequence in the KV cache.
    tokens: Vec<TokenId>,
    /// Adapters that the state was computed with; `None` before the first decode.
    adapters: Option<AdapterSet>,
    /// History of the conversation in this slot.
    history: SlotHistory,
    /// Prompt tokens that the last run decoded.
    processed: usize,
    /// Arrival number (of runs and slot tasks) at the last use of the slot.
    last_used: u64,
}

impl SlotState {
    /// Returns the key of the state.
    fn key(&self) -> StateKey<'_> {
        StateKey { owner: self.owner.as_ref(), adapters: self.adapters.as_ref() }
    }
}

/// State of a run that releases its slot.
pub struct ReleasedState {
    /// Number of valid tokens in the KV cache, after the removals.
    pub kv_len: usize,
    /// Removals that the KV cache has not applied yet.
    pub removals: Vec<KvRemoval>,
    /// True if the run captured attention, which requires that each token is in the KV cell with the index of its
    /// position.
    pub needs_cells_in_order: bool,
    /// History of the conversation.
    pub history: SlotHistory,
    /// Prompt tokens that the run decoded.
    pub processed: usize,
}

impl<'model> KvSlots<'model> {
    /// Creates `count` empty slots of `ctx_size` tokens.
    pub fn new(context: Context<'model>, count: u32, ctx_size: u32, host_cache: HostCache) -> Self {
        let slots = (0..count).map(|_| SlotState::default()).collect();
        Self { context, slots, host_cache, ctx_size: ctx_size as usize }
    }

    /// Marks a slot as used by a run. `arrival` is the number of the last run or slot task that arrived. The state still
    /// belongs to its previous tenant, because the run may end before [`KvSlots::reuse`] takes it over.
    pub fn mark_used(&mut self, index: usize, arrival: u64) {
        self.slots[index].last_used = arrival;
    }

    /// Returns true if the scope covers the state of a slot.
    pub fn is_visible(&self, index: usize, scope: &Scope) -> bool {
        scope.includes(self.slots[index].owner.as_ref())
    }

    /// Truncates a slot's state to the first `keep` tokens, or to fewer if the model's state cannot be cut there.
    /// Returns the number of tokens left.
    pub fn truncate(&mut self, index: usize, keep: usize) -> usize {
        let tokens = &mut self.slots[index].tokens;
        if tokens.len() <= keep {
            return tokens.len();
        }
        let left = self.context.truncate(index as i32, keep as u32) as usize;
        tokens.truncate(left);
        left
    }

    /// Applies removals of tokens to a slot's state. Returns how many of the `kv_len` valid tokens are left: tokens
    /// that the cache cannot shift must be decoded again.
    pub fn apply_removals(
        &mut self,
        index: usize,
        removals: Vec<KvRemoval>,
        mut kv_len: usize,
        needs_cells_in_order: bool,
    ) -> usize {
        for removal in removals {
            if self.truncate(index, removal.kv_len) < removal.kv_len {
                kv_len = 0;
                continue;
            }
            let ranges: Vec<_> = removal.ranges.iter().map(|range| range.start as u32..range.end as u32).collect();
            match self.context.remove_ranges(index as i32, removal.kv_len as u32, &ranges) {
                Ok(_) => {
                    for range in removal.ranges.iter().rev() {
                        self.slots[index].tokens.drain(range.clone());
                    }
                    // In layers with a sliding window, the shift leaves only the tokens of the window, in cells whose
                    // indexes differ from the positions.
                    if needs_cells_in_order && !self.context.has_cells_in_order(index as i32) {
                        kv_len = 0;
                    }
                }
                Err(ShiftError::NotRemovable(_)) => {
                    let unchanged = removal.ranges.first().map_or(0, |range| range.start);
                    // Positions of later removals refer to the sequence without these tokens, so a failed removal must
                    // be the last.
                    kv_len = kv_len.min(self.truncate(index, unchanged));
                }
                Err(ShiftError::Failed) => {
                    self.slots[index].tokens.clear();
                    kv_len = 0;
                }
            }
        }
        kv_len
    }

    /// Updates the slot with the state of a run that releases it.
    pub fn release(&mut self, index: usize, released: ReleasedState) {
        let ReleasedState { kv_len, removals, needs_cells_in_order, mut history, processed } = released;
        let kv_len = self.apply_removals(index, removals, kv_len, needs_cells_in_order);
        history.truncate(self.truncate(index, kv_len));
        self.slots[index].history = history;
        self.slots[index].processed = processed;
    }

    /// Discards a slot's state after a failed decode.
    pub fn discard(&mut self, index: usize) {
        self.context.clear(index as i32);
        self.slots[index].tokens.clear();
        self.slots[index].history = SlotHistory::default();
    }

    /// Discards a slot's state that contains NaN values, and overwrites its keys and values.
    pub fn wipe(&mut self, index: usize) {
        let tokens = std::mem::take(&mut self.slots[index].tokens);
        self.context.wipe(index as i32, &tokens);
        self.slots[index].history = SlotHistory::default();
    }

    /// Adds a token to the batch. Returns its index in the batch.
    ///
    /// # Errors
    /// The batch is full.
    pub fn add(
        &mut self,
        index: usize,
        token: TokenId,
        position: usize,
        outputs: TokenOutputs,
    ) -> Result<usize, ModelError> {
        self.context.add(token, position as u32, index as i32, outputs)
    }

    /// Sets embeddings of an image that the next decode processes in place of the batch, which must be empty. `outputs`
    /// has one entry per position: true requests its logits.
    ///
    /// # Errors
    /// The embeddings are a part of an image that must be decoded as a whole.
    pub fn set_embeddings(
        &mut self,
        index: usize,
        rows: EmbeddingRows<'_>,
        position: usize,
        outputs: &[bool],
    ) -> Result<(), ModelError> {
        self.context.set_embeddings(rows, position as u32, index as i32, outputs)
    }

    /// Decodes the batch. Returns the requested captures. The caller then adds the decoded tokens with
    /// [`KvSlots::extend`], or discards the slots.
    ///
    /// # Errors
    /// llama.cpp could not decode the batch.
    pub fn decode(&mut self) -> Result<Decoded, ModelError> {
        self.context.decode()
    }

    /// Adds decoded tokens to a slot's state, and keeps a checkpoint after them if one is due.
    pub fn extend(&mut self, index: usize, tokens: &[TokenId], checkpoint: Option<CheckpointPurpose>) {
        let slot_tokens = &mut self.slots[index].tokens;
        slot_tokens.extend_from_slice(tokens);
        if let Some(purpose) = checkpoint {
            self.context.save_checkpoint(index as i32, slot_tokens.len(), purpose);
        }
    }

    /// Returns the logits of the token with this index in the batch.
    pub fn logits(&self, index: usize) -> &[f32] {
        self.context.logits(index)
    }

    /// Puts the threads of the context to sleep.
    pub fn park_threads(&self) {
        self.context.park_threads();
    }

    /// Returns true if layers are computed on a GPU.
    pub fn has_gpu(&self) -> bool {
        self.context.has_gpu()
    }

    /// Returns true if runs make checkpoints, because sequences cannot be truncated.
    pub fn uses_checkpoints(&self) -> bool {
        self.context.uses_checkpoints()
    }

    /// Returns true if every sequence can be truncated to any length.
    pub fn are_all_prefixes_usable(&self) -> bool {
        self.context.are_all_prefixes_usable()
    }

    /// Returns true if LoRA adapters or control vectors are loaded.
    pub fn has_adapters(&self) -> bool {
        !self.context.adapters().is_empty()
    }

    /// Applies a set of adapters to the next decodes.
    ///
    /// # Errors
    /// llama.cpp rejects the adapters.
    pub fn set_adapters(&mut self, set: &AdapterSet) -> Result<(), ModelError> {
        self.context.set_adapters(set)
    }
}
