//! llama.cpp's sampler chain, split into stages that can be observed separately. Each stage scans only the necessary
//! part of the vocabulary.
//!
//! Filters and the final draw are llama.cpp's own, so the same seed samples the same tokens. Biases, penalties and DRY
//! change few logits and are stored as a short list of edits; the first top-k selects from the logits directly. State
//! of earlier draws is computed from the sequence, or can be rewound when tokens are removed.

mod active_stage;
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
use active_stage::{ActiveStage, active_stage, bounded_temperature};
use adaptive::Adaptive;
use candidates::{EditedLogits, LogitsView};
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;
use std::sync::Arc;

/// Maximum top-k that is selected from the logits directly; llama.cpp's own selection is faster for larger values.
const MAX_PARTIAL_SORT: i32 = 256;

/// Value that is added to the logit of a token to avoid it: the token is only sampled if no other token can be.
pub const AVOIDED_TOKEN_BIAS: f32 = -100_000.0;
/// Logit below which a token is avoided.
const MIN_LOGIT: f32 = AVOIDED_TOKEN_BIAS / 10.0;

/// The sampler of one run.
pub struct Sampler {
    bias: Vec<(TokenId, f32)>,
    /// Penalties that precede all other stages. They are applied to the logits, because they remove no candidates.
    penalties: Vec<ActiveStage>,
    /// Number of candidates that are selected from the logits directly, if the next stage is top-k.
    top_k: Option<usize>,
    /// The other stages, which are applied to the candidates.
    chain: Vec<ActiveStage>,
    /// True if the sampler always selects the highest logit: its temperature is 0 and no stage can remove that logit.
    greedy: bool,
    adaptive: Option<Adaptive>,
    draw: LlamaSampler,
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
    pub stages: Vec<CandidateCount>,
}

/// Name of a stage, and the number of candidates left after it.
type CandidateCount = (&'static str, u32);

impl Sampler {
    /// Builds the chain. Takes milliseconds if DRY is on with new breakers.
    #[must_use]
    pub fn new(sampling: &SamplingParams, vocabulary: &Arc<Vocabulary>) -> Self {
        // llama.cpp interprets this seed as "random", so the run could not be repeated.
        let seed = if sampling.seed == u32::MAX { u32::MAX - 1 } else { sampling.seed };
        let adaptive = Adaptive::new(sampling, vocabulary.len());
        let mut stages: Vec<ActiveStage> = if adaptive.as_ref().is_some_and(Adaptive::is_mirostat) {
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
        let mut chain = stages.split_off(stages.iter().take_while(|stage| stage.is_penalty()).count());
        let penalties = stages;
        let top_k = match chain.first() {
            Some(ActiveStage::TopK(count, _)) if *count <= MAX_PARTIAL_SORT => Some(*count as usize),
            _ => None,
        };
        chain.drain(..usize::from(top_k.is_some()));
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
        // A filter may remove the token that a later penalty would make the highest.
        let penalizes_late = chain.iter().any(ActiveStage::is_penalty);
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
            penalties,
            top_k,
            chain,
            adaptive,
            draw: LlamaSampler::dist(seed),
        }
    }

    /// Samples a token. Returns `None` if every token is banned.
    pub fn sample(&mut self, input: &SamplerInput<'_>, candidates: &mut Candidates) -> Option<Draw> {
        let Candidates { array, edits } = candidates;
        let mut stages = Vec::with_capacity(6);
        self.edit_logits(input, edits, &mut stages);
        let view = LogitsView { logits: input.logits, allowed: input.allowed, edits };
        array.sorted = false;
        array.selected = None;
        if input.temperature.map_or(self.greedy, |temperature| temperature <= 0.0) {
            view.highest(1, &mut array.data);
            let best = array.data.first_mut()?;
            best.set_p(1.0);
            stages.push(("argmax", 1));
            return Some(Draw { token: best.id().0, prob: 1.0, stages });
        }
        self.select_candidates(view, array, &mut stages);
        for stage in &mut self.chain {
            if array.data.is_empty() {
                return None;
            }
            if let Some(name) = stage.apply(input, view, array) {
                stages.push((name, array.data.len() as u32));
            }
        }
        if array.data.is_empty() {
            return None;
        }
        let has_temperature = self.chain.iter().any(|stage| matches!(stage, ActiveStage::Temperature(_)));
        if let (Some(temperature), false) = (input.temperature, has_temperature) {
            LlamaSampler::temp(bounded_temperature(temperature)).apply(array);
            stages.push(("temp", array.data.len() as u32));
        }
        if let Some(adaptive) = &mut self.adaptive {
            adaptive.apply(array);
            stages.push((adaptive.name(), array.data.len() as u32));
        }
        let (token, prob) = self.draw_candidate(array)?;
        Some(Draw { token, prob, stages })
    }

    /// Collects the logits that the biases and the first penalties change. Appends the applied stages to `stages`.
    fn edit_logits(
        &mut self,
        input: &SamplerInput<'_>,
        edits: &mut Vec<(TokenId, f32)>,
        stages: &mut Vec<CandidateCount>,
    ) {
        let SamplerInput { logits, allowed, sequence, .. } = *input;
        edits.clear();
        let mut edited = EditedLogits { logits, edits };
        edited.add_biases(&self.bias);
        if let Some(words) = allowed {
            stages.push(("grammar", words.iter().map(|word| word.count_ones()).sum()));
        }
        for stage in &mut self.penalties {
            if let Some(name) = stage.penalize(sequence, &mut edited) {
                stages.push((name, LogitsView { logits, allowed, edits: edited.edits }.count()));
            }
        }
    }

    /// Selects the candidates for the chain. Appends the applied stages to `stages`.
    fn select_candidates(
        &self,
        view: LogitsView<'_>,
        array: &mut LlamaTokenDataArray,
        stages: &mut Vec<CandidateCount>,
    ) {
        if let Some(count) = self.top_k {
            view.highest(count, &mut array.data);
            array.sorted = true;
            stages.push(("top-k", array.data.len() as u32));
        } else {
            view.all(&mut array.data);
        }
        // Some filters count the logits of avoided tokens, and adaptive-p would draw the tokens.
        let is_avoided = |entry: &LlamaTokenData| is_avoided(entry.logit());
        if array.data.iter().any(is_avoided) && !array.data.iter().all(is_avoided) {
            array.data.retain(|entry| !is_avoided(entry));
            stages.push(("avoided", array.data.len() as u32));
        }
    }

    /// Draws one of the candidates. Returns the token and its probability.
    fn draw_candidate(&mut self, array: &mut LlamaTokenDataArray) -> Option<(TokenId, f32)> {
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
        Some((token, prob))
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

/// Returns true for the logit of a token that is only sampled if no other token can be.
fn is_avoided(logit: f32) -> bool {
    logit < MIN_LOGIT
}

#[cfg(test)]
mod tests;
