//! Formats token probabilities as llama-server does, for its own routes and OpenAI's.

use crate::events::{Alternative, TokenId, TokenMeasurement};
use crate::model::Vocabulary;
use serde_json::{Map, Value, json};

/// Formats token probabilities.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProbabilityFormatter<'a> {
    pub(crate) vocabulary: &'a Vocabulary,
    /// Maximum number of alternatives to report.
    pub(crate) top: usize,
    /// Report probabilities after the sampling stages instead of the model's log-probabilities.
    pub(crate) after_sampler: bool,
    /// Value reported for the logarithm of 0, because JSON has no infinity.
    pub(crate) no_logprob: f32,
}

impl ProbabilityFormatter<'_> {
    /// Returns the entry of a drawn token with its alternatives, most probable first.
    pub(crate) fn drawn_token(&self, measure: &TokenMeasurement, others: &[Alternative]) -> Value {
        self.entry(measure.token, Some(measure.logprob.unwrap_or(self.no_logprob)), others)
    }

    /// Returns the entry of a token, its log-probability if known, and its alternatives.
    pub(crate) fn entry(&self, token: TokenId, logprob: Option<f32>, others: &[Alternative]) -> Value {
        let mut entry = self.named(token);
        let top = others.iter().take(self.top);
        if self.after_sampler {
            // Tokens that cannot be drawn are not listed.
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

    /// Returns the logarithm of a probability.
    pub(crate) fn ln(&self, probability: f32) -> f32 {
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
