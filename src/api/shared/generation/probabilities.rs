//! Formats token probabilities as llama-server does, for its own routes and OpenAI's.

use crate::engine::MeasuredToken;
use crate::events::{Alternative, TokenId, TokenMeasurement};
use crate::model::Vocabulary;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

/// Value for a token without a probability in OpenAI's formats.
pub(crate) const OPENAI_NO_LOGPROB: f32 = -9999.0;

/// A token with its probability and the most probable alternatives.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum TokenProbabilities {
    /// Log-probabilities of the model.
    Model {
        /// Id of the token.
        id: TokenId,
        /// Text of the token.
        token: String,
        /// Bytes of the token.
        bytes: Vec<u8>,
        /// The alternatives, most probable first.
        top_logprobs: Vec<TokenLogprob>,
        /// Natural logarithm of the token's probability.
        logprob: Option<f64>,
    },
    /// Probabilities after the sampling stages.
    Sampled {
        /// Id of the token.
        id: TokenId,
        /// Text of the token.
        token: String,
        /// Bytes of the token.
        bytes: Vec<u8>,
        /// The alternatives that can be sampled, most probable first.
        top_probs: Vec<TokenProbability>,
        /// Probability of the token.
        prob: f64,
    },
}

/// A token with its log-probability.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct TokenLogprob {
    /// Id of the token.
    pub(crate) id: TokenId,
    /// Text of the token.
    pub(crate) token: String,
    /// Bytes of the token.
    pub(crate) bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub(crate) logprob: f64,
}

/// A token with its probability.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct TokenProbability {
    /// Id of the token.
    id: TokenId,
    /// Text of the token.
    token: String,
    /// Bytes of the token.
    bytes: Vec<u8>,
    /// Its probability.
    prob: f64,
}

/// Log-probabilities by text, in order.
#[derive(Debug, Default)]
pub(crate) struct LogprobsByText(Vec<(String, f64)>);

impl LogprobsByText {
    /// Adds an entry. Of several ones for the same text, the most probable is kept.
    pub(crate) fn insert(&mut self, text: String, logprob: f64) {
        match self.0.iter_mut().find(|(known, _)| *known == text) {
            Some((_, known)) => *known = known.max(logprob),
            None => self.0.push((text, logprob)),
        }
    }

    /// Sets the entry of the sampled token, also if another token with the same text is more probable.
    pub(crate) fn set_sampled(&mut self, text: &str, logprob: f64) {
        match self.0.iter_mut().find(|(known, _)| known == text) {
            Some((_, known)) => *known = logprob,
            None => self.0.push((text.to_owned(), logprob)),
        }
    }
}

/// Returns the text of a token; for a part of a character its bytes, as in OpenAI's API: `bytes:\xe4`.
pub(crate) fn text_or_bytes(piece: &[u8]) -> String {
    std::str::from_utf8(piece).map_or_else(|_| format!("bytes:{}", piece.escape_ascii()), str::to_owned)
}

impl Serialize for LogprobsByText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

/// Formatter of token probabilities.
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
    /// Returns the entry of a sampled token with its alternatives, most probable first.
    pub(crate) fn sampled_token(&self, token: &MeasuredToken) -> TokenProbabilities {
        let MeasuredToken { measurement, alternatives, .. } = token;
        self.entry(measurement.token, Some(self.logprob(measurement)), alternatives)
    }

    /// Returns the entry of a token, its log-probability if known, and its alternatives.
    pub(crate) fn entry(&self, token: TokenId, logprob: Option<f32>, others: &[Alternative]) -> TokenProbabilities {
        let (id, bytes, text) = self.parts(token);
        let top = others.iter().take(self.top);
        if self.after_sampler {
            // Tokens that cannot be sampled are not listed.
            let top = top.filter(|other| other.prob > 0.0).map(|other| {
                let (id, bytes, token) = self.parts(other.token);
                TokenProbability { id, token, bytes, prob: other.prob.into() }
            });
            let own = others.iter().find(|other| other.token == token).map_or(1.0, |other| other.prob);
            TokenProbabilities::Sampled { id, token: text, bytes, top_probs: top.collect(), prob: own.into() }
        } else {
            let top_logprobs = self.top_logprobs(others);
            TokenProbabilities::Model { id, token: text, bytes, top_logprobs, logprob: logprob.map(f64::from) }
        }
    }

    /// Returns the log-probability of a sampled token.
    pub(crate) fn logprob(&self, measurement: &TokenMeasurement) -> f32 {
        measurement.logprob.unwrap_or(self.no_logprob)
    }

    /// Returns the alternatives with the model's log-probabilities.
    pub(crate) fn top_logprobs(&self, others: &[Alternative]) -> Vec<TokenLogprob> {
        let entry = |other: &Alternative| {
            let (id, bytes, token) = self.parts(other.token);
            TokenLogprob { id, token, bytes, logprob: self.ln(other.prob).into() }
        };
        others.iter().take(self.top).map(entry).collect()
    }

    /// Returns the logarithm of a probability.
    pub(crate) fn ln(&self, probability: f32) -> f32 {
        if probability > 0.0 { probability.ln() } else { self.no_logprob }
    }

    /// Returns id, bytes and text of a token.
    pub(crate) fn parts(&self, token: TokenId) -> (TokenId, Vec<u8>, String) {
        let bytes = self.vocabulary.piece(token);
        (token, bytes.to_vec(), String::from_utf8_lossy(bytes).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_characters_are_named_by_their_bytes() {
        assert_eq!(text_or_bytes("ä".as_bytes()), "ä");
        assert_eq!(text_or_bytes(&"ä".as_bytes()[..1]), "bytes:\\xc3");
        assert_eq!(text_or_bytes(&"日".as_bytes()[..2]), "bytes:\\xe6\\x97");
    }

    #[test]
    fn most_probable_token_of_a_text_is_kept() {
        let mut top = LogprobsByText::default();
        for (text, logprob) in [("a", -1.0), ("b", -2.0), ("a", -3.0), ("b", -0.5)] {
            top.insert(text.to_owned(), logprob);
        }
        assert_eq!(serde_json::to_string(&top).unwrap(), r#"{"a":-1.0,"b":-0.5}"#);
        top.set_sampled("b", -4.0);
        top.set_sampled("c", -5.0);
        top.insert("b".to_owned(), -6.0);
        assert_eq!(serde_json::to_string(&top).unwrap(), r#"{"a":-1.0,"b":-4.0,"c":-5.0}"#);
    }
}
