//! Repetition of recorded draws without their logits, for a run that continues a recorded one.

use super::Sampler;
use super::active_stage::xtc_mut;
use crate::events::{StageCount, TokenId};
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;

impl Sampler {
    /// Returns true if the state of the sampler can be computed from a recorded draw after `redraws` others in its step.
    /// Adaptive-p depends on a probability that is not recorded, and the adaptive state on the tokens of all draws.
    #[must_use]
    pub fn can_repeat_draw(&self, redraws: u32) -> bool {
        self.adaptive.as_ref().is_none_or(|adaptive| adaptive.is_mirostat() && redraws == 0)
    }

    /// Advances the random number generators and the adaptive state as a recorded draw of `token` did. `prob` is the
    /// probability of the token in the draw; `stages` are the applied stages with the number of candidates after each.
    pub fn repeat_draw(&mut self, token: TokenId, prob: Option<f32>, stages: &[StageCount]) {
        if stages.last().is_some_and(|last| last.name == "argmax") {
            return;
        }
        let mut left = u32::MAX;
        for stage in stages {
            // The stage draws a random number only if there are at least two candidates.
            if stage.name == "xtc"
                && left > 1
                && let Some(filter) = xtc_mut(&mut self.chain)
            {
                filter.apply(&mut pair());
            }
            left = stage.left;
        }
        if self.adaptive.is_none() || left > 1 {
            self.draw.apply(&mut pair());
        }
        if let Some(adaptive) = &mut self.adaptive {
            adaptive.record_draw(token, 0, prob.unwrap_or(1.0));
        }
    }
}

/// Returns two equal candidates.
fn pair() -> LlamaTokenDataArray {
    LlamaTokenDataArray::new((0..2).map(|id| LlamaTokenData::new(LlamaToken::new(id), 0.0, 0.5)).collect(), false)
}
