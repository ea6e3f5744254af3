//! llama.cpp's sampler chain, split into stages that can be observed separately. Each stage scans only the necessary
//! part of the vocabulary.
//!
//! Filters and the final draw are llama.cpp's own, so the same seed samples the same tokens. Biases, penalties and DRY
//! change few logits and are stored as a short list of edits; the first top-k selects from the logits directly. State
//! of earlier draws is computed from the sequence, or can be rewound when tokens are removed.

mod adaptive;
mod candidates;
mod infill;
mod inherit_state;
mod params;
mod recent;
mod repeat_draw;
mod repetition;

pub use candidates::Candidates;
pub use params::{SamplerStage, SamplingParams};

use crate::events::TokenId;
use crate::model::Vocabulary;
use adaptive::Adaptive;
use candidates::{LogitsView, edit};
use infill::Infill;
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::data::LlamaTokenData;
use repetition::{Dry, Penalties};
use std::sync::Arc;

/// Maximum top-k that is selected from the logits directly; llama.cpp's own selection is faster for larger values.
const MAX_PARTIAL_SORT: i32 = 256;

/// Value that is added to the logit of a token to avoid it: the token is only sampled if no other token can be.
pub const AVOIDED_TOKEN_BIAS: f32 = -100_000.0;
/// Logit below which a token is avoided. Biases and penalties do not raise an avoided token above it.
const MIN_LOGIT: f32 = AVOIDED_TOKEN_BIAS / 10.0;

/// Minimum temperature above 0. A lower one has the same effect, but could divide logits to infinity.
const MIN_TEMPERATURE: f32 = 1e-6;

/// The sampler of one run.
pub struct Sampler {
    bias: Vec<(TokenId, f32)>,
    chain: Vec<ActiveStage>,
    /// True if the sampler always selects the highest logit: its temperature is 0 and no stage can remove that logit.
    greedy: bool,
    adaptive: Option<Adaptive>,
    draw: LlamaSampler,
}

/// An active stage.
enum ActiveStage {
    Penalties(Penalties),
    Dry(Dry),
    TopK(i32, LlamaSampler),
    Filter(&'static str, LlamaSampler),
    Infill(Infill),
    /// `None` for 1, which has no effect.
    Temperature(Option<LlamaSampler>),
}

/// The input for sampling a token.
#[derive(Debug, Clone, Copy)]
pub struct SamplerInput<'a> {
    /// One logit per token of the vocabulary; `-inf` bans a token, and [`AVOIDED_TOKEN_BIAS`] avoids it.
    pub logits: &'a [f32],
    /// A bit per allowed token; `None` for all tokens.
    pub allowed: Option<&'a [u32]>,
    /// All tokens so far, including the prompt.
    pub sequence: &'a [TokenId],
    /// Temperature for this draw, replacing the chain's.
    pub temperature: Option<f32>,
}

