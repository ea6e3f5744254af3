//! What happens to the state of a sequence between decodes: it is cut, saved, put back, or gone back in.

use super::Context;
use crate::events::TokenId;
use crate::model::llama::checkpoints::{CheckpointPurpose, Checkpoints};
use crate::model::llama::ffi::{self, StateExtent};
use crate::model::llama::memory::{OUT_OF_WINDOW, RECURRENT};
use crate::model::{ModelError, ShiftError};
use std::ops::Range;

impl Context<'_> {
    /// Removes the tokens of a sequence from position `from` on. Where the cache cannot remove a part, or no longer has
    /// what a token at `from` would look at, it goes back to the last checkpoint before, or all of it goes. Returns how many
    /// tokens are left.
    #[must_use]
    pub fn truncate(&mut self, sequence: i32, from: u32) -> u32 {
        if self.can_truncate(sequence, from) && self.llama.kv_cache_seq_rm(sequence, Some(from), None).is_ok() {
            self.checkpoints[sequence as usize].truncate(from);
            return from;
        }
        if let Some((length, state)) = self.checkpoints[sequence as usize].state_within(from)
            && self.go_back(sequence, length, &state)
        {
            return length;
        }
        self.clear(sequence);
        0
    }

    /// How many of the first `keep` tokens of a sequence, that has more, [`Context::truncate`] would leave.
    #[must_use]
    pub fn reach(&self, sequence: i32, keep: usize) -> usize {
        let within = keep as u32;
        if self.can_truncate(sequence, within) {
            return keep;
        }
        self.checkpoints[sequence as usize].last_within(within) as usize
    }

    /// How many of the first `keep` tokens can be used of a state of `length` tokens that was saved with these checkpoints.
    #[must_use]
    pub fn reach_of_saved(&self, length: usize, checkpoints: &Checkpoints, keep: usize) -> usize {
        if self.memory.can_keep(length as u32, keep as u32) {
            return keep;
        }
        checkpoints.last_within(keep as u32) as usize
    }

    fn can_truncate(&self, sequence: i32, from: u32) -> bool {
        from == 0 || (!self.memory.recurrent && self.first_position(sequence) <= self.memory.seen_from(from))
    }

    /// Puts the state of a checkpoint back, and removes what a KV cache beside it has more.
    fn go_back(&mut self, sequence: i32, length: u32, state: &[u8]) -> bool {
        let back = ffi::set_sequence_state(&mut self.llama, sequence, state, StateExtent::Summary)
            && self.llama.kv_cache_seq_rm(sequence, Some(length), None).is_ok()
            && i64::from(self.llama.kv_cache_seq_pos_max(sequence)) == i64::from(length) - 1;
        if back {
            self.checkpoints[sequence as usize].truncate(length);
        } else {
            tracing::error!(sequence, length, "llama.cpp does not take the state of a checkpoint back");
        }
        back
    }

    /// Whether sequences can only be gone back in where there is a checkpoint, and there is room for some.
    #[must_use]
    pub fn keeps_checkpoints(&self) -> bool {
        // Of layers with a window, llama.cpp would put back only what is in it, at other cells than its positions.
        self.memory.recurrent && self.memory.window == 0 && self.checkpoint_bytes > 0
    }

    /// Keeps what the state of a sequence of `length` tokens is now, so that it can be gone back to.
    pub fn keep_checkpoint(&mut self, sequence: i32, length: usize, purpose: CheckpointPurpose) {
        let own = sequence as usize;
        if !self.keeps_checkpoints() || self.checkpoints[own].reach(length as u32) {
            return;
        }
        let Some(state) = ffi::sequence_state(&self.llama, sequence, StateExtent::Summary) else {
            tracing::warn!(sequence, "the state of a sequence cannot be kept for going back to it");
            return;
        };
        let room = self.checkpoint_bytes.saturating_sub(state.len());
        while self.checkpoints.iter().map(Checkpoints::bytes).sum::<usize>() > room {
            // What others may need goes last.
            let largest = self.checkpoints.iter_mut().max_by_key(|checkpoints| checkpoints.bytes());
            if !largest.is_some_and(Checkpoints::forget_one) {
                break;
            }
        }
        if state.len() <= self.checkpoint_bytes {
            self.checkpoints[own].add(length as u32, purpose, state);
        }
    }

    /// The checkpoints of a sequence.
    #[must_use]
    pub fn checkpoints(&self, sequence: i32) -> &Checkpoints {
        &self.checkpoints[sequence as usize]
    }

    /// Gives a sequence that was restored the checkpoints that it had.
    pub fn set_checkpoints(&mut self, sequence: i32, checkpoints: Checkpoints) {
        self.checkpoints[sequence as usize] = checkpoints;
    }

    /// Whether of every state that was saved each beginning can be used.
    #[must_use]
    pub fn keeps_beginnings(&self) -> bool {
        self.memory.window == 0 && !self.memory.recurrent
    }

    /// Removes a whole sequence.
    pub fn clear(&mut self, sequence: i32) {
        // Removing a whole sequence cannot fail: only partial removal is refused by some caches.
        let _ = self.llama.kv_cache_seq_rm(sequence, None, None);
        self.checkpoints[sequence as usize] = Checkpoints::default();
    }

    /// The state of a sequence, as [`Context::restore`] takes it.
    ///
    /// # Errors
    /// [`ModelError::State`].
    pub fn save(&self, sequence: i32) -> Result<Vec<u8>, ModelError> {
        ffi::sequence_state(&self.llama, sequence, StateExtent::Whole).ok_or(ModelError::State { doing: "write" })
    }

    /// Replaces a sequence, and its checkpoints, by a state with `tokens` tokens, that [`Context::save`] wrote or that was checked with
    /// [`Layout::unpack`](crate::model::llama::state::StateLayout::unpack).
    ///
    /// # Errors
    /// [`ModelError::State`]; the sequence is then empty.
    pub fn restore(&mut self, sequence: i32, state: &[u8], tokens: u32) -> Result<(), ModelError> {
        // The cells are then taken from the first on, in the order of the positions.
        self.clear(sequence);
        let last = i64::from(tokens) - 1;
        if ffi::set_sequence_state(&mut self.llama, sequence, state, StateExtent::Whole)
            && i64::from(self.llama.kv_cache_seq_pos_max(sequence)) == last
        {
            return Ok(());
        }
        self.clear(sequence);
        Err(ModelError::State { doing: "read" })
    }

    /// Removes ranges of positions from a sequence of `length` tokens, and moves what follows to close the gaps. Ranges
    /// are in order and do not touch. What stays keeps what it knew of the removed tokens. Returns the new length.
    ///
    /// # Errors
    /// [`ShiftError::Fixed`] leaves the sequence as it was; [`ShiftError::Failed`] leaves it empty.
    pub fn cut(&mut self, sequence: i32, length: u32, ranges: &[Range<u32>]) -> Result<u32, ShiftError> {
        let left = length - ranges.iter().map(|range| range.end - range.start).sum::<u32>();
        let Some(last) = ranges.last() else { return Ok(length) };
        if ranges.len() == 1 && last.end == length {
            if self.reach(sequence, last.start as usize) < last.start as usize {
                return Err(ShiftError::Fixed(if self.memory.recurrent { RECURRENT } else { OUT_OF_WINDOW }));
            }
            return match self.truncate(sequence, last.start) {
                kept if kept == last.start => Ok(kept),
                _ => Err(ShiftError::Failed),
            };
        }
        if let Some(reason) = self.memory.fixed {
            return Err(ShiftError::Fixed(reason));
        }
        if !self.memory.can_cut(self.first_position(sequence), ranges, left) {
            return Err(ShiftError::Fixed(OUT_OF_WINDOW));
        }
        let cut = self.close_gaps(sequence, ranges, left);
        if cut.is_err() {
            self.clear(sequence);
        }
        cut.map(|()| left).map_err(|error| {
            tracing::error!(%error, sequence, "tokens could not be removed from the middle of a sequence");
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
        // llama.cpp turns the keys to their new positions at the next decode, whichever it is.
        self.add(0, left, sequence, false, false)?;
        self.decode()?;
        self.llama.kv_cache_seq_rm(sequence, Some(left), None).map_err(refused)?;
        // The positions have moved, the cells have not. A state has its cells in order, and fills an empty stream from
        // the first cell on.
        let state = self.save(sequence)?;
        self.restore(sequence, &state, left)
    }

    /// Removes a sequence of these tokens, and overwrites its keys and values. Cells that are free are masked and read all
    /// the same, so that what is not a number in them spoils whoever comes next.
    pub fn wipe(&mut self, sequence: i32, tokens: &[TokenId]) {
        let state = ffi::sequence_state(&self.llama, sequence, StateExtent::Whole);
        let zeroed = state.zip(self.layout.as_ref()).and_then(|(state, layout)| layout.zeroed(state, tokens).ok());
        let overwritten =
            zeroed.is_some_and(|state| ffi::set_sequence_state(&mut self.llama, sequence, &state, StateExtent::Whole));
        if !overwritten {
            tracing::error!(sequence, "damaged keys and values could not be overwritten");
        }
        self.clear(sequence);
    }

    /// Whether tokens can be removed from the middle of sequences.
    #[must_use]
    pub fn can_shift(&self) -> bool {
        self.memory.fixed.is_none()
    }

    /// Whether every cell of a sequence is at its position, in all layers.
    #[must_use]
    pub fn rows_exact(&self, sequence: i32) -> bool {
        self.memory.window == 0 || self.first_position(sequence) == 0
    }

    /// Position of the oldest token that all layers have; 0 for an empty sequence.
    fn first_position(&self, sequence: i32) -> u32 {
        if self.memory.window == 0 { 0 } else { self.llama.kv_cache_seq_pos_min(sequence).max(0).unsigned_abs() }
    }
}
