//! Checkpoints of a run's state, for models that cannot remove the end of a sequence. With a checkpoint, a repeated
//! prompt, a prompt with the same beginning, and tokens removed by a mod need not be computed from the start.

use super::run::Run;
use crate::model::llama::CheckpointPurpose;

/// Minimum tokens between two checkpoints; computing fewer again takes no longer than copying a state.
const MIN_CHECKPOINT_GAP: usize = 32;
/// Tokens of an answer between two checkpoints, for runs with mods.
const ANSWER_CHECKPOINT_INTERVAL: usize = 128;

/// Planned checkpoints.
#[derive(Debug, Default)]
pub(super) struct CheckpointPlan {
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
}

impl Run {
    /// Plans checkpoints: at the start of the last user message, up to which other prompts may be the same, and before
    /// the last token of the prompt, for the same prompt again.
    pub fn plan_checkpoints(&mut self, outputs_from: usize) {
        let mut last = self.kv_len;
        let last_user = self.request.spans.iter().rfind(|span| span.role == "user").map(|span| span.start as usize);
        let wanted = self.request.cache_prompt || !self.mods.is_empty();
        let places = last_user.into_iter().chain([outputs_from]).filter(|&at| wanted && at <= outputs_from);
        self.checkpoints.prompt = places
            .filter(|&at| {
                let worth = at >= last + MIN_CHECKPOINT_GAP;
                last = if worth { at } else { last };
                worth
            })
            .collect();
        self.checkpoints.last = Some(self.kv_len);
    }

    /// Returns the purpose of a checkpoint after the last decode, if one is due.
    pub fn checkpoint_due(&mut self) -> Option<CheckpointPurpose> {
        // Removed tokens are counted again.
        let last = self.checkpoints.last?.min(self.kv_len);
        let purpose = if self.checkpoints.prompt.contains(&self.kv_len) {
            Some(CheckpointPurpose::Prompt)
        } else if !self.mods.is_empty()
            && self.kv_len > self.prompt_len
            && self.kv_len >= last + ANSWER_CHECKPOINT_INTERVAL
        {
            Some(CheckpointPurpose::Answer)
        } else {
            None
        };
        self.checkpoints.last = Some(if purpose.is_some() { self.kv_len } else { last });
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
