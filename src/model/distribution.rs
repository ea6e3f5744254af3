//! Measurements of the distribution of logits: entropy, and probability and rank of tokens. They run for every
//! generated token on the decode thread, and are written so that the compiler vectorizes their loops over the
//! vocabulary.

use crate::events::TokenId;

/// Number of parallel sums and maxima, so that the compiler vectorizes the loops.
const LANES: usize = 16;

/// Logits per block; a search for the highest values skips blocks whose maximum is too low.
pub(in crate::model) const BLOCK: usize = 128;

/// Normalizer and entropy of the softmax of a logit vector.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenDistribution {
    /// ln Σ exp(logit).
    log_sum_exp: f32,
    /// Entropy in bits.
    pub entropy: f32,
    /// True if no logit is NaN or +∞. Otherwise the other fields are meaningless.
    pub is_valid: bool,
}

impl TokenDistribution {
    /// Computes the distribution of a logit vector: H = ln Z − Σ p·(x − max), with Z = Σ exp(x − max), converted from
    /// nats to bits.
    pub fn new(logits: &[f32]) -> Self {
        let max = max_value(logits);
        if max == f32::NEG_INFINITY {
            let is_valid = !logits.iter().any(|logit| logit.is_nan());
            return Self { log_sum_exp: f32::NEG_INFINITY, entropy: 0.0, is_valid };
        }
        let mut sum = [0f32; LANES];
        let mut weighted = [0f32; LANES];
        let mut not_a_number = [0u32; LANES];
        let mut add = |lane: usize, logit: f32| {
            let x = logit - max;
            // ∞ − ∞ is also NaN; `max` below would turn it into a number.
            not_a_number[lane] |= u32::from(x.is_nan());
            let x = x.max(-80.0);
            let e = exp(x);
            sum[lane] += e;
            weighted[lane] += e * x;
        };
        let chunks = logits.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, &logit) in chunk.iter().enumerate() {
                add(lane, logit);
            }
        }
        for (lane, &logit) in rest.iter().enumerate() {
            add(lane, logit);
        }
        let z: f32 = sum.iter().sum();
        let w: f32 = weighted.iter().sum();
        let log_z = z.ln();
        Self {
            log_sum_exp: max + log_z,
            entropy: ((log_z - w / z) / std::f32::consts::LN_2).max(0.0),
            is_valid: not_a_number.iter().all(|&bad| bad == 0),
        }
    }

    /// Returns the natural logarithm of the probability of a token with this logit.
    pub fn logprob(self, logit: f32) -> f32 {
        (logit - self.log_sum_exp).min(0.0)
    }

    /// Returns the probability of a token with this logit.
    pub fn prob(self, logit: f32) -> f32 {
        self.logprob(logit).exp()
    }
}

/// Returns the `count` tokens whose probability differs most between two logit vectors, which are given with their
/// distributions. Each token comes with its difference, the largest first.
pub fn top_shifts(
    before: (TokenDistribution, &[f32]),
    after: (TokenDistribution, &[f32]),
    count: usize,
) -> Vec<(TokenId, f32)> {
    let prob = |distribution: TokenDistribution, logit: f32| exp((logit - distribution.log_sum_exp).clamp(-80.0, 0.0));
    let mut top = TopEntries::new(count);
    for (block, (old, new)) in before.1.chunks(BLOCK).zip(after.1.chunks(BLOCK)).enumerate() {
        // No difference in the block exceeds its highest probability, before or after; `exp` is approximate.
        let bound = prob(before.0, max_value(old)).max(prob(after.0, max_value(new))) * 1.001;
        if bound <= top.threshold {
            continue;
        }
        for (index, (&old, &new)) in old.iter().zip(new).enumerate() {
            top.offer(block * BLOCK + index, (prob(before.0, old) - prob(after.0, new)).abs());
        }
    }
    top.entries
}

/// The highest of the offered values, in descending order; of equal values, the one offered first comes first.
struct TopEntries {
    entries: Vec<(TokenId, f32)>,
    count: usize,
    /// Value that a new entry must exceed.
    threshold: f32,
}

impl TopEntries {
    fn new(count: usize) -> Self {
        let threshold = if count == 0 { f32::INFINITY } else { f32::NEG_INFINITY };
        Self { entries: Vec::with_capacity(count + 1), count, threshold }
    }

    fn offer(&mut self, index: usize, value: f32) {
        if value > self.threshold {
            let at = self.entries.partition_point(|other| other.1 >= value);
            self.entries.insert(at, (index as TokenId, value));
            self.entries.truncate(self.count);
            if self.entries.len() == self.count {
                self.threshold = self.entries[self.count - 1].1;
            }
        }
    }
}

/// Computes e^x = 2^n · 2^f for −80 ≤ x ≤ 0 with a relative error below 4e-6: 2^n from the exponent bits, 2^f from a
/// polynomial on [−½, ½].
#[inline(always)]
fn exp(x: f32) -> f32 {
    // 1.5 × 2^23: floats of this size have no fraction bits, so adding it rounds to an integer, which is then in the
    // low bits. `floor` and `round` would call libm on baseline x86-64, which prevents vectorization.
    const ROUND: f32 = 12_582_912.0;
    let t = x * std::f32::consts::LOG2_E;
    let rounded = t + ROUND;
    let f = (t - (rounded - ROUND)) * std::f32::consts::LN_2;
    let p = 1.0 + f * (1.0 + f * (0.5 + f * (1.0 / 6.0 + f * (1.0 / 24.0 + f * (1.0 / 120.0)))));
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits());
    p * f32::from_bits(n.wrapping_add(127) << 23)
}

