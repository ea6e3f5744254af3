//! A sampler that takes another one's place in the middle of a run.

use super::{Sampler, SamplingParams};

impl Sampler {
    /// Goes on where `before` was, which drew as `was` said: the draw unless `is` has another seed, and what was learned unless it
    /// learns something else.
    pub fn take_over(&mut self, before: &mut Self, was: &SamplingParams, is: &SamplingParams) {
        if was.seed == is.seed {
            std::mem::swap(&mut self.draw, &mut before.draw);
        }
        let learns = |sampling: &SamplingParams| {
            let SamplingParams { mirostat, mirostat_tau, mirostat_eta, adaptive_target, adaptive_decay, .. } =
                *sampling;
            (mirostat, mirostat_tau, mirostat_eta, adaptive_target, adaptive_decay)
        };
        if self.adaptive.is_some() && before.adaptive.is_some() && learns(was) == learns(is) {
            std::mem::swap(&mut self.adaptive, &mut before.adaptive);
        }
    }
}
