//! Repetition penalties. They are computed from the current sequence, so that backtracked tokens have no effect.

use super::params::SamplingParams;
use super::recent::{RecentCounts, window};
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::model::vocabulary::breakers::{Breakers, MAX_TAIL};
use std::collections::HashMap;
use std::sync::Arc;

/// Repetition, presence and frequency penalties.
#[derive(Debug)]
pub(super) struct Penalties {
    /// Counts of the penalized tokens.
    pub recent: RecentCounts,
    pub strength: Strength,
}

/// Strengths of the penalties.
#[derive(Debug)]
pub(super) struct Strength {
    repeat: f32,
    presence: f32,
    frequency: f32,
}

impl Penalties {
    /// Creates the penalties; `None` if they are off.
    pub(super) fn new(sampling: &SamplingParams) -> Option<Self> {
        let SamplingParams { repeat_penalty, presence_penalty, frequency_penalty, repeat_last_n, .. } = *sampling;
        let is_on = repeat_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0;
        (is_on && repeat_last_n != 0).then(|| Self {
            recent: RecentCounts::new(repeat_last_n),
            strength: Strength { repeat: repeat_penalty, presence: presence_penalty, frequency: frequency_penalty },
        })
    }
}

impl Strength {
    /// Applies the penalties to a logit like llama.cpp: dividing a negative logit would make the token more probable.
    pub(super) fn change(&self, logit: f32, count: u32) -> f32 {
        let logit = if logit <= 0.0 { logit * self.repeat } else { logit / self.repeat };
        logit - (count as f32 * self.frequency + self.presence)
    }
}

/// DRY: a penalty on tokens that would continue a repeated sequence. It grows with the length of the repetition.
#[derive(Debug)]
pub(super) struct Dry {
    multiplier: f32,
    base: f32,
    allowed_length: i32,
    last_n: i32,
    breakers: Arc<Breakers>,
}

/// Number of last tokens that are searched for a breaker first; more are searched only if a repetition is this long.
const NEAR: usize = 1024;
/// Number of tokens per block. A block without the last token is skipped.
const BLOCK: usize = 64;

impl Dry {
    /// Creates the penalty; `None` if it is off.
    pub(super) fn new(sampling: &SamplingParams, vocabulary: &Vocabulary) -> Option<Self> {
        let is_on = sampling.dry_multiplier != 0.0 && sampling.dry_base >= 1.0 && sampling.dry_penalty_last_n != 0;
        is_on.then(|| Self {
            multiplier: sampling.dry_multiplier,
            base: sampling.dry_base,
            allowed_length: sampling.dry_allowed_length,
            last_n: sampling.dry_penalty_last_n,
            breakers: vocabulary.breakers(&sampling.dry_sequence_breakers),
        })
    }

    /// Returns the penalized tokens, in order, with their penalties.
    pub(super) fn penalties(&self, sequence: &[TokenId]) -> Vec<(TokenId, f32)> {
        self.penalties_with(sequence, NEAR)
    }

    fn penalties_with(&self, sequence: &[TokenId], near: usize) -> Vec<(TokenId, f32)> {
        let recent = window(sequence, self.last_n);
        let allowed = usize::try_from(self.allowed_length).unwrap_or(0);
        if recent.len() <= allowed {
            return Vec::new();
        }
        let near_limit = self.breaker_distance(recent, near);
        let bound = near_limit.unwrap_or(recent.len());
        if bound < allowed {
            return Vec::new();
        }
        let mut repetitions = repetitions(recent, allowed, bound);
        let reaches_far = repetitions.iter().any(|&(_, length)| length + MAX_TAIL > near);
        if let (None, true) = (near_limit, reaches_far)
            && let Some(breaker_distance) = self.breaker_distance(recent, recent.len())
        {
            repetitions.iter_mut().for_each(|repetition| repetition.1 = repetition.1.min(breaker_distance));
        }
        let mut longest: HashMap<TokenId, usize> = HashMap::new();
        for (back, length) in repetitions.into_iter().filter(|&(_, length)| length >= allowed) {
            // The token after the earlier occurrence.
            let next = recent[recent.len() - back];
            let known = longest.entry(next).or_default();
            *known = length.max(*known);
        }
        let max_exponent = if self.base > 1.000_001 { (f32::MAX.ln() / self.base.ln()) as i32 } else { 0 };
        let mut penalties: Vec<(TokenId, f32)> = longest
            .into_iter()
            .filter(|&(token, _)| !self.breakers.has_whole_breaker(token))
            .map(|(token, length)| {
                let over = (length - allowed) as i32;
                let over = if max_exponent > 0 { over.min(max_exponent) } else { over };
                (token, (f64::from(self.multiplier) * f64::from(self.base).powi(over)) as f32)
            })
            .collect();
        penalties.sort_unstable_by_key(|penalty| penalty.0);
        penalties
    }

