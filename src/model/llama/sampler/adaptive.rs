//! Samplers that adapt to their draws: mirostat and adaptive-p. The state after each token is stored, so that
//! backtracking can return to it.

use super::params::{SamplerStage, SamplingParams};
use crate::events::TokenId;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;

/// Number of candidates from which mirostat 1 estimates the distribution.
const ESTIMATE_CANDIDATES: usize = 100;
/// Distance from the target, in probability, that counts as 1 in adaptive-p; this and the next two constants are
/// llama.cpp's.
const DISTRIBUTION_WIDTH: f32 = 0.3;
/// Logit that adaptive-p gives a candidate exactly at the target.
const PEAK_LOGIT: f32 = 5.0;
/// Slope with which the logit decreases at large distances from the target.
const SHARPNESS: f32 = 10.0;

/// A sampler that adapts to its draws.
#[derive(Debug, Clone)]
pub(super) struct Adaptive {
    kind: Kind,
    /// State after each draw, with the length of the answer at that point.
    history: Vec<(usize, AdaptiveState)>,
    start: AdaptiveState,
    /// The last sampled token, and the state to use if it is accepted.
    drawn: Option<(TokenId, AdaptiveState)>,
    /// For adaptive-p: each candidate's probability before the transformation.
    before: Vec<f32>,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Mirostat { vocabulary: usize, tau: f32, eta: f32 },
    Mirostat2 { tau: f32, eta: f32 },
    AdaptiveP { target: f32, decay: f32 },
}

/// The state of a sampler of the same kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum AdaptiveState {
    Mirostat {
        /// Maximum surprise of a candidate.
        mu: f32,
    },
    AdaptiveP {
        /// Sum of the drawn tokens' probabilities, the recent ones with more weight.
        weighted_sum: f32,
        total_weight: f32,
    },
}

impl Adaptive {
    /// Creates the sampler; `None` if no adaptive sampler is enabled.
    pub(super) fn new(sampling: &SamplingParams, vocabulary: usize) -> Option<Self> {
        let (tau, eta) = (sampling.mirostat_tau, sampling.mirostat_eta);
        let (kind, start) = match sampling.mirostat {
            1 => (Kind::Mirostat { vocabulary, tau, eta }, AdaptiveState::Mirostat { mu: 2.0 * tau }),
            2 => (Kind::Mirostat2 { tau, eta }, AdaptiveState::Mirostat { mu: 2.0 * tau }),
            _ if sampling.samplers.contains(&SamplerStage::AdaptiveP) && sampling.adaptive_target >= 0.0 => {
                let (target, decay) = (sampling.adaptive_target, sampling.adaptive_decay.clamp(0.0, 0.99));
                let total_weight = 1.0 / (1.0 - decay);
                let weighted_sum = target * total_weight;
                (Kind::AdaptiveP { target, decay }, AdaptiveState::AdaptiveP { weighted_sum, total_weight })
            }
            _ => return None,
        };
        Some(Self { kind, history: Vec::new(), start, drawn: None, before: Vec::new() })
    }

