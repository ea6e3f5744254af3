//! The data of one step before its tokens are appended.

use super::MAX_LABEL_CHARS;
use crate::events::{Event, TokenId};
use serde::Deserialize;
use std::sync::Arc;

/// Maximum `Sampled` events that look up their token in the candidates of one `ForwardPass`. A trace of another engine may
/// have any number of both.
const MAX_LOOKUPS: u32 = 16;

/// The state of a step between `ForwardPass` and `Added`.
#[derive(Debug, Clone, Default)]
pub struct StepState {
    /// Flags for the rows that this step will append.
    pub pending: u8,
    /// True after a `ForceTokens` action. Quote accepts one per step.
    pub forced: bool,
    /// Entropy of the model's distribution, in bits.
    entropy: Option<f32>,
    /// The candidates in a trace of another engine.
    candidates: Vec<Candidate>,
    /// Number of lookups in the candidates.
    lookups: u32,
    /// The sampled token and its step.
    drawn: Option<(i32, SampledToken)>,
}

/// A sampled token.
#[derive(Debug, Clone)]
pub struct SampledToken {
    pub token: Option<TokenId>,
    text: Option<Arc<str>>,
    pub logprob: Option<f32>,
    pub rank: Option<u32>,
    pub entropy: Option<f32>,
}

/// An entry of `top_tokens`. A list with an entry in another format is ignored.
#[derive(Debug, Clone, Deserialize)]
struct Candidate {
    token: TokenId,
    #[serde(flatten)]
    probability: CandidateProbability,
}

/// Probability of a candidate.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged)]
enum CandidateProbability {
    /// The format of the `/ingest` specification.
    Probability { prob: f64 },
    /// The format of Quote's traces.
    Logarithm { logprob: f64 },
}

impl CandidateProbability {
    /// Returns a sort key that is larger for more probable candidates of the same list.
    fn order(self) -> f64 {
        let (Self::Probability { prob: order } | Self::Logarithm { logprob: order }) = self;
        order
    }

    fn logprob(self) -> Option<f32> {
        match self {
            Self::Probability { prob } => (prob > 0.0).then(|| prob.ln().min(0.0) as f32),
            Self::Logarithm { logprob } => Some(logprob.min(0.0) as f32),
        }
    }
}

impl StepState {
    /// Creates the state at a `ForwardPass` event.
    pub fn from_forward_pass(event: &Event) -> Self {
        let measured = event.measured.as_ref();
        let top = event.top_tokens.as_ref().filter(|_| measured.is_none_or(|measured| measured.model.is_empty()));
        Self {
            entropy: measured.and_then(|measured| measured.entropy),
            candidates: top.and_then(|top| serde_json::from_str(top.get()).ok()).unwrap_or_default(),
            ..Self::default()
        }
    }

    /// Records a `Sampled` event.
    pub fn record_sampled(&mut self, event: &Event) {
        self.lookups += 1;
        if self.lookups > MAX_LOOKUPS {
            self.candidates.clear();
        }
        let measure = event.measured.as_ref().and_then(|measured| measured.tokens.first());
        let token = event.sampled_token.or_else(|| measure.map(|measure| measure.token));
        let sampled = self.candidates.iter().find(|candidate| Some(candidate.token) == token);
        let candidate = sampled.and_then(|found| Some((found.probability.order(), found.probability.logprob()?)));
        let above =
            |order: f64| self.candidates.iter().filter(|other| other.probability.order() > order).count() as u32;
        let drawn = SampledToken {
            token,
            text: event.token_text.as_deref().or_else(|| measure.map(|measure| measure.text.as_str())).map(Arc::from),
            logprob: measure.and_then(|m| m.logprob).or_else(|| candidate.map(|(_, logprob)| logprob)),
            rank: measure.and_then(|m| m.rank).or_else(|| candidate.map(|(order, _)| 1 + above(order))),
            entropy: measure.and_then(|m| m.entropy).or(self.entropy),
        };
        self.drawn = Some((event.step, drawn));
    }

    /// Returns the token sampled in this step.
    pub fn drawn(&mut self, step: i32) -> Option<&mut SampledToken> {
        self.drawn.as_mut().filter(|(of, _)| *of == step).map(|(_, drawn)| drawn)
    }
}

impl SampledToken {
    /// Returns the text for a row. A long text is returned only once: a small trace of another engine may list the token
    /// without limit.
    pub fn take_text(&mut self) -> Option<Arc<str>> {
        let is_long = self.text.as_ref().is_some_and(|text| text.chars().nth(MAX_LABEL_CHARS).is_some());
        if is_long { self.text.take() } else { self.text.clone() }
    }
}
