//! Operations on the state of a sequence between decodes: truncate, remove tokens, save, restore, and return to
//! checkpoints.

use super::Context;
use crate::events::TokenId;
use crate::model::llama::checkpoints::{CheckpointPurpose, Checkpoints};
use crate::model::llama::ffi::{self, StateExtent};
use crate::model::llama::memory::{OUT_OF_WINDOW, RECURRENT};
use crate::model::{ModelError, ShiftError};
use std::ops::Range;

impl Context<'_> {
    /// Removes the tokens of a sequence from position `from` on. Falls back to the last checkpoint before `from`, or to
    /// an empty sequence, if the cache cannot remove a part or lacks tokens that a token at `from` attends to. Returns
    /// the number of remaining tokens.
    #[must_use]
    pub fn truncate(&mut self, sequence: i32, from: u32) -> u32 {
        if self.can_truncate(sequence, from) && self.llama.kv_cache_seq_rm(sequence, Some(from), None).is_ok() {
            self.checkpoints[sequence as usize].truncate(from);
            return from;
        }
        if let Some((length, state)) = self.checkpoints[sequence as usize].state_within(from)
            && self.restore_checkpoint(sequence, length, &state)
        {
            return length;
        }
        self.clear(sequence);
        0
    }

    /// Returns the number of tokens that [`Context::truncate`] would leave if called with `keep`.
    #[must_use]
    pub fn usable_prefix(&self, sequence: i32, keep: usize) -> usize {
        let within = keep as u32;
        if self.can_truncate(sequence, within) {
            return keep;
        }
        self.checkpoints[sequence as usize].last_within(within) as usize
    }

    /// Returns the number of usable tokens among the first `keep` of a saved state, which has `length` tokens and these
    /// checkpoints.
    #[must_use]
    pub fn usable_prefix_of_saved(&self, length: usize, checkpoints: &Checkpoints, keep: usize) -> usize {
        if self.memory.is_prefix_usable(length as u32, keep as u32) {
            return keep;
        }
        checkpoints.last_within(keep as u32) as usize
    }

    fn can_truncate(&self, sequence: i32, from: u32) -> bool {
        from == 0 || (!self.memory.recurrent && self.first_position(sequence) <= self.memory.first_attended(from))
    }

    /// Restores the state of a checkpoint, and removes later tokens from the model's KV cache if it has one.
    /// Returns false if llama.cpp fails.
    fn restore_checkpoint(&mut self, sequence: i32, length: u32, state: &[u8]) -> bool {
        let restored = ffi::set_sequence_state(&mut self.llama, sequence, state, StateExtent::Partial)
            && self.llama.kv_cache_seq_rm(sequence, Some(length), None).is_ok()
            && i64::from(self.llama.kv_cache_seq_pos_max(sequence)) == i64::from(length) - 1;
        if restored {
            self.checkpoints[sequence as usize].truncate(length);
        } else {
            tracing::error!(sequence, length, "llama.cpp cannot restore a checkpoint");
        }
        restored
    }

    /// Returns true if sequences need checkpoints to be truncated, and memory for checkpoints is configured.
    #[must_use]
    pub fn uses_checkpoints(&self) -> bool {
        // For layers with a window, llama.cpp would restore only the window, and cells would differ from positions.
        self.memory.recurrent && self.memory.window == 0 && self.checkpoint_bytes > 0
    }

    /// Saves the current state of a sequence of `length` tokens as a checkpoint.
    pub fn save_checkpoint(&mut self, sequence: i32, length: usize, purpose: CheckpointPurpose) {
        let index = sequence as usize;
        if !self.uses_checkpoints() || self.checkpoints[index].reaches(length as u32) {
            return;
        }
        let Some(state) = ffi::sequence_state(&self.llama, sequence, StateExtent::Partial) else {
            tracing::warn!(sequence, "llama.cpp cannot save a checkpoint");
            return;
        };
        let room = self.checkpoint_bytes.saturating_sub(state.len());
        while self.checkpoints.iter().map(Checkpoints::bytes).sum::<usize>() > room {
            // Drop from the sequence with the largest checkpoints first.
            let largest = self.checkpoints.iter_mut().max_by_key(|checkpoints| checkpoints.bytes());
            if !largest.is_some_and(Checkpoints::drop_oldest) {
                break;
            }
        }
        if state.len() <= self.checkpoint_bytes {
            self.checkpoints[index].add(length as u32, purpose, state);
        }
    }

    /// Returns the checkpoints of a sequence.
    #[must_use]
    pub fn checkpoints(&self, sequence: i32) -> &Checkpoints {
        &self.checkpoints[sequence as usize]
    }

    /// Sets the checkpoints of a restored sequence.
    pub fn set_checkpoints(&mut self, sequence: i32, checkpoints: Checkpoints) {
        self.checkpoints[sequence as usize] = checkpoints;
    }

    /// Returns true if every prefix of every saved state is usable.
    #[must_use]
    pub fn are_all_prefixes_usable(&self) -> bool {
        self.memory.window == 0 && !self.memory.recurrent
    }

    /// Removes all tokens of a sequence.
    pub fn clear(&mut self, sequence: i32) {
        // Removing a whole sequence cannot fail: some caches only reject partial removal.
        let _ = self.llama.kv_cache_seq_rm(sequence, None, None);
        self.checkpoints[sequence as usize] = Checkpoints::default();
    }

    /// Returns the state of a sequence for [`Context::restore`].
    ///
    /// # Errors
    /// [`ModelError::State`].
    pub fn save(&self, sequence: i32) -> Result<Vec<u8>, ModelError> {
        ffi::sequence_state(&self.llama, sequence, StateExtent::Full).ok_or(ModelError::State { operation: "write" })
    }

    /// Replaces a sequence and its checkpoints with a state of `tokens` tokens, which [`Context::save`] wrote or which
    /// was validated with [`StateLayout::unpack`](crate::model::llama::state::StateLayout::unpack).
    ///
    /// # Errors
    /// [`ModelError::State`]; the sequence is then empty.
    pub fn restore(&mut self, sequence: i32, state: &[u8], tokens: u32) -> Result<(), ModelError> {
        // An empty sequence is filled from the first cell on, in the order of the positions.
        self.clear(sequence);
        let last = i64::from(tokens) - 1;
        if ffi::set_sequence_state(&mut self.llama, sequence, state, StateExtent::Full)
            && i64::from(self.llama.kv_cache_seq_pos_max(sequence)) == last
        {
            return Ok(());
        }
        self.clear(sequence);
        Err(ModelError::State { operation: "read" })
    }

    /// Removes ranges of positions from a sequence of `length` tokens, and shifts the later tokens to close the gaps.
    /// Ranges must be sorted and must neither overlap nor adjoin. Keys and values of the remaining tokens are not
    /// computed again. Returns the new length.
    ///
    /// # Errors
    /// [`ShiftError::NotRemovable`] leaves the sequence unchanged; [`ShiftError::Failed`] leaves it empty.
    pub fn remove_ranges(&mut self, sequence: i32, length: u32, ranges: &[Range<u32>]) -> Result<u32, ShiftError> {
        let left = length - ranges.iter().map(|range| range.end - range.start).sum::<u32>();
        let Some(last) = ranges.last() else { return Ok(length) };
        if ranges.len() == 1 && last.end == length {
            if self.usable_prefix(sequence, last.start as usize) < last.start as usize {
                return Err(ShiftError::NotRemovable(if self.memory.recurrent { RECURRENT } else { OUT_OF_WINDOW }));
            }
            return match self.truncate(sequence, last.start) {
                kept if kept == last.start => Ok(kept),
                _ => Err(ShiftError::Failed),
            };
        }
        if let Some(reason) = self.memory.shift_obstacle {
            return Err(ShiftError::NotRemovable(reason));
        }
        if !self.memory.can_remove(self.first_position(sequence), ranges, left) {
            return Err(ShiftError::NotRemovable(OUT_OF_WINDOW));
        }
        let closed = self.close_gaps(sequence, ranges, left);
        if closed.is_err() {
            self.clear(sequence);
        }
        closed.map(|()| left).map_err(|error| {
            tracing::error!(%error, sequence, "cannot remove tokens from the middle of a sequence");
            ShiftError::Failed
        })
    }

    fn close_gaps(&mut self, sequence: i32, ranges: &[Range<u32>], left: u32) -> Result<(), ModelError> {
        let refused =
            |error: llama_cpp_2::context::kv_cache::KvCacheConversionError| ModelError::Decode(error.to_string());
        for range in ranges.iter().rev() {
            self.llama.kv_cache_seq_rm(sequence, Some(range.start), Some(range.end)).map_err(refused)?;
            let by = (range.end - range.start) as i32;
            self.llama.kv_cache_seq_add(sequence, Some(range.end), None, -by).map_err(refused)?;
        }
        // llama.cpp rotates the keys to their new positions at the next decode of any sequence.
        self.add(0, left, sequence, false, false)?;
        self.decode()?;
        self.llama.kv_cache_seq_rm(sequence, Some(left), None).map_err(refused)?;
        // The positions have moved, but not the cells. Saving a state sorts the cells, and restoring fills an empty
        // stream from the first cell on.
        let state = self.save(sequence)?;
        self.restore(sequence, &state, left)
    }

    /// Removes a sequence of these tokens and overwrites its keys and values. Free cells are masked but still read, so
    /// a NaN in them would make the next sequence invalid.
    pub fn wipe(&mut self, sequence: i32, tokens: &[TokenId]) {
        let state = ffi::sequence_state(&self.llama, sequence, StateExtent::Full);
        let zeroed = state.zip(self.layout.as_ref()).and_then(|(state, layout)| layout.zeroed(state, tokens).ok());
        let overwritten =
            zeroed.is_some_and(|state| ffi::set_sequence_state(&mut self.llama, sequence, &state, StateExtent::Full));
        if !overwritten {
            tracing::error!(sequence, "cannot overwrite damaged keys and values");
        }
        self.clear(sequence);
    }

    /// Returns true if tokens can be removed from the middle of sequences.
    #[must_use]
    pub fn can_shift(&self) -> bool {
        self.memory.shift_obstacle.is_none()
    }

    /// Returns true if every cell of a sequence is at its position, in all layers.
    #[must_use]
    pub fn has_cells_in_order(&self, sequence: i32) -> bool {
        self.memory.window == 0 || self.first_position(sequence) == 0
    }

    /// Returns the position of the oldest token that all layers have; 0 for an empty sequence.
    fn first_position(&self, sequence: i32) -> u32 {
        if self.memory.window == 0 { 0 } else { self.llama.kv_cache_seq_pos_min(sequence).max(0).unsigned_abs() }
    }
}
