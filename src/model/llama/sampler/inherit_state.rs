//! Replacement of a run's sampler during the run.

use super::{Sampler, SamplingParams};

impl Sampler {
    /// Takes over the state of `previous`: the random number generator if both use the same seed, and the adaptive
    /// state if both use the same adaptive sampler.
    pub fn inherit_state(&mut self, previous: &mut Self, previous_params: &SamplingParams, params: &SamplingParams) {
        if previous_params.seed == params.seed {
            std::mem::swap(&mut self.draw, &mut previous.draw);
        }
        let adaptive_params = |sampling: &SamplingParams| {
            let SamplingParams { mirostat, mirostat_tau, mirostat_eta, adaptive_target, adaptive_decay, .. } =
                *sampling;
            (mirostat, mirostat_tau, mirostat_eta, adaptive_target, adaptive_decay)
        };
        if self.adaptive.is_some()
            && previous.adaptive.is_some()
            && adaptive_params(previous_params) == adaptive_params(params)
        {
            std::mem::swap(&mut self.adaptive, &mut previous.adaptive);
        }
    }
}
