//! Drafts from the sequence itself (prompt lookup): the tokens that follow an earlier occurrence of the last tokens.
//!
//! The index has every n-gram of the sequence: a hash map gives the newest position of an n-gram, and each position
//! gives the previous one with the same n-gram. Adding a token, removing a token and finding a draft take constant
//! time. The index needs about 50 bytes per token of the sequence.

use crate::events::TokenId;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

/// Maximum number of earlier occurrences that are compared.
const MAX_OCCURRENCES: usize = 8;
/// Maximum length of a match.
const MAX_COMPARED: usize = 64;

/// Positions of the n-grams of a sequence.
pub struct NgramIndex {
    /// Length of an n-gram in tokens.
    size: usize,
    /// End of the newest n-gram with each hash.
    newest: HashMap<u64, usize>,
    /// N-grams in order; the first ends at `size`.
    ngrams: Vec<Ngram>,
    hasher: RandomState,
}

/// One n-gram of the sequence.
struct Ngram {
    hash: u64,
    /// End of the previous n-gram with the same hash.
    previous: Option<usize>,
}

impl NgramIndex {
    /// Creates an empty index of n-grams of `size` tokens.
    pub fn new(size: usize) -> Self {
        Self { size: size.max(1), newest: HashMap::new(), ngrams: Vec::new(), hasher: RandomState::new() }
    }

    /// Updates the index for `tokens`. The first `unchanged` tokens are the same as in the last call.
    pub fn update(&mut self, tokens: &[TokenId], unchanged: usize) {
        while self.end_of(self.ngrams.len()) > unchanged + 1
            && let Some(Ngram { hash, previous }) = self.ngrams.pop()
        {
            // All later n-grams are removed, so this one was the newest.
            match previous {
                Some(previous) => self.newest.insert(hash, previous),
                None => self.newest.remove(&hash),
            };
        }
        while self.end_of(self.ngrams.len()) <= tokens.len() {
            let end = self.end_of(self.ngrams.len());
            let hash = self.hasher.hash_one(&tokens[end - self.size..end]);
            let previous = self.newest.insert(hash, end);
            self.ngrams.push(Ngram { hash, previous });
        }
    }

    /// Returns up to `max` tokens that follow the longest match of the last tokens; of equally long matches, the
    /// newest. If the sequence ends before `max` tokens, the tokens after the match are repeated. The index must be up
    /// to date with `tokens`.
    pub fn draft(&self, tokens: &[TokenId], max: usize) -> Vec<TokenId> {
        let mut best: Option<(usize, usize)> = None;
        let mut next = self.ngrams.last().and_then(|last| last.previous);
        for _ in 0..MAX_OCCURRENCES {
            let Some(end) = next else { break };
            let len = common_suffix(&tokens[..end], tokens);
            if len >= self.size && best.is_none_or(|(longest, _)| len > longest) {
                best = Some((len, end));
            }
            next = self.ngrams[end - self.size].previous;
        }
        let Some((_, end)) = best else { return Vec::new() };
        let period = &tokens[end..];
        period.iter().copied().cycle().take(max).collect()
    }

    /// Returns the end of the n-gram with this index.
    fn end_of(&self, index: usize) -> usize {
        self.size + index
    }
}

/// Returns the length of the common suffix of two sequences, up to [`MAX_COMPARED`].
fn common_suffix(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(MAX_COMPARED).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::NgramIndex;
    use crate::events::TokenId;
    use proptest::prelude::*;

    fn draft(tokens: &[TokenId], size: usize, max: usize) -> Vec<TokenId> {
        let mut index = NgramIndex::new(size);
        index.update(tokens, 0);
        index.draft(tokens, max)
    }

    #[test]
    fn draft_continues_longest_match() {
        let text = [9, 1, 2, 3, 70, 71, 8, 1, 2, 3, 80, 81, 9, 1, 2, 3];
        assert_eq!(draft(&text, 2, 3), [70, 71, 8], "9 1 2 3 is longer than 1 2 3");
        assert_eq!(draft(&text[1..], 3, 3), [80, 81, 9], "the newer one of two");
        assert_eq!(draft(&text, 5, 3), [] as [TokenId; 0]);
        assert_eq!(draft(&[1, 2], 3, 3), [] as [TokenId; 0]);
    }

    #[test]
    fn draft_repeats_tokens_after_match() {
        assert_eq!(draft(&[5, 1, 2, 1, 2], 2, 5), [1, 2, 1, 2, 1]);
        assert_eq!(draft(&[7, 7, 7, 7], 2, 3), [7, 7, 7]);
    }

    proptest! {
        #[test]
        fn index_after_changes_equals_new_index(
            edits in proptest::collection::vec((0usize..6, proptest::collection::vec(0i32..4, 0..8)), 1..20),
            size in 1usize..5,
        ) {
            let (mut tokens, mut index) = (Vec::new(), NgramIndex::new(size));
            for (removed, added) in edits {
                let unchanged = tokens.len().saturating_sub(removed);
                tokens.truncate(unchanged);
                tokens.extend(added);
                index.update(&tokens, unchanged);
                prop_assert_eq!(index.ngrams.len(), (tokens.len() + 1).saturating_sub(size));
                prop_assert_eq!(index.draft(&tokens, 9), draft(&tokens, size, 9));
            }
        }
    }
}
