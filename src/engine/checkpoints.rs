//! Checkpoints of a run's state, for models that cannot remove the end of a sequence. With a checkpoint, a repeated
//! prompt, a prompt with the same beginning, and tokens removed by a mod need not be computed from the start.

use super::run::Run;
use crate::model::llama::CheckpointPurpose;

/// Minimum tokens between two checkpoints; computing fewer again takes no longer than copying a state.
const WORTH: usize = 32;
/// Tokens of an answer between two checkpoints, for runs with mods.
const EVERY: usize = 128;

/// Planned checkpoints.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// Positions in the prompt, in order.
    prompt: Vec<usize>,
    /// Position of the last checkpoint; `None` if no checkpoints are kept.
    last: Option<usize>,
}

impl Plan {
    /// Returns the end of the next decode after `kv_len` tokens: the next checkpoint, or `end`.
    pub fn upto(&self, cached: usize, end: usize) -> usize {
        self.prompt.iter().copied().find(|&at| at > cached).map_or(end, |at| at.min(end))
    }
}

impl Run {
    /// Plans checkpoints: at the start of the last user message, up to which other prompts may be the same, and before
    /// the last token of the prompt, for the same prompt again.
    pub fn plan_checkpoints(&mut self, outputs_from: usize) {
        let mut last = self.cached;
        let asked = self.request.spans.iter().rfind(|span| span.role == "user").map(|span| span.start as usize);
        let wanted = self.request.cache_prompt || !self.mods.is_empty();
        let places = asked.into_iter().chain([outputs_from]).filter(|&at| wanted && at <= outputs_from);
        self.checkpoints.prompt = places
            .filter(|&at| {
                let worth = at >= last + WORTH;
                last = if worth { at } else { last };
                worth
            })
            .collect();
        self.checkpoints.last = Some(self.cached);
    }

    /// Returns the purpose of a checkpoint after the last decode, if one is due.
    pub fn checkpoint_due(&mut self) -> Option<CheckpointPurpose> {
        // Removed tokens are counted again.
        let last = self.checkpoints.last?.min(self.cached);
        let purpose = if self.checkpoints.prompt.contains(&self.cached) {
            Some(CheckpointPurpose::Prompt)
        } else if !self.mods.is_empty() && self.cached > self.prompt_len && self.cached >= last + EVERY {
            Some(CheckpointPurpose::Answer)
        } else {
            None
        };
        self.checkpoints.last = Some(if purpose.is_some() { self.cached } else { last });
        purpose
    }
}

#[cfg(test)]
mod tests {
    use super::Plan;

    #[test]
    fn a_decode_ends_at_the_next_place() {
        let plan = Plan { prompt: vec![40, 99], last: Some(0) };
        let ends: Vec<usize> = [0, 39, 40, 98, 99, 150].map(|cached| plan.upto(cached, 160)).to_vec();
        assert_eq!(ends, [40, 40, 99, 99, 160, 160]);
        assert_eq!((plan.upto(0, 20), Plan::default().upto(3, 20)), (20, 20));
    }
}
