//! The stages of the sampler's chain whose parameters have an effect.

use super::SamplerInput;
use super::candidates::{LogitsEditor, LogitsView};
use super::infill::Infill;
use super::params::{SamplerStage, SamplingParams};
use super::repetition::{Dry, Penalties};
use crate::events::TokenId;
use crate::model::Vocabulary;
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;
use std::sync::Arc;

/// Minimum temperature above 0. A lower one has the same effect, but could divide logits to infinity.
const MIN_TEMPERATURE: f32 = 1e-6;

/// An active stage.
pub(super) enum ActiveStage {
    Penalties(Penalties),
    Dry(Dry),
    TopK(i32, LlamaSampler),
    Filter(&'static str, LlamaSampler),
    Xtc(LlamaSampler),
    Infill(Infill),
    /// `None` for 1, which has no effect.
    Temperature(Option<LlamaSampler>),
}

impl ActiveStage {
    /// Returns true for a stage that changes few logits and removes no candidates.
    pub(super) fn is_penalty(&self) -> bool {
        matches!(self, Self::Penalties(_) | Self::Dry(_))
    }

    /// Changes the logits of tokens that repeat a part of the sequence. Returns the name of the stage; `None` if it is no
    /// penalty.
    pub(super) fn penalize(&mut self, sequence: &[TokenId], logits: &mut impl LogitsEditor) -> Option<&'static str> {
        match self {
            Self::Penalties(penalties) => {
                let counts = penalties.recent.count(sequence);
                logits.change(counts, |logit, count| penalties.strength.change(logit, *count));
                Some("penalties")
            }
            Self::Dry(dry) => {
                logits.change(&dry.penalties(sequence), |logit, penalty| logit - penalty);
                Some("dry")
            }
            _ => None,
        }
    }

    /// Applies the stage to the candidates, which were selected from `view`. Returns its name; `None` if it has no effect.
    pub(super) fn apply(
        &mut self,
        input: &SamplerInput<'_>,
        view: LogitsView<'_>,
        array: &mut LlamaTokenDataArray,
    ) -> Option<&'static str> {
        let name = match self {
            Self::Penalties(_) | Self::Dry(_) => return self.penalize(input.sequence, array),
            Self::TopK(_, filter) => {
                filter.apply(array);
                return Some("top-k");
            }
            Self::Filter(name, filter) => {
                filter.apply(array);
                *name
            }
            Self::Xtc(filter) => {
                filter.apply(array);
                "xtc"
            }
            Self::Infill(infill) => {
                infill.apply(array, view);
                "infill"
            }
            Self::Temperature(filter) => {
                match (input.temperature, filter) {
                    (Some(other), _) => LlamaSampler::temp(bounded_temperature(other)).apply(array),
                    (None, Some(filter)) => filter.apply(array),
                    (None, None) => return None,
                }
                "temp"
            }
        };
        // These stages may ban a candidate instead of removing it.
        array.data.retain(|entry| entry.logit() > f32::NEG_INFINITY);
        Some(name)
    }
}

/// Returns XTC's filter in a chain.
pub(super) fn xtc_mut(chain: &mut [ActiveStage]) -> Option<&mut LlamaSampler> {
    chain.iter_mut().find_map(|stage| if let ActiveStage::Xtc(filter) = stage { Some(filter) } else { None })
}

/// Returns the temperature that llama.cpp gets for this one.
pub(super) fn bounded_temperature(temperature: f32) -> f32 {
    if temperature > 0.0 { temperature.max(MIN_TEMPERATURE) } else { temperature }
}

/// Creates the stage if its parameters have an effect.
pub(super) fn active_stage(
    stage: SamplerStage,
    sampling: &SamplingParams,
    vocabulary: &Arc<Vocabulary>,
    seed: u32,
) -> Option<ActiveStage> {
    let keep = sampling.min_keep;
    match stage {
        SamplerStage::Penalties => Penalties::new(sampling).map(ActiveStage::Penalties),
        SamplerStage::Dry => Dry::new(sampling, vocabulary).map(ActiveStage::Dry),
        SamplerStage::TopNSigma => (sampling.top_n_sigma > 0.0)
            .then(|| ActiveStage::Filter("top-n-sigma", LlamaSampler::top_n_sigma(sampling.top_n_sigma))),
        SamplerStage::TopK => {
            (sampling.top_k > 0).then(|| ActiveStage::TopK(sampling.top_k, LlamaSampler::top_k(sampling.top_k)))
        }
        SamplerStage::TypicalP => (sampling.typical_p < 1.0)
            .then(|| ActiveStage::Filter("typical", LlamaSampler::typical(sampling.typical_p, keep))),
        SamplerStage::TopP => {
            (sampling.top_p < 1.0).then(|| ActiveStage::Filter("top-p", LlamaSampler::top_p(sampling.top_p, keep)))
        }
        SamplerStage::MinP => {
            (sampling.min_p > 0.0).then(|| ActiveStage::Filter("min-p", LlamaSampler::min_p(sampling.min_p, keep)))
        }
        SamplerStage::Xtc => (sampling.xtc_probability > 0.0 && sampling.xtc_threshold <= 0.5).then(|| {
            let (probability, threshold) = (sampling.xtc_probability, sampling.xtc_threshold);
            ActiveStage::Xtc(LlamaSampler::xtc(probability, threshold, keep, seed))
        }),
        SamplerStage::Infill => Some(ActiveStage::Infill(Infill::new(vocabulary))),
        SamplerStage::Temperature => {
            let (temperature, range) = (bounded_temperature(sampling.temperature), sampling.dynatemp_range);
            Some(ActiveStage::Temperature(
                (temperature != 1.0 || range > 0.0)
                    .then(|| LlamaSampler::temp_ext(temperature, range, sampling.dynatemp_exponent)),
            ))
        }
        // Adaptive-p is always the last stage and is handled by [`Adaptive`].
        SamplerStage::AdaptiveP => None,
    }
}