/// A sampled token. Its distribution stays in [`Candidates`].
#[derive(Debug, Clone, PartialEq)]
pub struct Draw {
    /// The token.
    pub token: TokenId,
    /// Its probability in the draw.
    pub prob: f32,
    /// Every applied stage, and the number of candidates left after it.
    pub stages: Vec<(&'static str, u32)>,
}

impl Sampler {
    /// Builds the chain. Takes milliseconds if DRY is on with new breakers.
    #[must_use]
    pub fn new(sampling: &SamplingParams, vocabulary: &Arc<Vocabulary>) -> Self {
        // llama.cpp interprets this seed as "random", so the run could not be repeated.
        let seed = if sampling.seed == u32::MAX { u32::MAX - 1 } else { sampling.seed };
        let adaptive = Adaptive::new(sampling, vocabulary.len());
        let chain: Vec<ActiveStage> = if adaptive.as_ref().is_some_and(Adaptive::is_mirostat) {
            active_stage(
                SamplerStage::Temperature,
                &SamplingParams { dynatemp_range: 0.0, ..sampling.clone() },
                vocabulary,
                seed,
            )
            .into_iter()
            .collect()
        } else {
            sampling.samplers.iter().filter_map(|&stage| active_stage(stage, sampling, vocabulary, seed)).collect()
        };
        let mut bias: Vec<(TokenId, f32)> =
            sampling.logit_bias.iter().copied().filter(|(token, _)| vocabulary.contains(*token)).collect();
        bias.sort_by_key(|entry| entry.0);
        bias.dedup_by(|next, first| {
            let same = next.0 == first.0;
            if same {
                first.1 += next.1;
            }
            same
        });
        let has = |stage: SamplerStage| sampling.samplers.contains(&stage);
        let is_penalty = |stage: &&ActiveStage| matches!(stage, ActiveStage::Penalties(_) | ActiveStage::Dry(_));
        // A filter may remove the token that a later penalty would make the highest.
        let penalizes_late = chain.iter().skip_while(is_penalty).any(|stage| is_penalty(&stage));
        // Three filters may remove the highest logit.
        let selects_highest = (sampling.typical_p >= 1.0 || !has(SamplerStage::TypicalP))
            && (sampling.xtc_probability <= 0.0 || sampling.xtc_threshold > 0.5 || !has(SamplerStage::Xtc))
            && !has(SamplerStage::Infill)
            && adaptive.as_ref().is_none_or(Adaptive::is_mirostat);
        Self {
            greedy: sampling.temperature <= 0.0
                && sampling.dynatemp_range <= 0.0
                && has(SamplerStage::Temperature)
                && !penalizes_late
                && selects_highest,
            bias,
            chain,
            adaptive,
            draw: LlamaSampler::dist(seed),
        }
    }

