use crate::events::TokenId;
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;

/// What a sampler is made of; the meaning of each number is llama.cpp's.
#[derive(Debug, Clone)]
pub struct SamplerOptions {
    /// Size of the vocabulary.
    pub vocabulary: usize,
    /// 0 = argmax.
    pub temperature: f32,
    /// 0 = all.
    pub top_k: i32,
    /// 1 = off.
    pub top_p: f32,
    /// 0 = off.
    pub min_p: f32,
    /// 1 = off.
    pub repeat_penalty: f32,
    /// Tokens that the penalties look back on.
    pub repeat_last_n: usize,
    /// 0 = off.
    pub presence_penalty: f32,
    /// 0 = off.
    pub frequency_penalty: f32,
    /// Seed of the draw.
    pub seed: u32,
    /// Added to logits before everything else.
    pub logit_bias: Vec<(TokenId, f32)>,
}

/// llama.cpp's sampler chain in its default order, taken apart so that every stage can be seen.
pub struct Sampler {
    bias: Vec<(TokenId, f32)>,
    penalties: Option<LlamaSampler>,
    look_back: usize,
    filters: Vec<(&'static str, LlamaSampler)>,
    temperature: f32,
    scale: Option<LlamaSampler>,
    draw: LlamaSampler,
}

/// The candidates of a draw. One buffer serves all slots of a decode thread.
pub struct Candidates {
    array: LlamaTokenDataArray,
}

impl Default for Candidates {
    fn default() -> Self {
        Self { array: LlamaTokenDataArray::new(Vec::new(), false) }
    }
}

/// A draw. The distribution it was drawn from stays in [`Candidates`].
#[derive(Debug)]
pub struct Draw {
    /// The token.
    pub token: TokenId,
    /// The probability it was drawn with.
    pub prob: f32,
    /// Every stage that was applied, and how many candidates it left.
    pub stages: Vec<(&'static str, u32)>,
}

impl Sampler {
    /// Puts the chain together.
    #[must_use]
    pub fn new(options: &SamplerOptions) -> Self {
        let mut filters = Vec::new();
        if options.top_k > 0 {
            filters.push(("top-k", LlamaSampler::top_k(options.top_k)));
        }
        if options.top_p < 1.0 {
            filters.push(("top-p", LlamaSampler::top_p(options.top_p, 1)));
        }
        if options.min_p > 0.0 {
            filters.push(("min-p", LlamaSampler::min_p(options.min_p, 1)));
        }
        let penalises =
            options.repeat_penalty != 1.0 || options.presence_penalty != 0.0 || options.frequency_penalty != 0.0;
        let penalties = (penalises && options.repeat_last_n > 0).then(|| {
            LlamaSampler::penalties(
                options.vocabulary as i32,
                options.repeat_last_n as i32,
                options.repeat_penalty,
                options.frequency_penalty,
                options.presence_penalty,
            )
        });
        Self {
            bias: options.logit_bias.clone(),
            penalties,
            look_back: options.repeat_last_n,
            filters,
            temperature: options.temperature,
            scale: (options.temperature > 0.0 && options.temperature != 1.0)
                .then(|| LlamaSampler::temp(options.temperature)),
            draw: LlamaSampler::dist(options.seed),
        }
    }

    /// Draws a token; `temperature` replaces the chain's for this one draw. `None` when every token is banned.
    pub fn sample(&mut self, logits: &[f32], temperature: Option<f32>, candidates: &mut Candidates) -> Option<Draw> {
        let array = &mut candidates.array;
        array.data.clear();
        array.data.extend((0..).zip(logits).map(|(id, &logit)| LlamaTokenData::new(LlamaToken::new(id), logit, 0.0)));
        array.sorted = false;
        array.selected = None;
        for &(token, bias) in &self.bias {
            if let Some(entry) = usize::try_from(token).ok().and_then(|index| array.data.get_mut(index)) {
                entry.set_logit(entry.logit() + bias);
            }
        }
        let mut stages = Vec::with_capacity(5);
        if let Some(penalties) = &mut self.penalties {
            penalties.apply(array);
            stages.push(("penalties", array.data.len() as u32));
        }
        if temperature.unwrap_or(self.temperature) <= 0.0 {
            let best = array
                .data
                .iter()
                .copied()
                .reduce(|best, next| if next.logit() > best.logit() { next } else { best })?;
            array.data.clear();
            array.data.push(LlamaTokenData::new(best.id(), best.logit(), 1.0));
            stages.push(("argmax", 1));
            return (best.logit() > f32::NEG_INFINITY).then(|| Draw { token: best.id().0, prob: 1.0, stages });
        }
        for (name, filter) in &mut self.filters {
            filter.apply(array);
            stages.push((name, array.data.len() as u32));
        }
        if !array.data.iter().any(|entry| entry.logit() > f32::NEG_INFINITY) {
            return None;
        }
        let scale = match temperature {
            Some(t) => Some(&mut LlamaSampler::temp(t)),
            None => self.scale.as_mut(),
        };
        if let Some(scale) = scale {
            scale.apply(array);
            stages.push(("temp", array.data.len() as u32));
        }
        self.draw.apply(array);
        let drawn = array.data.get(array.selected?)?;
        Some(Draw { token: drawn.id().0, prob: drawn.p(), stages })
    }

    /// Tells the penalties that a token now stands in the sequence.
    pub fn accept(&mut self, token: TokenId) {
        if let Some(penalties) = &mut self.penalties {
            penalties.accept(LlamaToken::new(token));
        }
    }

    /// Sets the penalties back to what `sequence` means, after its end was removed. The draw goes on where it was.
    pub fn rewind(&mut self, sequence: &[TokenId]) {
        if let Some(penalties) = &mut self.penalties {
            penalties.reset();
            let start = sequence.len().saturating_sub(self.look_back);
            penalties.accept_many(sequence[start..].iter().map(|&token| LlamaToken::new(token)));
        }
    }
}

impl Candidates {
    /// The `count` most probable candidates of the last draw, highest first, with the probability they were drawn with.
    #[must_use]
    pub fn top(&self, count: usize) -> Vec<(TokenId, f32)> {
        let mut top: Vec<(TokenId, f32)> = Vec::with_capacity(count + 1);
        for entry in &self.array.data {
            let prob = entry.p();
            if top.len() == count && top.last().is_some_and(|last| prob <= last.1) {
                continue;
            }
            let at = top.partition_point(|other| other.1 >= prob);
            top.insert(at, (entry.id().0, prob));
            top.truncate(count);
        }
        top
    }
}
