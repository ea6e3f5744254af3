//! Penalties on what was said before. They are worked out from the sequence as it stands, so that they mean the same after
//! a mod took tokens away as if those had never been.

use super::sampling::Sampling;
use crate::events::TokenId;
use crate::model::Vocabulary;
use std::collections::HashMap;
use std::sync::Arc;

/// Repetition, presence and frequency penalties.
#[derive(Debug)]
pub(super) struct Penalties {
    repeat: f32,
    presence: f32,
    frequency: f32,
    last_n: i32,
}

impl Penalties {
    /// `None` when they are off.
    pub(super) fn new(sampling: &Sampling) -> Option<Self> {
        let Sampling { repeat_penalty, presence_penalty, frequency_penalty, repeat_last_n, .. } = *sampling;
        let on = repeat_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0;
        (on && repeat_last_n != 0).then_some(Self {
            repeat: repeat_penalty,
            presence: presence_penalty,
            frequency: frequency_penalty,
            last_n: repeat_last_n,
        })
    }

    /// The tokens that are penalised, in order, with how often they were there.
    pub(super) fn counts(&self, sequence: &[TokenId]) -> Vec<(TokenId, u32)> {
        let mut recent = window(sequence, self.last_n).to_vec();
        recent.sort_unstable();
        recent.chunk_by(|a, b| a == b).map(|same| (same[0], same.len() as u32)).collect()
    }

    /// As llama.cpp has it: dividing a negative logit would make the token more probable.
    pub(super) fn change(&self, logit: f32, count: u32) -> f32 {
        let logit = if logit <= 0.0 { logit * self.repeat } else { logit / self.repeat };
        logit - (count as f32 * self.frequency + self.presence)
    }
}

/// DRY: a penalty on tokens that would continue a sequence that was there before, growing with its length.
#[derive(Debug)]
pub(super) struct Dry {
    multiplier: f32,
    base: f32,
    allowed_length: i32,
    last_n: i32,
    breakers: Arc<Breakers>,
}

/// Longest breaker, in bytes, and most tokens of its end that are compared; llama.cpp's.
const LONGEST_BREAKER: usize = 40;
const LONGEST_TAIL: usize = 20;

/// Texts that repetitions do not reach across, as tokens: for each token that such a text begins in, what must follow it.
#[derive(Debug, Default)]
pub(in crate::model) struct Breakers(HashMap<TokenId, Vec<Vec<TokenId>>>);

impl Breakers {
    pub(in crate::model) fn of(vocabulary: &Vocabulary, texts: &[String]) -> Self {
        let mut heads: HashMap<TokenId, Vec<Vec<TokenId>>> = HashMap::new();
        for text in texts {
            let text = &text.as_bytes()[..text.len().min(LONGEST_BREAKER)];
            let Some(&first) = text.first() else { continue };
            let mut tails: HashMap<usize, Vec<TokenId>> = HashMap::new();
            for token in 0..vocabulary.len() as TokenId {
                let piece = vocabulary.piece(token);
                if piece.windows(text.len()).any(|window| window == text) {
                    heads.entry(token).or_default().push(Vec::new());
                    continue;
                }
                for at in piece.iter().enumerate().filter(|(_, byte)| **byte == first).map(|(at, _)| at) {
                    let within = piece.len() - at;
                    if within < text.len() && piece[at..] == text[..within] {
                        let tail = tails.entry(within).or_insert_with(|| {
                            let mut tail = vocabulary.encode(&String::from_utf8_lossy(&text[within..]), false, false);
                            tail.truncate(LONGEST_TAIL);
                            tail
                        });
                        let known = heads.entry(token).or_default();
                        if !known.contains(tail) {
                            known.push(tail.clone());
                        }
                    }
                }
            }
        }
        Self(heads)
    }

    fn is_single(&self, token: TokenId) -> bool {
        self.0.get(&token).is_some_and(|tails| tails.iter().any(Vec::is_empty))
    }
}

impl Dry {
    /// `None` when it is off.
    pub(super) fn new(sampling: &Sampling, vocabulary: &Vocabulary) -> Option<Self> {
        let on = sampling.dry_multiplier != 0.0 && sampling.dry_base >= 1.0 && sampling.dry_penalty_last_n != 0;
        on.then(|| Self {
            multiplier: sampling.dry_multiplier,
            base: sampling.dry_base,
            allowed_length: sampling.dry_allowed_length,
            last_n: sampling.dry_penalty_last_n,
            breakers: vocabulary.breakers(&sampling.dry_sequence_breakers),
        })
    }

    /// The tokens that are penalised, in order, with what is taken off their logits.
    pub(super) fn penalties(&self, sequence: &[TokenId]) -> Vec<(TokenId, f32)> {
        let recent = window(sequence, self.last_n);
        let allowed = usize::try_from(self.allowed_length).unwrap_or(0);
        if recent.len() <= allowed {
            return Vec::new();
        }
        let limit = self.limit(recent);
        if limit < allowed {
            return Vec::new();
        }
        let mut longest: HashMap<TokenId, usize> = HashMap::new();
        for (back, length) in repeats(recent).into_iter().enumerate().skip(1) {
            let length = length.min(limit);
            if length >= allowed {
                // What came behind the earlier occurrence.
                let next = recent[recent.len() - back];
                let known = longest.entry(next).or_default();
                *known = length.max(*known);
            }
        }
        let most = if self.base > 1.000_001 { (f32::MAX.ln() / self.base.ln()) as i32 } else { 0 };
        let mut penalties: Vec<(TokenId, f32)> = longest
            .into_iter()
            .filter(|&(token, _)| !self.breakers.is_single(token))
            .map(|(token, length)| {
                let over = (length - allowed) as i32;
                let over = if most > 0 { over.min(most) } else { over };
                (token, (f64::from(self.multiplier) * f64::from(self.base).powi(over)) as f32)
            })
            .collect();
        penalties.sort_unstable_by_key(|penalty| penalty.0);
        penalties
    }

    /// How far back a repetition may reach before it meets a breaker.
    fn limit(&self, recent: &[TokenId]) -> usize {
        for (back, token) in recent.iter().rev().enumerate() {
            let Some(tails) = self.breakers.0.get(token) else { continue };
            let after = &recent[recent.len() - back..];
            let longest = tails.iter().filter(|tail| after.starts_with(tail)).map(Vec::len).max();
            if let Some(longest) = longest {
                return back - longest;
            }
        }
        recent.len()
    }
}

fn window(sequence: &[TokenId], last_n: i32) -> &[TokenId] {
    let keep = usize::try_from(last_n).unwrap_or(sequence.len()).min(sequence.len());
    &sequence[sequence.len() - keep..]
}

/// For every number of tokens to go back: how long the sequence's end is repeated there. The Z-algorithm, backwards.
fn repeats(sequence: &[TokenId]) -> Vec<usize> {
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
        fn repeats_are_those_of_plain_comparison(sequence in proptest::collection::vec(0i32..3, 0..40)) {
            let plain = |back: usize| (0..sequence.len() - back)
                .take_while(|&i| sequence[sequence.len() - 1 - i] == sequence[sequence.len() - 1 - back - i])
                .count();
            for (back, length) in repeats(&sequence).into_iter().enumerate().skip(1) {
                prop_assert_eq!(length, plain(back));
            }
        }
    }
}