/// Returns the highest value, ignoring NaN; negative infinity if there is none.
#[inline]
pub(in crate::model) fn max_value(values: &[f32]) -> f32 {
    let mut max = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (max, &value) in max.iter_mut().zip(chunk) {
            *max = if value > *max { value } else { *max };
        }
    }
    max.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &value| if value > max { value } else { max })
}

/// Returns the rank of a token, 1 for the most probable; of equal logits, the lower id comes first. Returns 0 for an
/// unknown token.
pub fn rank(logits: &[f32], token: TokenId) -> u32 {
    let Some((index, &own)) = usize::try_from(token).ok().and_then(|index| Some((index, logits.get(index)?))) else {
        return 0;
    };
    let higher: u32 = logits.iter().map(|&logit| u32::from(logit > own)).sum();
    let equal_before: u32 = logits[..index].iter().map(|&logit| u32::from(logit == own)).sum();
    1 + higher + equal_before
}

/// Returns the `count` highest logits in descending order; of equal logits, the lower id comes first.
pub fn top(logits: &[f32], count: usize) -> Vec<(TokenId, f32)> {
    let mut top = TopEntries::new(count);
    for (block, values) in logits.chunks(BLOCK).enumerate() {
        if max_value(values) > top.threshold {
            values.iter().enumerate().for_each(|(index, &logit)| top.offer(block * BLOCK + index, logit));
        }
    }
    top.entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn distribution_matches_f64_softmax(logits in proptest::collection::vec(-30f32..30.0, 1..300), pick: prop::sample::Index) {
            let exact: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
            let max = exact.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let z: f64 = exact.iter().map(|x| (x - max).exp()).sum();
            let entropy: f64 = exact.iter().map(|x| { let p = (x - max).exp() / z; if p > 0.0 { -p * p.log2() } else { 0.0 } }).sum();
            let measured = TokenDistribution::new(&logits);
            prop_assert!((f64::from(measured.entropy) - entropy).abs() < 1e-3, "{} {}", measured.entropy, entropy);
            let index = pick.index(logits.len());
            prop_assert!((f64::from(measured.logprob(logits[index])) - (exact[index] - max - z.ln())).abs() < 1e-3);
            let mut sorted: Vec<usize> = (0..logits.len()).collect();
            sorted.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            prop_assert_eq!(rank(&logits, index as TokenId) as usize, sorted.iter().position(|&i| i == index).unwrap() + 1);
            let ids: Vec<usize> = top(&logits, 10).iter().map(|&(id, _)| id as usize).collect();
            prop_assert_eq!(ids, sorted.into_iter().take(10).collect::<Vec<_>>());
        }
    }

    proptest! {
        #[test]
        fn top_shifts_match_f64_softmax(pairs in proptest::collection::vec((-9f32..9.0, -9f32..9.0), 1..700)) {
            let (before, after): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let probs = |logits: &[f32]| -> Vec<f64> {
                let z: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
                logits.iter().map(|&x| f64::from(x).exp() / z).collect()
            };
            let shifts: Vec<f64> = probs(&before).iter().zip(probs(&after)).map(|(old, new)| (old - new).abs()).collect();
            let mut sorted = shifts.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let (old, new) = (TokenDistribution::new(&before), TokenDistribution::new(&after));
            let found = top_shifts((old, &before), (new, &after), 8);
            prop_assert_eq!(found.len(), sorted.len().min(8));
            for (&(token, shift), exact) in found.iter().zip(sorted) {
                prop_assert!((f64::from(shift) - exact).abs() < 1e-5);
                prop_assert!((shifts[token as usize] - exact).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn entropy_matches_known_distributions() {
        let uniform = TokenDistribution::new(&[3.0; 16]);
        assert!((uniform.entropy - 4.0).abs() < 1e-4 && (uniform.prob(3.0) - 1.0 / 16.0).abs() < 1e-6);
        let certain = TokenDistribution::new(&[f32::NEG_INFINITY, 1000.0, f32::NEG_INFINITY]);
        assert!(certain.entropy.abs() < 1e-6);
        assert!(top(&[f32::NEG_INFINITY; 3], 2).is_empty());
    }

    #[test]
    fn distribution_reports_invalid_logits() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 5, 40] {
                let mut logits = vec![0.5; 41];
                assert!(TokenDistribution::new(&logits).is_valid);
                logits[at] = bad;
                assert!(!TokenDistribution::new(&logits).is_valid, "{bad} at {at}");
            }
        }
        assert!(TokenDistribution::new(&[f32::NEG_INFINITY, 1.0]).is_valid);
        assert!(!TokenDistribution::new(&[f32::NEG_INFINITY, f32::NAN]).is_valid);
    }

    #[test]
    fn banned_tokens_have_no_probability() {
        let measured = TokenDistribution::new(&[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY]);
        assert!(measured.logprob(0.0).abs() < 1e-6);
        assert_eq!(top(&[f32::NEG_INFINITY, 0.0], 5), [(1, 0.0)]);
    }
}
