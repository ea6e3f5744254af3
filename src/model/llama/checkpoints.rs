//! Checkpoints: copies of a recurrent state at certain lengths of a sequence, because the current state represents only
//! the end of the sequence.

use std::sync::Arc;

/// Maximum checkpoints at ends of prompts and messages.
const MAX_PROMPT_CHECKPOINTS: usize = 8;
/// Maximum checkpoints within an answer. With two, a backtrack to just before the newer one starts at the older one.
const MAX_ANSWER_CHECKPOINTS: usize = 2;

/// The purpose of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointPurpose {
    /// A prompt prefix that other runs may share.
    Prompt,
    /// Backtracking within an answer.
    Answer,
}

/// The checkpoints of a sequence, in order of length.
#[derive(Debug, Clone, Default)]
pub struct Checkpoints(Vec<Checkpoint>);

#[derive(Debug, Clone)]
struct Checkpoint {
    /// Length of the sequence in tokens.
    length: u32,
    purpose: CheckpointPurpose,
    state: Arc<[u8]>,
}

impl Checkpoints {
    /// Returns the length of the last checkpoint within the first `length` tokens; 0 without a checkpoint.
    #[must_use]
    pub fn last_within(&self, length: u32) -> u32 {
        self.newest_within(length).map_or(0, |checkpoint| checkpoint.length)
    }

    /// Returns the size of all checkpoints in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|checkpoint| checkpoint.state.len()).sum()
    }

    /// Returns length and state of the last checkpoint within the first `length` tokens.
    pub(super) fn state_within(&self, length: u32) -> Option<(u32, Arc<[u8]>)> {
        self.newest_within(length).map(|checkpoint| (checkpoint.length, Arc::clone(&checkpoint.state)))
    }

    /// Adds a checkpoint after all others, and drops the oldest of its purpose if there are too many.
    pub(super) fn add(&mut self, length: u32, purpose: CheckpointPurpose, state: Vec<u8>) {
        self.0.push(Checkpoint { length, purpose, state: state.into() });
        let max = if purpose == CheckpointPurpose::Prompt { MAX_PROMPT_CHECKPOINTS } else { MAX_ANSWER_CHECKPOINTS };
        let has_same_purpose = |checkpoint: &Checkpoint| checkpoint.purpose == purpose;
        if self.0.iter().filter(|checkpoint| has_same_purpose(checkpoint)).count() > max
            && let Some(oldest) = self.0.iter().position(has_same_purpose)
        {
            self.0.remove(oldest);
        }
    }

    /// Returns true if there is a checkpoint at or after this length.
    pub(super) fn reaches(&self, length: u32) -> bool {
        self.0.last().is_some_and(|last| last.length >= length)
    }

    /// Drops the checkpoints after the first `length` tokens.
    pub(super) fn truncate(&mut self, length: u32) {
        self.0.retain(|checkpoint| checkpoint.length <= length);
    }

    /// Drops the oldest checkpoint; returns `false` if there is none.
    pub(super) fn drop_oldest(&mut self) -> bool {
        if self.0.is_empty() {
            return false;
        }
        self.0.remove(0);
        true
    }

    fn newest_within(&self, length: u32) -> Option<&Checkpoint> {
        self.0.iter().rfind(|checkpoint| checkpoint.length <= length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(checkpoints: &Checkpoints) -> Vec<u32> {
        checkpoints.0.iter().map(|checkpoint| checkpoint.length).collect()
    }

    #[test]
    fn last_checkpoint_is_found_and_oldest_of_its_purpose_dropped() {
        let mut checkpoints = Checkpoints::default();
        assert_eq!(checkpoints.last_within(1000), 0);
        for turn in 1..=10 {
            checkpoints.add(100 * turn, CheckpointPurpose::Prompt, vec![0; 10]);
            for step in 1..=3 {
                checkpoints.add(100 * turn + step, CheckpointPurpose::Answer, vec![0; 10]);
            }
        }
        assert_eq!(lengths(&checkpoints), [300, 400, 500, 600, 700, 800, 900, 1000, 1002, 1003]);
        assert_eq!((checkpoints.bytes(), checkpoints.last_within(299), checkpoints.last_within(599)), (100, 0, 500));
        assert!(checkpoints.reaches(1003) && !checkpoints.reaches(1004));
        checkpoints.truncate(500);
        assert_eq!(lengths(&checkpoints), [300, 400, 500]);
        assert_eq!(checkpoints.state_within(450).map(|(length, state)| (length, state.len())), Some((400, 10)));
        assert!(checkpoints.drop_oldest() && checkpoints.last_within(399) == 0 && checkpoints.last_within(400) == 400);
    }
}
