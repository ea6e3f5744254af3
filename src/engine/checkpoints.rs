//! Where a run keeps the state of its sequence, on models that cannot forget its end: a prompt that comes again, or begins
//! in the same way, and tokens that a mod takes back, are then not computed from the very beginning.

use super::run::Run;
use crate::model::llama::CheckpointPurpose;

/// Fewer tokens are computed again as fast as a state is copied.
const WORTH: usize = 32;
/// Tokens of an answer between two places, where mods may take some back.
const EVERY: usize = 128;

/// The places ahead.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// In the prompt, in order.
    prompt: Vec<usize>,
    /// How many tokens the last place had; `None` where no places are kept.
    last: Option<usize>,
}

impl Plan {
    /// How far a decode behind `cached` tokens may go, towards `end`.
    pub fn upto(&self, cached: usize, end: usize) -> usize {
        self.prompt.iter().copied().find(|&at| at > cached).map_or(end, |at| at.min(end))
    }
}

impl Run {
    /// Plans places: where the last user message begins, which other prompts may have up to there, and where the prompt's
    /// last token is computed, which is what the same prompt can use.
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

    /// Whether what has just been decoded ends at a place, and what for.
    pub fn checkpoint_due(&mut self) -> Option<CheckpointPurpose> {
        // What was taken back begins anew.
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
