//! Places of a sequence that can be gone back to although its state knows only its end: what the state was there.

use std::sync::Arc;

/// Most places of a sequence where prompts or messages ended.
const MAX_LASTING: usize = 8;
/// Most places within an answer. The one before the last serves what is taken back just behind the last.
const MAX_PASSING: usize = 2;

/// What a place is kept for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointPurpose {
    /// The beginning of a prompt that others may share.
    Prompt,
    /// Going back within an answer.
    Answer,
}

/// The places of a sequence, in order.
#[derive(Debug, Clone, Default)]
pub struct Checkpoints(Vec<Checkpoint>);

#[derive(Debug, Clone)]
struct Checkpoint {
    /// Tokens that the sequence had.
    length: u32,
    purpose: CheckpointPurpose,
    state: Arc<[u8]>,
}

impl Checkpoints {
    /// Tokens up to the last place within the first `length`; 0 when there is none.
    #[must_use]
    pub fn last_within(&self, length: u32) -> u32 {
        self.within(length).map_or(0, |checkpoint| checkpoint.length)
    }

    /// Bytes that all places take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|checkpoint| checkpoint.state.len()).sum()
    }

    /// The length and the state of the last place within the first `length` tokens.
    pub(super) fn state_within(&self, length: u32) -> Option<(u32, Arc<[u8]>)> {
        self.within(length).map(|checkpoint| (checkpoint.length, Arc::clone(&checkpoint.state)))
    }

    /// Adds a place behind all others, and forgets the oldest of its kind where there are too many.
    pub(super) fn add(&mut self, length: u32, purpose: CheckpointPurpose, state: Vec<u8>) {
        self.0.push(Checkpoint { length, purpose, state: state.into() });
        let most = if purpose == CheckpointPurpose::Prompt { MAX_LASTING } else { MAX_PASSING };
        let alike = |checkpoint: &Checkpoint| checkpoint.purpose == purpose;
        if self.0.iter().filter(|checkpoint| alike(checkpoint)).count() > most
            && let Some(oldest) = self.0.iter().position(alike)
        {
            self.0.remove(oldest);
        }
    }

    /// Whether there is a place at that length, or behind it.
    pub(super) fn reach(&self, length: u32) -> bool {
        self.0.last().is_some_and(|last| last.length >= length)
    }

    /// Forgets what is behind the first `length` tokens.
    pub(super) fn truncate(&mut self, length: u32) {
        self.0.retain(|checkpoint| checkpoint.length <= length);
    }

    /// Forgets the oldest place. `false` when there is none.
    pub(super) fn forget_one(&mut self) -> bool {
        if self.0.is_empty() {
            return false;
        }
        self.0.remove(0);
        true
    }

    fn within(&self, length: u32) -> Option<&Checkpoint> {
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
    fn the_last_place_is_found_and_the_oldest_of_a_kind_go() {
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
        assert!(checkpoints.reach(1003) && !checkpoints.reach(1004));
        checkpoints.truncate(500);
        assert_eq!(lengths(&checkpoints), [300, 400, 500]);
        assert_eq!(checkpoints.state_within(450).map(|(length, state)| (length, state.len())), Some((400, 10)));
        assert!(checkpoints.forget_one() && checkpoints.last_within(399) == 0 && checkpoints.last_within(400) == 400);
    }
}
