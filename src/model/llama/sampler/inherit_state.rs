//! Replacement of a run's sampler during the run.

use super::active_stage::xtc_mut;
use super::{Sampler, SamplingParams};

impl Sampler {
    /// Takes over the state of `previous`: the random number generators if both use the same seed (that of XTC also
    /// requires the same settings of XTC), and the adaptive state if both use the same adaptive sampler.
    pub fn inherit_state(&mut self, previous: &mut Self, previous_params: &SamplingParams, params: &SamplingParams) {
        if previous_params.seed == params.seed {
            std::mem::swap(&mut self.draw, &mut previous.draw);
            let xtc_params =
                |sampling: &SamplingParams| (sampling.xtc_probability, sampling.xtc_threshold, sampling.min_keep);
            if xtc_params(previous_params) == xtc_params(params)
                && let (Some(own), Some(previous)) = (xtc_mut(&mut self.chain), xtc_mut(&mut previous.chain))
            {
                std::mem::swap(own, previous);
            }
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
