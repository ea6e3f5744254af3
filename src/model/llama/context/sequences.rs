//! Operations on the state of a sequence between decodes: truncate, remove tokens, save, restore, and return to
//! checkpoints.

use super::Context;
use crate::events::TokenId;
use crate::model::llama::captures::TokenOutputs;
use crate::model::llama::checkpoints::{CheckpointPurpose, Checkpoints};
use crate::model::llama::ffi::sequence_state::{StateExtent, sequence_state, set_sequence_state};
use crate::model::llama::image_spans::ImageSpans;
use crate::model::llama::memory::{OUT_OF_WINDOW, RECURRENT, WITHIN_IMAGE};
use crate::model::{ModelError, ShiftError};
use std::ops::Range;

/// Data about a sequence besides llama.cpp's state.
#[derive(Debug, Clone, Default)]
pub struct SequenceMetadata {
    /// Checkpoints of the sequence.
    pub checkpoints: Checkpoints,
    /// Images within which the sequence cannot be cut.
    pub images: ImageSpans,
}

impl SequenceMetadata {
    fn truncate(&mut self, length: u32) {
        self.checkpoints.truncate(length);
        self.images.truncate(length);
    }
}

impl Context<'_> {
    /// Removes the tokens of a sequence from index `from` on. Removes a whole image if `from` is within one whose
    /// tokens cannot be separated. Falls back to the last checkpoint before `from`, or to an empty sequence, if the
    /// cache cannot remove a part or lacks tokens that a token at `from` attends to. Returns the number of remaining
    /// tokens.
    #[must_use]
    pub fn truncate(&mut self, sequence: i32, from: u32) -> u32 {
        let from = self.metadata(sequence).images.undivided_prefix(from);
        let position = self.position(sequence, from);
        if self.can_truncate(sequence, from) && self.llama.kv_cache_seq_rm(sequence, Some(position), None).is_ok() {
            self.metadata[sequence as usize].truncate(from);
            return from;
        }
        if let Some((length, state)) = self.metadata(sequence).checkpoints.state_within(from)
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
        let SequenceMetadata { checkpoints, images } = self.metadata(sequence);
        let within = images.undivided_prefix(keep as u32);
        let usable = if self.can_truncate(sequence, within) { within } else { checkpoints.last_within(within) };
        usable as usize
    }

    /// Returns the number of usable tokens among the first `keep` of a saved state of `length` tokens.
    #[must_use]
    pub fn usable_prefix_of_saved(&self, length: usize, metadata: &SequenceMetadata, keep: usize) -> usize {
        let SequenceMetadata { checkpoints, images } = metadata;
        if keep == length {
            return keep;
        }
        let within = images.undivided_prefix(keep as u32);
        let end = images.last_position(length as u32).map_or(0, |last| last + 1);
        let is_usable = self.memory.is_prefix_usable(end, images.position(within));
        let usable = if is_usable { within } else { checkpoints.last_within(within) };
        usable as usize
    }

    fn can_truncate(&self, sequence: i32, from: u32) -> bool {
        let first_attended = self.memory.first_attended(self.position(sequence, from));
        from == 0 || (!self.memory.recurrent && self.first_position(sequence) <= first_attended)
    }

    /// Returns the position of the token at `index` of a sequence.
    pub(super) fn position(&self, sequence: i32, index: u32) -> u32 {
        self.metadata(sequence).images.position(index)
    }

    /// Restores the state of a checkpoint, and removes later tokens from the model's KV cache if it has one.
    /// Returns false if llama.cpp fails.
    fn restore_checkpoint(&mut self, sequence: i32, length: u32, state: &[u8]) -> bool {
        let position = self.position(sequence, length);
        let restored = set_sequence_state(&mut self.llama, sequence, state, StateExtent::Partial)
            && self.llama.kv_cache_seq_rm(sequence, Some(position), None).is_ok()
            && self.ends_after(sequence, length, &self.metadata(sequence).images);
        if restored {
            self.metadata[sequence as usize].truncate(length);
        } else {
            tracing::error!(sequence, length, "llama.cpp cannot restore a checkpoint");
        }
        restored
    }

    /// Returns true if the last token of a sequence is that of `length` tokens with these images.
    fn ends_after(&self, sequence: i32, length: u32, images: &ImageSpans) -> bool {
        let last = images.last_position(length).map_or(-1, i64::from);
        i64::from(self.llama.kv_cache_seq_pos_max(sequence)) == last
    }

    /// Returns true if sequences need checkpoints to be truncated, and memory for checkpoints is configured.
    #[must_use]
    pub fn uses_checkpoints(&self) -> bool {
        // For layers with a window, llama.cpp would restore only the window, and cells would differ from positions.
        self.memory.recurrent && self.memory.window.is_none() && self.checkpoint_bytes > 0
    }

    /// Saves the current state of a sequence of `length` tokens as a checkpoint.
    pub fn save_checkpoint(&mut self, sequence: i32, length: usize, purpose: CheckpointPurpose) {
        let SequenceMetadata { checkpoints, images } = self.metadata(sequence);
        let length = length as u32;
        let is_divided = images.undivided_prefix(length) != length;
        if !self.uses_checkpoints() || checkpoints.reaches(length) || is_divided {
            return;
        }
        let Some(state) = sequence_state(&self.llama, sequence, StateExtent::Partial) else {
            tracing::warn!(sequence, "llama.cpp cannot save a checkpoint");
            return;
        };
        let room = self.checkpoint_bytes.saturating_sub(state.len());
        while self.metadata.iter().map(|metadata| metadata.checkpoints.bytes()).sum::<usize>() > room {
            // Drop from the sequence with the largest checkpoints first.
            let all = self.metadata.iter_mut().map(|metadata| &mut metadata.checkpoints);
            let largest = all.max_by_key(|checkpoints| checkpoints.bytes());
            if !largest.is_some_and(Checkpoints::drop_oldest) {
                break;
            }
        }
        if state.len() <= self.checkpoint_bytes {
            self.metadata[sequence as usize].checkpoints.add(length, purpose, state);
        }
    }

    /// Returns the data about a sequence besides its state.
    #[must_use]
    pub fn metadata(&self, sequence: i32) -> &SequenceMetadata {
        &self.metadata[sequence as usize]
    }

    /// Returns true if every prefix of every saved state is usable.
    #[must_use]
    pub fn are_all_prefixes_usable(&self) -> bool {
        self.memory.window.is_none() && !self.memory.recurrent
    }

    /// Removes all tokens of a sequence.
    pub fn clear(&mut self, sequence: i32) {
        // Removing a whole sequence cannot fail: some caches only reject partial removal.
        let _ = self.llama.kv_cache_seq_rm(sequence, None, None);
        self.metadata[sequence as usize] = SequenceMetadata::default();
    }

    /// Returns the state of a sequence for [`Context::restore`].
    ///
    /// # Errors
    /// [`ModelError::State`].
    pub fn save(&self, sequence: i32) -> Result<Vec<u8>, ModelError> {
        sequence_state(&self.llama, sequence, StateExtent::Full).ok_or(ModelError::State { operation: "write" })
    }

    /// Replaces a sequence with a state of `tokens` tokens, which [`Context::save`] wrote or which was validated with
    /// [`StateLayout::unpack`](crate::model::llama::state::StateLayout::unpack), and its metadata.
    ///
    /// # Errors
    /// [`ModelError::State`]; the sequence is then empty.
    pub fn restore(
        &mut self,
        sequence: i32,
        state: &[u8],
        tokens: u32,
        metadata: SequenceMetadata,
    ) -> Result<(), ModelError> {
        // An empty sequence is filled from the first cell on, in the order of the tokens.
        self.clear(sequence);
        if set_sequence_state(&mut self.llama, sequence, state, StateExtent::Full)
            && self.ends_after(sequence, tokens, &metadata.images)
        {
            self.metadata[sequence as usize] = metadata;
            return Ok(());
        }
        self.clear(sequence);
        Err(ModelError::State { operation: "read" })
    }

    /// Removes ranges of tokens from a sequence of `length` tokens, and shifts the later tokens to close the gaps.
    /// Ranges must be sorted and must neither overlap nor adjoin. Keys and values of the remaining tokens are not
    /// computed again. Returns the new length.
    ///
    /// # Errors
    /// [`ShiftError::NotRemovable`] leaves the sequence unchanged; [`ShiftError::Failed`] leaves it empty.
    pub fn remove_ranges(&mut self, sequence: i32, length: u32, ranges: &[Range<u32>]) -> Result<u32, ShiftError> {
        let left = length - ranges.iter().map(|range| range.end - range.start).sum::<u32>();
        let Some(last) = ranges.last() else { return Ok(length) };
        let images = &self.metadata(sequence).images;
        let divides = |index: u32| index < length && images.undivided_prefix(index) < index;
        if ranges.iter().any(|range| divides(range.start) || divides(range.end)) {
            return Err(ShiftError::NotRemovable(WITHIN_IMAGE));
        }
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
        self.metadata[sequence as usize].images.remove_ranges(ranges);
        // llama.cpp rotates the keys to their new positions at the next decode of any sequence.
        self.add(0, left, sequence, TokenOutputs::default())?;
        self.decode()?;
        self.llama.kv_cache_seq_rm(sequence, Some(left), None).map_err(refused)?;
        // The positions have moved, but not the cells. Saving a state sorts the cells, and restoring fills an empty
        // stream from the first cell on.
        let state = self.save(sequence)?;
        let images = self.metadata(sequence).images.clone();
        self.restore(sequence, &state, left, SequenceMetadata { images, ..SequenceMetadata::default() })
    }

    /// Removes a sequence of these tokens and overwrites its keys and values. Free cells are masked but still read, so
    /// a NaN in them would make the next sequence invalid.
    pub fn wipe(&mut self, sequence: i32, tokens: &[TokenId]) {
        let state = sequence_state(&self.llama, sequence, StateExtent::Full);
        let zeroed =
            state.zip(self.capabilities.layout.as_ref()).and_then(|(state, layout)| layout.zeroed(state, tokens).ok());
        let overwritten =
            zeroed.is_some_and(|state| set_sequence_state(&mut self.llama, sequence, &state, StateExtent::Full));
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
        self.memory.window.is_none() || self.first_position(sequence) == 0
    }

    /// Returns the position of the oldest token that all layers have; 0 for an empty sequence.
    fn first_position(&self, sequence: i32) -> u32 {
        if self.memory.window.is_none() { 0 } else { self.llama.kv_cache_seq_pos_min(sequence).max(0).unsigned_abs() }
    }
}
