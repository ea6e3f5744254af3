//! Checkpoints of a run's state, for models that cannot truncate a sequence, such as recurrent ones. From a checkpoint,
//! a backtrack or another prompt with the same beginning continues without a decode from the start.

use crate::model::llama::CheckpointPurpose;

/// Minimum number of tokens between two checkpoints. Decoding fewer tokens again is as fast as copying a state.
const MIN_CHECKPOINT_GAP: usize = 32;
/// Tokens of an answer between two checkpoints, for runs with mods.
const ANSWER_CHECKPOINT_INTERVAL: usize = 128;

/// Positions at which checkpoints are made.
#[derive(Debug, Default)]
pub struct CheckpointPlan {
    /// Positions in the prompt, in order.
    prompt: Vec<usize>,
    /// Position of the last checkpoint; `None` if no checkpoints are kept.
    last: Option<usize>,
}

impl CheckpointPlan {
    /// Returns the end of the next decode after `kv_len` tokens: the next checkpoint, or `end`.
    pub fn decode_limit(&self, kv_len: usize, end: usize) -> usize {
        self.prompt.iter().copied().find(|&at| at > kv_len).map_or(end, |at| at.min(end))
    }

    /// Plans checkpoints in a prompt of which `kv_len` tokens are cached: at the start of the last user message, where
    /// similar prompts may start to differ, and at `must_decode_from` (before the last token), from which the same prompt
    /// can continue.
    pub fn for_prompt(kv_len: usize, last_user: Option<usize>, must_decode_from: usize) -> Self {
        let mut last = kv_len;
        let positions = last_user.into_iter().chain([must_decode_from]).filter(|&at| at <= must_decode_from);
        let prompt = positions
            .filter(|&at| {
                let is_worthwhile = at >= last + MIN_CHECKPOINT_GAP;
                last = if is_worthwhile { at } else { last };
                is_worthwhile
            })
            .collect();
        Self { prompt, last: Some(kv_len) }
    }

    /// Plans checkpoints only in the answer.
    pub fn without_prompt(kv_len: usize) -> Self {
        Self { prompt: Vec::new(), last: Some(kv_len) }
    }

    /// Returns the purpose of a checkpoint after `kv_len` decoded tokens, if one is due. `answer_from` is the length of
    /// the prompt; `None` if the answer gets no checkpoints.
    pub fn take_due(&mut self, kv_len: usize, answer_from: Option<usize>) -> Option<CheckpointPurpose> {
        // After a backtrack, the interval starts at the new end.
        let last = self.last?.min(kv_len);
        let purpose = if self.prompt.contains(&kv_len) {
            Some(CheckpointPurpose::Prompt)
        } else if answer_from.is_some_and(|from| kv_len > from) && kv_len >= last + ANSWER_CHECKPOINT_INTERVAL {
            Some(CheckpointPurpose::Answer)
        } else {
            None
        };
        self.last = Some(if purpose.is_some() { kv_len } else { last });
        purpose
    }
}

#[cfg(test)]
mod tests {
    use super::CheckpointPlan;

    #[test]
    fn decode_ends_at_next_checkpoint() {
        let plan = CheckpointPlan { prompt: vec![40, 99], last: Some(0) };
        let ends: Vec<usize> = [0, 39, 40, 98, 99, 150].map(|kv_len| plan.decode_limit(kv_len, 160)).to_vec();
        assert_eq!(ends, [40, 40, 99, 99, 160, 160]);
        assert_eq!((plan.decode_limit(0, 20), CheckpointPlan::default().decode_limit(3, 20)), (20, 20));
    }
}
