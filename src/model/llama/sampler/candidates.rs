//! Candidates for a draw, selected from the logits with as few passes over the vocabulary as possible.

use super::is_avoided;
use crate::events::TokenId;
use crate::model::distribution::{BLOCK, max_value};
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;

/// Maximum absolute value of a candidate's logit. A mod or a bias can make logits so large that the temperature would
/// divide them to infinity, for which the probabilities are NaN.
const MAX_LOGIT: f32 = 1e30;
/// Bits in a word of the mask.
const WORD: usize = 32;

const _: () = assert!(BLOCK == u128::BITS as usize, "the mask of a block must be a u128");

/// The candidates of a draw. One buffer serves all slots of a decode thread.
pub struct Candidates {
    pub(super) array: LlamaTokenDataArray,
    /// Changed logits, ordered by token. Biases and penalties change few logits.
    pub(super) edits: Vec<(TokenId, f32)>,
}

impl Default for Candidates {
    fn default() -> Self {
        Self { array: LlamaTokenDataArray::new(Vec::new(), false), edits: Vec::new() }
    }
}

/// The logits of a step with the allowed tokens and the edits.
#[derive(Clone, Copy)]
pub(super) struct LogitsView<'a> {
    pub(super) logits: &'a [f32],
    /// A bit per token; `None` for all tokens.
    pub(super) allowed: Option<&'a [u32]>,
    pub(super) edits: &'a [(TokenId, f32)],
}

impl LogitsView<'_> {
    pub(super) fn allows(&self, token: TokenId) -> bool {
        let index = token as usize;
        self.allowed.is_none_or(|words| words.get(index / WORD).is_some_and(|word| word & 1 << (index % WORD) != 0))
    }

    fn edit(&self, token: TokenId) -> Option<f32> {
        let at = self.edits.binary_search_by_key(&token, |edit| edit.0).ok()?;
        Some(self.edits[at].1)
    }

    /// Returns true if the token can be sampled.
    pub(super) fn can_sample(&self, token: TokenId) -> bool {
        let logit = || usize::try_from(token).ok().and_then(|index| self.logits.get(index)).copied();
        self.allows(token) && self.edit(token).or_else(logit).is_some_and(|logit| logit > f32::NEG_INFINITY)
    }

    /// Returns blocks of tokens: index of the first token, logits, and a bit per allowed token.
    fn blocks(&self) -> impl Iterator<Item = (usize, &[f32], u128)> {
        self.logits.chunks(BLOCK).enumerate().filter_map(|(block, logits)| {
            let bits = self.allowed.map_or(u128::MAX, |words| {
                let words = words.iter().skip(block * (BLOCK / WORD)).take(BLOCK / WORD);
                words.enumerate().fold(0, |bits, (index, &word)| bits | u128::from(word) << (index * WORD))
            });
            (bits != 0).then_some((block * BLOCK, logits, bits))
        })
    }

    /// Returns the number of tokens that can be sampled.
    pub(super) fn count(&self) -> u32 {
        let mut count: u32 = self
            .blocks()
            .map(|(_, logits, bits)| {
                let finite = |logit: f32| u32::from(logit > f32::NEG_INFINITY);
                if bits == u128::MAX {
                    // Without a mask the compiler vectorizes this loop.
                    return logits.iter().map(|&logit| finite(logit)).sum::<u32>();
                }
                let allowed = |at: usize| (bits >> at & 1) as u32;
                logits.iter().enumerate().map(|(at, &logit)| finite(logit) & allowed(at)).sum::<u32>()
            })
            .sum();
        for &(token, logit) in self.edits.iter().filter(|edit| self.allows(edit.0)) {
            let before = u32::from(self.logits[token as usize] > f32::NEG_INFINITY);
            count = count + u32::from(logit > f32::NEG_INFINITY) - before;
        }
        count
    }

    /// Selects the `count` highest logits, highest first; the lower id comes first among equals.
    pub(super) fn highest(&self, count: usize, into: &mut Vec<LlamaTokenData>) {
        into.clear();
        if count == 0 {
            return;
        }
        let mut floor = f32::NEG_INFINITY;
        let mut put = |token: TokenId, logit: f32, floor: &mut f32| {
            let before =
                |other: &LlamaTokenData| other.logit() > logit || (other.logit() == logit && other.id().0 < token);
            let at = into.partition_point(before);
            if at == count {
                return;
            }
            if into.len() == count {
                into.pop();
            }
            into.insert(at, LlamaTokenData::new(LlamaToken::new(token), logit, 0.0));
            if into.len() == count {
                *floor = into[count - 1].logit();
            }
        };
        for (start, logits, bits) in self.blocks() {
            // After the first few blocks, most blocks hold no logit above the floor; comparing their maximum is enough.
            if max_value(logits) <= floor {
                continue;
            }
            for (at, &logit) in logits.iter().enumerate() {
                if logit > floor && bits >> at & 1 != 0 {
                    let token = (start + at) as TokenId;
                    if self.edits.is_empty() || self.edit(token).is_none() {
                        put(token, logit, &mut floor);
                    }
                }
            }
        }
        for &(token, logit) in self.edits {
            if logit > f32::NEG_INFINITY && logit >= floor && self.allows(token) {
                put(token, logit, &mut floor);
            }
        }
        for entry in into {
            entry.set_logit(bounded(entry.logit()));
        }
    }

    /// Selects all tokens that can be sampled, in the vocabulary's order.
    pub(super) fn all(&self, into: &mut Vec<LlamaTokenData>) {
        into.clear();
        into.reserve(self.logits.len());
        let mut edits = self.edits.iter().peekable();
        for (start, logits, bits) in self.blocks() {
            for (at, &logit) in logits.iter().enumerate() {
                if bits >> at & 1 == 0 {
                    continue;
                }
                let token = (start + at) as TokenId;
                while edits.next_if(|edit| edit.0 < token).is_some() {}
                let logit = edits.next_if(|edit| edit.0 == token).map_or(logit, |edit| edit.1);
                if logit > f32::NEG_INFINITY {
                    into.push(LlamaTokenData::new(LlamaToken::new(token), bounded(logit), 0.0));
                }
            }
        }
    }
}

