//! Replacement of a run's sampler during the run.

use super::{Sampler, SamplingParams};

impl Sampler {
    /// Inherits the state of `before`, which sampled with the parameters `was`: the random number generator unless `is`
    /// has another seed, and the adaptive state unless `is` uses another adaptive sampler.
    pub fn inherit_state(&mut self, before: &mut Self, was: &SamplingParams, is: &SamplingParams) {
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
