//! Distribution of logits: probabilities and entropy, in two passes over the vocabulary.

use crate::events::TokenId;

/// Softmax distribution of logits.
pub struct LogitDistribution {
    max: f32,
    /// Σ exp(l − max).
    sum: f64,
    /// Σ exp(l − max) · (l − max).
    weighted: f64,
}

impl LogitDistribution {
    /// Computes the distribution. `logits` has one entry per token, −inf for banned tokens. Returns `None` if
    /// every token is banned.
    pub fn new(logits: &[f32]) -> Option<Self> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !max.is_finite() {
            return None;
        }
        let (mut sum, mut weighted) = (0.0_f64, 0.0_f64);
        for &logit in logits {
            let distance = logit - max;
            let weight = distance.exp();
            // −inf · 0 is NaN, so banned tokens are skipped.
            if weight > 0.0 {
                sum += f64::from(weight);
                weighted += f64::from(weight * distance);
            }
        }
        Some(Self { max, sum, weighted })
    }

    /// Returns the entropy in bits.
    pub fn entropy(&self) -> f32 {
        ((self.sum.ln() - self.weighted / self.sum) / std::f64::consts::LN_2).max(0.0) as f32
    }

    /// Returns the probability of a token with this logit, 0 … 1.
    pub fn probability(&self, logit: f32) -> f32 {
        (f64::from(logit - self.max).exp() / self.sum) as f32
    }
}

/// Returns the tokens with the `count` highest logits, highest first; of equal logits the lower id first.
pub fn top(logits: &[f32], count: usize) -> Vec<(TokenId, f32)> {
    let mut best: Vec<(TokenId, f32)> = Vec::with_capacity(count + 1);
    for (token, &logit) in logits.iter().enumerate() {
        if best.len() == count && best.last().is_none_or(|(_, lowest)| logit <= *lowest) {
            continue;
        }
        let index = best.partition_point(|(_, other)| *other >= logit);
        best.insert(index, (TokenId::try_from(token).unwrap_or(TokenId::MAX), logit));
        best.truncate(count);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::{LogitDistribution, top};

    #[test]
    fn entropy_matches_known_distributions() {
        let uniform = LogitDistribution::new(&[3.0; 16]).unwrap();
        assert!((uniform.entropy() - 4.0).abs() < 1e-5);
        assert!((uniform.probability(3.0) - 1.0 / 16.0).abs() < 1e-7);
        let certain = LogitDistribution::new(&[f32::NEG_INFINITY, 1000.0, f32::NEG_INFINITY]).unwrap();
        assert!(certain.entropy().abs() < 1e-6);
        assert!(LogitDistribution::new(&[f32::NEG_INFINITY; 3]).is_none());
    }

    #[test]
    fn top_is_sorted_and_stable() {
        assert_eq!(top(&[1.0, 5.0, 3.0, 5.0, -1.0], 3), [(1, 5.0), (3, 5.0), (2, 3.0)]);
        assert_eq!(top(&[1.0], 3), [(0, 1.0)]);
    }
}