fn bounded(logit: f32) -> f32 {
    logit.clamp(-MAX_LOGIT, MAX_LOGIT)
}

/// Changes logits for the penalties.
pub(super) trait LogitsEditor {
    /// Changes the logits of some tokens, given in order; `change` receives the current logit.
    fn change<T>(&mut self, changes: &[(TokenId, T)], change: impl Fn(f32, &T) -> f32);
}

/// The logits of a step, and the list of changed logits.
pub(super) struct EditedLogits<'a> {
    pub(super) logits: &'a [f32],
    pub(super) edits: &'a mut Vec<(TokenId, f32)>,
}

impl EditedLogits<'_> {
    /// Adds biases, given in the order of their tokens.
    pub(super) fn add_biases(&mut self, biases: &[(TokenId, f32)]) {
        self.edit(biases, |logit, bias| logit + bias);
    }

    fn edit<T>(&mut self, changes: &[(TokenId, T)], change: impl Fn(f32, &T) -> f32) {
        let Self { logits, edits } = self;
        let known = edits.len();
        for (token, value) in changes {
            match edits[..known].binary_search_by_key(token, |edit| edit.0) {
                Ok(at) => edits[at].1 = change(edits[at].1, value),
                Err(_) => {
                    if let Some(&logit) = usize::try_from(*token).ok().and_then(|index| logits.get(index)) {
                        edits.push((*token, change(logit, value)));
                    }
                }
            }
        }
        edits.sort_unstable_by_key(|edit| edit.0);
    }
}

impl LogitsEditor for EditedLogits<'_> {
    /// Avoided tokens keep their logits, because a penalty may raise a logit.
    fn change<T>(&mut self, changes: &[(TokenId, T)], change: impl Fn(f32, &T) -> f32) {
        self.edit(changes, |logit, value| if is_avoided(logit) { logit } else { change(logit, value) });
    }
}

impl LogitsEditor for LlamaTokenDataArray {
    fn change<T>(&mut self, changes: &[(TokenId, T)], change: impl Fn(f32, &T) -> f32) {
        for entry in &mut self.data {
            if let Ok(at) = changes.binary_search_by_key(&entry.id().0, |change| change.0) {
                entry.set_logit(change(entry.logit(), &changes[at].1));
            }
        }
        self.sorted = false;
    }
}

impl Candidates {
    /// Returns the `count` most probable candidates of the last draw, highest first, with their probabilities in the
    /// draw.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn block_selection_equals_full_sort(
            logits in proptest::collection::vec(prop_oneof![-5f32..5.0, Just(1.0), Just(f32::NEG_INFINITY)], 1..200),
            words in proptest::option::of(proptest::collection::vec(any::<u32>(), 7)),
            biases in proptest::collection::btree_map(0i32..200, prop_oneof![-5f32..5.0, Just(f32::NEG_INFINITY)], 0..20),
            count in 1usize..60,
        ) {
            let mut edits = Vec::new();
            let biases: Vec<_> = biases.into_iter().collect();
            EditedLogits { logits: &logits, edits: &mut edits }.add_biases(&biases);
            let view = LogitsView { logits: &logits, allowed: words.as_deref(), edits: &edits };
            let (mut short, mut long) = (Vec::new(), Vec::new());
            view.all(&mut long);
            prop_assert_eq!(view.count() as usize, long.len());
            long.sort_by(|a, b| b.logit().total_cmp(&a.logit()).then(a.id().0.cmp(&b.id().0)));
            long.truncate(count);
            view.highest(count, &mut short);
            let ids = |list: &[LlamaTokenData]| list.iter().map(|entry| (entry.id().0, entry.logit())).collect::<Vec<_>>();
            prop_assert_eq!(ids(&short), ids(&long));
        }
    }
}