    /// Samples a token. Returns `None` if every token is banned.
    pub fn sample(&mut self, input: &SamplerInput<'_>, candidates: &mut Candidates) -> Option<Draw> {
        let SamplerInput { logits, allowed, sequence, temperature } = *input;
        let Candidates { array, edits } = candidates;
        array.sorted = false;
        array.selected = None;
        let mut stages = Vec::with_capacity(6);
        edits.clear();
        edit(edits, logits, &self.bias, |logit, bias| logit + bias);
        if let Some(words) = allowed {
            stages.push(("grammar", words.iter().map(|word| word.count_ones()).sum()));
        }

        // The first stages change few logits and remove no candidates.
        let mut done = 0;
        for stage in &mut self.chain {
            let name = match stage {
                ActiveStage::Penalties(penalties) => {
                    let counts = penalties.recent.count(sequence);
                    edit(edits, logits, counts, |logit, count| penalties.strength.change(logit, *count));
                    "penalties"
                }
                ActiveStage::Dry(dry) => {
                    edit(edits, logits, &dry.penalties(sequence), |logit, penalty| logit - penalty);
                    "dry"
                }
                _ => break,
            };
            stages.push((name, LogitsView { logits, allowed, edits }.count()));
            done += 1;
        }

        let view = LogitsView { logits, allowed, edits };
        if temperature.map_or(self.greedy, |temperature| temperature <= 0.0) {
            view.highest(1, &mut array.data);
            let best = array.data.first_mut()?;
            best.set_p(1.0);
            let token = best.id().0;
            stages.push(("argmax", 1));
            return Some(Draw { token, prob: 1.0, stages });
        }
        if let Some(ActiveStage::TopK(count, _)) = self.chain.get(done)
            && *count <= MAX_PARTIAL_SORT
        {
            view.highest(*count as usize, &mut array.data);
            array.sorted = true;
            stages.push(("top-k", array.data.len() as u32));
            done += 1;
        } else {
            view.all(&mut array.data);
        }
        // Some filters count the logits of avoided tokens, and adaptive-p would draw the tokens.
        let is_avoided = |entry: &LlamaTokenData| entry.logit() < MIN_LOGIT;
        if array.data.iter().any(is_avoided) && !array.data.iter().all(is_avoided) {
            array.data.retain(|entry| !is_avoided(entry));
            stages.push(("avoided", array.data.len() as u32));
        }

        let mut scaled = false;
        for stage in &mut self.chain[done..] {
            if array.data.is_empty() {
                return None;
            }
            let name = match stage {
                ActiveStage::Penalties(penalties) => {
                    let counts = penalties.recent.count(sequence);
                    change(&mut array.data, counts, |logit, count| penalties.strength.change(logit, *count));
                    array.sorted = false;
                    "penalties"
                }
                ActiveStage::Dry(dry) => {
                    change(&mut array.data, &dry.penalties(sequence), |logit, penalty| logit - penalty);
                    array.sorted = false;
                    "dry"
                }
                ActiveStage::TopK(_, filter) => {
                    filter.apply(array);
                    "top-k"
                }
                ActiveStage::Filter(name, filter) => {
                    filter.apply(array);
                    // Some stages ban a candidate instead of removing it.
                    array.data.retain(|entry| entry.logit() > f32::NEG_INFINITY);
                    name
                }
                ActiveStage::Infill(infill) => {
                    infill.apply(array, view);
                    array.data.retain(|entry| entry.logit() > f32::NEG_INFINITY);
                    "infill"
                }
                ActiveStage::Temperature(filter) => {
                    scaled = true;
                    match (temperature, filter) {
                        (Some(other), _) => LlamaSampler::temp(bounded_temperature(other)).apply(array),
                        (None, Some(filter)) => filter.apply(array),
                        (None, None) => continue,
                    }
                    array.data.retain(|entry| entry.logit() > f32::NEG_INFINITY);
                    "temp"
                }
            };
            stages.push((name, array.data.len() as u32));
        }
        if array.data.is_empty() {
            return None;
        }
        if let (Some(other), false) = (temperature, scaled) {
            LlamaSampler::temp(bounded_temperature(other)).apply(array);
            stages.push(("temp", array.data.len() as u32));
        }
        if let Some(adaptive) = &mut self.adaptive {
            adaptive.apply(array);
            stages.push((adaptive.name(), array.data.len() as u32));
        }
        match array.data.as_mut_slice() {
            // llama.cpp's adaptive samplers do not draw if there is only one candidate.
            [only] if self.adaptive.is_some() => {
                only.set_p(1.0);
                array.selected = Some(0);
            }
            _ => self.draw.apply(array),
        }
        let index = array.selected?;
        let drawn = array.data.get(index)?;
        let (token, prob) = (drawn.id().0, drawn.p());
        if let Some(adaptive) = &mut self.adaptive {
            adaptive.record_draw(token, index, prob);
        }
        Some(Draw { token, prob, stages })
    }

    /// Accepts a token that was appended to the answer. `length` is the number of tokens of the answer, including this
    /// token and evicted tokens.
    pub fn accept(&mut self, token: TokenId, length: usize) {
        if let Some(adaptive) = &mut self.adaptive {
            adaptive.accept(token, length);
        }
    }

    /// Returns to the first `length` tokens of the answer. State of the removed tokens is dropped. The random number
    /// generator is not rewound, because it would draw the same token again.
    pub fn rewind(&mut self, length: usize) {
        if let Some(adaptive) = &mut self.adaptive {
            adaptive.rewind(length);
        }
    }
}

fn bounded_temperature(temperature: f32) -> f32 {
    if temperature > 0.0 { temperature.max(MIN_TEMPERATURE) } else { temperature }
}

/// Creates the stage if its parameters have an effect.
fn active_stage(
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
            ActiveStage::Filter("xtc", LlamaSampler::xtc(probability, threshold, keep, seed))
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

/// Changes the logits of the candidates that are among `changes`, which are in order.
fn change<T>(data: &mut [LlamaTokenData], changes: &[(TokenId, T)], change: impl Fn(f32, &T) -> f32) {
    for entry in data {
        if let Ok(at) = changes.binary_search_by_key(&entry.id().0, |change| change.0) {
            entry.set_logit(change(entry.logit(), &changes[at].1));
        }
    }
}

#[cfg(test)]
mod tests;