    /// Returns the distance to the nearest breaker; `None` if the last `near` tokens contain no breaker.
    fn breaker_distance(&self, recent: &[TokenId], near: usize) -> Option<usize> {
        recent.iter().rev().take(near).enumerate().find_map(|(back, token)| {
            let tails = self.breakers.0.get(token)?;
            let after = &recent[recent.len() - back..];
            let longest = tails.iter().filter(|tail| after.starts_with(tail)).map(Vec::len).max()?;
            Some(back - longest)
        })
    }
}

/// Finds earlier occurrences of the sequence's end. Returns the distance and the length of each, up to `bound` tokens.
/// Repetitions shorter than `min` tokens may be missing.
fn repetitions(sequence: &[TokenId], min: usize, bound: usize) -> Vec<(usize, usize)> {
    let with_z_algorithm =
        || repetition_lengths(sequence).into_iter().enumerate().skip(1).map(|(back, length)| (back, length.min(bound)));
    let Some((&end, before)) = sequence.split_last() else { return Vec::new() };
    if min == 0 {
        return with_z_algorithm().collect();
    }
    let mut found = Vec::new();
    let mut compared = 0;
    for (block, tokens) in before.chunks(BLOCK).enumerate() {
        // Without a branch per token the compiler vectorizes this loop.
        if tokens.iter().fold(0, |there, &token| there | u8::from(token == end)) == 0 {
            continue;
        }
        for at in (block * BLOCK..).zip(tokens).filter(|(_, token)| **token == end).map(|(at, _)| at) {
            let same = sequence[..=at].iter().rev().zip(sequence.iter().rev()).take(bound);
            let length = same.take_while(|(a, b)| a == b).count();
            compared += length;
            if compared > sequence.len() / 2 {
                // The sequence mostly repeats itself: the Z-algorithm needs fewer comparisons.
                return with_z_algorithm().collect();
            }
            found.push((before.len() - at, length));
        }
    }
    found
}

/// Returns, for every distance from the end, the length of the repetition that ends there. Uses the Z-algorithm on the
/// reversed sequence.
fn repetition_lengths(sequence: &[TokenId]) -> Vec<usize> {
    let count = sequence.len();
    let at = |back: usize| sequence[count - 1 - back];
    let mut lengths = vec![0; count];
    let (mut left, mut right) = (0, 0);
    for back in 1..count {
        let mut length = if back < right { lengths[back - left].min(right - back) } else { 0 };
        while back + length < count && at(length) == at(back + length) {
            length += 1;
        }
        if back + length > right {
            (left, right) = (back, back + length);
        }
        lengths[back] = length;
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn repeats_equal_plain_comparison(sequence in proptest::collection::vec(0i32..3, 0..40)) {
            let plain = |back: usize| (0..sequence.len() - back)
                .take_while(|&i| sequence[sequence.len() - 1 - i] == sequence[sequence.len() - 1 - back - i])
                .count();
            for (back, length) in repetition_lengths(&sequence).into_iter().enumerate().skip(1) {
                prop_assert_eq!(length, plain(back));
            }
        }

        #[test]
        fn block_search_finds_all_repetitions(
            sequence in prop_oneof![
                proptest::collection::vec(0i32..3, 0..90),
                proptest::collection::vec(0i32..12, 0..300),
                proptest::collection::vec(Just(7i32), 0..90),
            ],
            last_n in prop_oneof![Just(-1), 1..80i32],
            allowed_length in 0i32..6,
            breakers: bool,
            near in prop_oneof![Just(NEAR), 1usize..30],
        ) {
            let heads = if breakers { HashMap::from([(2, vec![vec![]]), (5, vec![vec![1], vec![1, 0]])]) } else { HashMap::new() };
            let breakers = Arc::new(Breakers(heads));
            let dry = Dry { multiplier: 0.5, base: 1.5, allowed_length, last_n, breakers };
            let recent = window(&sequence, last_n);
            let allowed = allowed_length as usize;
            let breaker_distance = dry.breaker_distance(recent, recent.len()).unwrap_or(recent.len());
            let mut plain: std::collections::BTreeMap<TokenId, usize> = std::collections::BTreeMap::new();
            let long_enough = |back: &usize| recent.len() > allowed && repetition_lengths(recent)[*back].min(breaker_distance) >= allowed;
            for back in (1..recent.len()).filter(long_enough) {
                let token = recent[recent.len() - back];
                if !dry.breakers.has_whole_breaker(token) {
                    let known = plain.entry(token).or_default();
                    *known = repetition_lengths(recent)[back].min(breaker_distance).max(*known);
                }
            }
            let plain: Vec<_> = plain
                .into_iter()
                .map(|(token, length)| (token, (0.5 * 1.5f64.powi((length - allowed).min(218) as i32)) as f32))
                .collect();
            prop_assert_eq!(dry.penalties_with(&sequence, near), plain);
        }
    }
}
