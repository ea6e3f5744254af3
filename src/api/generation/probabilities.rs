//! How probable tokens were, as llama-server tells it, on OpenAI's routes as on its own.

use crate::events::{Alternative, TokenId, TokenMeasurement};
use crate::model::Vocabulary;
use serde_json::{Map, Value, json};

/// How probabilities are written.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct Probabilities<'a> {
    pub(in crate::api) vocabulary: &'a Vocabulary,
    /// How many alternatives are told.
    pub(in crate::api) top: usize,
    /// Whether they are probabilities behind the sampler's stages, instead of the logarithms of the model's.
    pub(in crate::api) after_sampler: bool,
    /// What stands for the logarithm of 0: JSON has no infinity.
    pub(in crate::api) no_logprob: f32,
}

impl Probabilities<'_> {
    /// A token that was drawn, and the alternatives to it, the most probable first.
    pub(in crate::api) fn drawn(&self, measure: &TokenMeasurement, others: &[Alternative]) -> Value {
        self.entry(measure.token, Some(measure.logprob.unwrap_or(self.no_logprob)), others)
    }

    /// A token, the logarithm of its probability, where there is one, and the alternatives to it.
    pub(in crate::api) fn entry(&self, token: TokenId, logprob: Option<f32>, others: &[Alternative]) -> Value {
        let mut entry = self.named(token);
        let top = others.iter().take(self.top);
        if self.after_sampler {
            // What cannot be drawn is not told.
            let top = top.filter(|other| other.prob > 0.0).map(|other| self.with(other, "prob", other.prob));
            let own = others.iter().find(|other| other.token == token).map_or(1.0, |other| other.prob);
            entry.insert("top_probs".into(), top.collect());
            entry.insert("prob".into(), own.into());
        } else {
            let top = top.map(|other| self.with(other, "logprob", self.ln(other.prob)));
            entry.insert("top_logprobs".into(), top.collect());
            entry.insert("logprob".into(), json!(logprob));
        }
        Value::Object(entry)
    }

    /// The logarithm of a probability.
    pub(in crate::api) fn ln(&self, probability: f32) -> f32 {
        if probability > 0.0 { probability.ln() } else { self.no_logprob }
    }

    fn with(&self, other: &Alternative, name: &str, value: f32) -> Value {
        let mut entry = self.named(other.token);
        entry.insert(name.into(), value.into());
        Value::Object(entry)
    }

    fn named(&self, token: TokenId) -> Map<String, Value> {
        let bytes = self.vocabulary.piece(token);
        let mut entry = Map::new();
        entry.insert("id".into(), token.into());
        entry.insert("token".into(), String::from_utf8_lossy(bytes).into());
        entry.insert("bytes".into(), json!(bytes));
        entry
    }
}
