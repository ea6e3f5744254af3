//! The stage `infill` for completions between two texts: ends the answer early, and merges candidates of which one is
//! the start of the other. Own code, because the bindings do not offer llama.cpp's; it leaves the same candidates.

use super::candidates::LogitsView;
use crate::events::TokenId;
use crate::model::Vocabulary;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;
use std::sync::Arc;

/// Minimum probability of a candidate that does not end the answer, after the merge.
const MIN_PROBABILITY: f32 = 0.2;
/// Maximum number of candidates to merge, the most probable ones. Each is compared with every other one.
const MAX_MERGED: usize = 512;

/// The stage `infill`.
#[derive(Debug)]
pub(super) struct Infill {
    vocabulary: Arc<Vocabulary>,
}

impl Infill {
    pub(super) fn new(vocabulary: &Arc<Vocabulary>) -> Self {
        Self { vocabulary: Arc::clone(vocabulary) }
    }

    /// Removes candidates. `view` tells if the end of the answer can be sampled. The merged probabilities only decide
    /// which candidates remain, as in llama.cpp.
    pub(super) fn apply(&self, array: &mut LlamaTokenDataArray, view: LogitsView<'_>) {
        let data = &mut array.data;
        let is_end = |entry: &LlamaTokenData| self.vocabulary.is_end_of_generation(entry.id().0);
        sort_with_probabilities(data);
        array.sorted = true;
        let end: f32 = data.iter().filter(|entry| is_end(entry)).map(LlamaTokenData::p).sum();
        let text: f32 = data.iter().filter(|entry| !is_end(entry)).map(LlamaTokenData::p).sum();
        if 3.0 * end * data.len() as f32 > text {
            return data.retain(is_end);
        }

        let best = data.first().copied();
        let mut count = 0;
        data.retain(|entry| {
            count += 1;
            count <= MAX_MERGED || is_end(entry)
        });
        self.merge_prefixes(data);
        data.retain(|entry| entry.p() >= MIN_PROBABILITY || is_end(entry));
        let texts = data.iter().filter(|entry| !is_end(entry)).count();
        if texts == 0 {
            let end = self.vocabulary.special().end_of_turn().filter(|&token| view.can_sample(token));
            let end = end.map(|token| LlamaTokenData::new(LlamaToken::new(token), 1.0, 0.0));
            *data = end.or(best).into_iter().collect();
            return;
        }
        let sum: f32 = data.iter().map(LlamaTokenData::p).sum();
        let min = 1.0 / (texts + 1) as f32;
        data.retain(|entry| entry.p() / sum >= min || is_end(entry));
    }

    /// Adds the probabilities of candidates of which one is the start of the other to the more probable one; the other
    /// one gets the probability 0 and the logit `-inf`.
    fn merge_prefixes(&self, data: &mut [LlamaTokenData]) {
        // Control tokens have no text.
        let piece = |token: TokenId| -> &[u8] {
            if self.vocabulary.is_control(token) { &[] } else { self.vocabulary.piece(token) }
        };
        let pieces: Vec<&[u8]> = data.iter().map(|entry| piece(entry.id().0)).collect();
        let is_merged = |entry: &LlamaTokenData| entry.logit() == f32::NEG_INFINITY;
        for start in 0..data.len() {
            for other in 0..data.len() {
                if is_merged(&data[start]) {
                    break;
                }
                let is_start = !pieces[start].is_empty() && pieces[other].starts_with(pieces[start]);
                if start == other || is_merged(&data[other]) || !is_start {
                    continue;
                }
                let (kept, removed) = if data[other].p() > data[start].p() { (other, start) } else { (start, other) };
                let sum = data[kept].p() + data[removed].p();
                data[kept].set_p(sum);
                data[removed].set_p(0.0);
                data[removed].set_logit(f32::NEG_INFINITY);
            }
        }
    }
}

/// Sorts the candidates by their logits, highest first, and computes their probabilities.
fn sort_with_probabilities(data: &mut [LlamaTokenData]) {
    data.sort_by(|one, other| other.logit().total_cmp(&one.logit()));
    let max = data.first().map_or(0.0, LlamaTokenData::logit);
    let sum: f32 = data.iter().map(|entry| (entry.logit() - max).exp()).sum();
    for entry in data {
        entry.set_p((entry.logit() - max).exp() / sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SpecialTokens;

    const END: TokenId = 4;

    /// Applies the stage to tokens with these probabilities: "a", "ab", "abc", "x", then the end of the answer. Returns
    /// the tokens that remain.
    fn remaining(probabilities: [f32; 5], can_end: bool) -> Vec<TokenId> {
        let pieces = ["a", "ab", "abc", "x", "<end>"].map(|text| Box::from(text.as_bytes())).to_vec();
        let special = SpecialTokens { eos: Some(END), ..SpecialTokens::default() };
        let control = [false, false, false, false, true].to_vec();
        let vocabulary = Arc::new(Vocabulary::new(pieces, control, vec![END], special, |_, _, _| Vec::new()));
        let mut logits = probabilities.map(f32::ln);
        if !can_end {
            logits[END as usize] = f32::NEG_INFINITY;
        }
        let view = LogitsView { logits: &logits, allowed: None, edits: &[] };
        let mut array = LlamaTokenDataArray::new(Vec::new(), false);
        view.all(&mut array.data);
        Infill::new(&vocabulary).apply(&mut array, view);
        array.data.retain(|entry| entry.logit() > f32::NEG_INFINITY);
        array.data.iter().map(|entry| entry.id().0).collect()
    }

    #[test]
    fn only_ends_remain_if_an_end_is_probable() {
        assert_eq!(remaining([0.3, 0.2, 0.2, 0.2, 0.1], true), [END]);
    }

    #[test]
    fn token_and_its_continuations_are_merged() {
        // "ab" gets 0.30 + 0.25 + 0.20, and "x" is below half of the rest.
        assert_eq!(remaining([0.25, 0.30, 0.20, 0.2499, 0.0001], true), [1, END]);
    }

    #[test]
    fn end_remains_if_no_text_is_probable() {
        let pieces = (0..8u8).map(|letter| Box::from([b'a' + letter])).collect();
        let special = SpecialTokens { eos: Some(7), ..SpecialTokens::default() };
        let vocabulary = Arc::new(Vocabulary::new(pieces, vec![false; 8], vec![7], special, |_, _, _| Vec::new()));
        for (end, expected) in [(-30.0, 7), (f32::NEG_INFINITY, 0)] {
            let logits = [0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, end];
            let view = LogitsView { logits: &logits, allowed: None, edits: &[] };
            let mut array = LlamaTokenDataArray::new(Vec::new(), false);
            view.all(&mut array.data);
            Infill::new(&vocabulary).apply(&mut array, view);
            let left: Vec<TokenId> = array.data.iter().map(|entry| entry.id().0).collect();
            assert_eq!(left, [expected]);
        }
    }

    #[test]
    fn text_remains_if_the_end_cannot_be_sampled() {
        assert_eq!(remaining([0.6, 0.1, 0.1, 0.2, 0.1], false), [0]);
    }
}
