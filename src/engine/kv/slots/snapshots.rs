//! Client operations on a slot's state: read, erase, save, restore, shift.

use super::KvSlots;
use crate::engine::kv::conversation::SlotHistory;
use crate::engine::kv::error::SlotError;
use crate::engine::kv::snapshot::{SlotTokens, Snapshot};
use crate::events::{Tenant, TokenId};
use crate::model::ShiftError;
use crate::model::llama::{AdapterSet, ImageSpans, SequenceMetadata};

impl KvSlots<'_> {
    /// Returns the tokens of a slot.
    pub fn tokens(&self, index: usize) -> SlotTokens {
        let slot = &self.slots[index];
        SlotTokens { tokens: slot.tokens.clone(), processed: slot.processed }
    }

    /// Erases a slot's state. Returns the number of erased tokens.
    pub fn erase(&mut self, index: usize) -> usize {
        let erased = self.slots[index].tokens.len();
        self.context.clear(index as i32);
        self.replace(index, Vec::new(), AdapterSet::default());
        erased
    }

    /// Returns a copy of a slot's state.
    ///
    /// # Errors
    /// [`SlotError::NotSaved`].
    pub fn save(&self, index: usize) -> Result<Snapshot, SlotError> {
        let slot = &self.slots[index];
        let state = if slot.tokens.is_empty() { Ok(Vec::new()) } else { self.context.save(index as i32) };
        let state = state.map_err(|error| {
            tracing::error!(%error, slot = index, "slot state not saved");
            SlotError::NotSaved
        })?;
        Ok(Snapshot {
            tokens: slot.tokens.clone(),
            adapters: slot.adapters.clone().unwrap_or_default(),
            history: slot.history.clone(),
            state,
            images: self.context.metadata(index as i32).images.clone(),
        })
    }

    /// Replaces a slot's state with a validated one, which then belongs to `owner`. `arrival` is the number of the last
    /// run or slot task that arrived.
    ///
    /// # Errors
    /// [`SlotError::Rejected`] leaves the slot unchanged, [`SlotError::Failed`] leaves it empty.
    pub fn restore(
        &mut self,
        index: usize,
        saved: Snapshot,
        owner: Option<Tenant>,
        arrival: u64,
    ) -> Result<(), SlotError> {
        let Snapshot { tokens, adapters, history, state, images } = saved;
        if tokens.is_empty() {
            self.erase(index);
        } else {
            self.load(index, &state, tokens.len(), images)?;
            self.replace(index, tokens, adapters);
            self.slots[index].history = history;
            self.slots[index].last_used = arrival;
        }
        self.slots[index].owner = owner;
        Ok(())
    }

    /// Removes `discard` tokens after the first `keep` and shifts the rest. Returns the number of tokens left.
    ///
    /// # Errors
    /// [`SlotError`]; only [`SlotError::Failed`] changes the slot.
    pub fn shift(&mut self, index: usize, keep: usize, discard: usize) -> Result<usize, SlotError> {
        let tokens = self.slots[index].tokens.len();
        let end = keep.checked_add(discard).filter(|&end| end <= tokens);
        let end = end.ok_or(SlotError::Range { keep, discard, tokens })?;
        if discard == 0 {
            return Ok(tokens);
        }
        match self.context.remove_ranges(index as i32, tokens as u32, &[keep as u32..end as u32]) {
            Ok(left) => {
                let slot = &mut self.slots[index];
                slot.tokens.drain(keep..end);
                slot.history.remove_ranges(&[keep..end]);
                slot.processed = slot.processed.min(slot.tokens.len());
                Ok(left as usize)
            }
            Err(ShiftError::NotRemovable(reason)) => Err(SlotError::NotRemovable(reason)),
            Err(ShiftError::Failed) => {
                self.erase(index);
                Err(SlotError::Failed(ShiftError::Failed.to_string()))
            }
        }
    }

    /// Loads a state of `tokens` tokens into the context. If that fails, restores the previous state.
    fn load(&mut self, index: usize, state: &[u8], tokens: usize, images: ImageSpans) -> Result<(), SlotError> {
        let sequence = index as i32;
        let old_len = self.slots[index].tokens.len();
        let old_metadata = self.context.metadata(sequence).clone();
        let old = match old_len {
            0 => None,
            _ => Some(self.context.save(sequence).map_err(|_| SlotError::Rejected)?),
        };
        let metadata = SequenceMetadata { images, ..SequenceMetadata::default() };
        let Err(error) = self.context.restore(sequence, state, tokens as u32, metadata) else { return Ok(()) };
        tracing::error!(%error, slot = index, "validated slot state rejected by llama.cpp");
        if let Some(old) = old
            && self.context.restore(sequence, &old, old_len as u32, old_metadata).is_err()
        {
            self.erase(index);
            return Err(SlotError::Failed("llama.cpp accepted neither the new state nor the old one".into()));
        }
        Err(SlotError::Rejected)
    }

    /// Replaces the tokens of a slot with the tokens of a state that did not come from a run.
    fn replace(&mut self, index: usize, tokens: Vec<TokenId>, adapters: AdapterSet) {
        let slot = &mut self.slots[index];
        slot.tokens = tokens;
        slot.adapters = Some(adapters);
        slot.history = SlotHistory::default();
        slot.processed = 0;
    }
}
