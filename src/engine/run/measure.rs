//! Measurements of tokens for the trace and for clients.

use crate::events::{Alternative, TokenId, TokenMeasurement};
use crate::model::distribution::{self, TokenDistribution};
use crate::model::llama::{Candidates, Draw};
use crate::model::{Vocabulary, without_nul};
use std::sync::Arc;

/// Measurer of the tokens of one run.
pub struct TokenMeasurer {
    vocabulary: Arc<Vocabulary>,
    /// Number of most probable tokens to return.
    alternatives: usize,
}

impl TokenMeasurer {
    /// Creates a measurer that returns `alternatives` most probable tokens.
    pub fn new(vocabulary: Arc<Vocabulary>, alternatives: usize) -> Self {
        Self { vocabulary, alternatives }
    }

    /// Measures a token in the distribution of these logits.
    pub fn measure(&self, distribution: TokenDistribution, logits: &[f32], token: TokenId) -> TokenMeasurement {
        let logit = usize::try_from(token).ok().and_then(|index| logits.get(index)).copied();
        TokenMeasurement {
            token,
            text: self.text(token),
            logprob: logit.map(|logit| distribution.logprob(logit)).filter(|logprob| logprob.is_finite()),
            rank: logit.map(|_| distribution::rank(logits, token)),
            entropy: Some(distribution.entropy),
        }
    }

    /// Returns the most probable tokens in the distribution of these logits.
    pub fn top(&self, logits: &[f32], distribution: TokenDistribution) -> Vec<Alternative> {
        distribution::top(logits, self.alternatives)
            .into_iter()
            .map(|(token, logit)| self.alternative(token, distribution.prob(logit)))
            .collect()
    }

    /// Returns the most probable tokens after the sampler, always including the drawn token.
    pub fn after_sampler(&self, candidates: &Candidates, draw: &Draw) -> Vec<Alternative> {
        let mut top = candidates.top(self.alternatives);
        if !top.iter().any(|&(token, _)| token == draw.token) {
            top.push((draw.token, draw.prob));
        }
        top.into_iter().map(|(token, prob)| self.alternative(token, prob)).collect()
    }

    fn alternative(&self, token: TokenId, prob: f32) -> Alternative {
        Alternative { token, text: self.text(token), prob }
    }

    fn text(&self, token: TokenId) -> String {
        without_nul(self.vocabulary.decode(&[token]))
    }
}