    pub(super) fn name(&self) -> &'static str {
        match self.kind {
            Kind::Mirostat { .. } => "mirostat",
            Kind::Mirostat2 { .. } => "mirostat-v2",
            Kind::AdaptiveP { .. } => "adaptive-p",
        }
    }

    /// Returns true for mirostat, which replaces the whole chain.
    pub(super) fn is_mirostat(&self) -> bool {
        !matches!(self.kind, Kind::AdaptiveP { .. })
    }

    /// Returns the state at the end of the answer.
    pub(super) fn state(&self) -> AdaptiveState {
        self.history.last().map_or(self.start, |history| history.1)
    }

    /// Reduces or transforms the candidates.
    pub(super) fn apply(&mut self, array: &mut LlamaTokenDataArray) {
        if matches!(self.kind, Kind::Mirostat { .. }) {
            sort(array);
        }
        compute_probabilities(array);
        match (self.kind, self.state()) {
            (Kind::Mirostat { vocabulary, .. }, AdaptiveState::Mirostat { mu }) => {
                let keep = estimate(array, vocabulary, mu);
                array.data.truncate(keep);
            }
            (Kind::Mirostat2 { .. }, AdaptiveState::Mirostat { mu }) => {
                let highest = array.data.iter().map(LlamaTokenData::p).fold(0.0, f32::max);
                // Always keep the most probable candidate.
                array.data.retain(|entry| -entry.p().log2() <= mu || entry.p() >= highest);
                sort(array);
                if array.data.first().is_some_and(|first| -first.p().log2() > mu) {
                    array.data.truncate(1);
                }
            }
            (Kind::AdaptiveP { target, .. }, AdaptiveState::AdaptiveP { weighted_sum, total_weight }) => {
                let mean = if total_weight == 0.0 { target } else { weighted_sum / total_weight };
                let adjusted_target = (2.0 * target - mean).clamp(0.0, 1.0);
                self.before.clear();
                self.before.extend(array.data.iter().map(LlamaTokenData::p));
                for entry in &mut array.data {
                    let distance = ((entry.p() - adjusted_target) / DISTRIBUTION_WIDTH).abs();
                    entry.set_logit(PEAK_LOGIT - SHARPNESS * distance * distance / (1.0 + distance));
                }
                array.sorted = false;
            }
            _ => {}
        }
    }

    /// Records the draw: the index of the candidate, and its probability among the candidates.
    pub(super) fn record_draw(&mut self, token: TokenId, index: usize, prob: f32) {
        let next = match (self.kind, self.state()) {
            (Kind::Mirostat { tau, eta, .. } | Kind::Mirostat2 { tau, eta }, AdaptiveState::Mirostat { mu }) => {
                AdaptiveState::Mirostat { mu: mu - eta * (-prob.log2() - tau) }
            }
            (Kind::AdaptiveP { decay, .. }, AdaptiveState::AdaptiveP { weighted_sum, total_weight }) => {
                let prob = self.before.get(index).copied().unwrap_or(prob);
                AdaptiveState::AdaptiveP {
                    weighted_sum: prob + decay * weighted_sum,
                    total_weight: 1.0 + decay * total_weight,
                }
            }
            (_, state) => state,
        };
        self.drawn = Some((token, next));
    }

    /// Accepts a token that was appended to the answer, which now has `length` tokens.
    pub(super) fn accept(&mut self, token: TokenId, length: usize) {
        if let Some((drawn, next)) = self.drawn.take()
            && drawn == token
        {
            self.history.push((length, next));
        }
    }

    /// Returns to the first `length` tokens of the answer.
    pub(super) fn rewind(&mut self, length: usize) {
        self.drawn = None;
        while self.history.last().is_some_and(|history| history.0 > length) {
            self.history.pop();
        }
    }
}

fn compute_probabilities(array: &mut LlamaTokenDataArray) {
    let highest = array.data.iter().map(LlamaTokenData::logit).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for entry in &mut array.data {
        let p = (entry.logit() - highest).exp();
        entry.set_p(p);
        sum += p;
    }
    for entry in &mut array.data {
        entry.set_p(entry.p() / sum);
    }
}

fn sort(array: &mut LlamaTokenDataArray) {
    if !array.sorted {
        array.data.sort_unstable_by(|a, b| b.logit().total_cmp(&a.logit()).then(a.id().0.cmp(&b.id().0)));
        array.sorted = true;
    }
}

/// Returns the number of candidates that mirostat 1 keeps: it fits Zipf's law to the most probable ones.
fn estimate(array: &LlamaTokenDataArray, vocabulary: usize, mu: f32) -> usize {
    let (mut ratios, mut squares) = (0.0, 0.0);
    for (index, pair) in array.data.windows(2).take(ESTIMATE_CANDIDATES - 1).enumerate() {
        let t = ((index + 2) as f32 / (index + 1) as f32).ln();
        ratios += t * (pair[0].p() / pair[1].p()).ln();
        squares += t * t;
    }
    let s = ratios / squares;
    let epsilon = s - 1.0;
    let keep = (epsilon * 2f32.powf(mu) / (1.0 - (vocabulary as f32).powf(-epsilon))).powf(1.0 / s);
    // NaN if there is nothing to estimate from.
    if keep >= 1.0 { (keep as usize).min(array.data.len()) } else { 1 }
}
