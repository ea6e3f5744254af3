//! Counts of the last tokens of a sequence, updated at every draw. The cost depends on the changes and not on the
//! length.

use crate::events::TokenId;
use crate::model::common_prefix;

/// Maximum changes per update; with more, all tokens are counted again.
const MAX_CHANGES: usize = 64;

/// Counts of the last tokens of a sequence.
#[derive(Debug)]
pub(super) struct RecentCounts {
    last_n: i32,
    /// Index of the first counted token.
    from: usize,
    counted: Vec<TokenId>,
    /// Each counted token with its count, in order of tokens.
    counts: Vec<(TokenId, u32)>,
}

impl RecentCounts {
    /// Creates empty counts for the last `last_n` tokens; negative for all.
    pub(super) fn new(last_n: i32) -> Self {
        Self { last_n, from: 0, counted: Vec::new(), counts: Vec::new() }
    }

    /// Counts a sequence that may have changed in any way since the last call. Returns the counts in order of tokens.
    pub(super) fn count(&mut self, sequence: &[TokenId]) -> &[(TokenId, u32)] {
        let from = sequence.len() - window(sequence, self.last_n).len();
        let first = from.max(self.from);
        let (Some(before), Some(now)) = (self.counted.get(first - self.from..), sequence.get(first..)) else {
            return self.recount(sequence, from);
        };
        // The counted tokens that are still in the sequence end here.
        let last = first + common_prefix(before, now);
        let removed = (first - self.from) + (self.from + self.counted.len() - last);
        let added = (first - from) + (sequence.len() - last);
        if removed + added > MAX_CHANGES {
            return self.recount(sequence, from);
        }
        let (front_end, tail_start) = (first - self.from, last - self.from);
        let counted = std::mem::take(&mut self.counted);
        counted[..front_end].iter().chain(&counted[tail_start..]).for_each(|&token| self.decrement(token));
        sequence[from..first].iter().chain(&sequence[last..]).for_each(|&token| self.increment(token));
        self.counted = counted;
        self.counted.truncate(tail_start);
        self.counted.splice(..front_end, sequence[from..first].iter().copied());
        self.counted.extend_from_slice(&sequence[last..]);
        self.from = from;
        &self.counts
    }

    fn recount(&mut self, sequence: &[TokenId], from: usize) -> &[(TokenId, u32)] {
        self.from = from;
        self.counted.clear();
        self.counted.extend_from_slice(&sequence[from..]);
        let mut sorted = self.counted.clone();
        sorted.sort_unstable();
        self.counts.clear();
        self.counts.extend(sorted.chunk_by(|a, b| a == b).map(|same| (same[0], same.len() as u32)));
        &self.counts
    }

    fn increment(&mut self, token: TokenId) {
        match self.counts.binary_search_by_key(&token, |entry| entry.0) {
            Ok(at) => self.counts[at].1 += 1,
            Err(at) => self.counts.insert(at, (token, 1)),
        }
    }

    fn decrement(&mut self, token: TokenId) {
        if let Ok(at) = self.counts.binary_search_by_key(&token, |entry| entry.0) {
            self.counts[at].1 -= 1;
            if self.counts[at].1 == 0 {
                self.counts.remove(at);
            }
        }
    }
}

/// Returns the last tokens of a sequence; all if `last_n` is negative.
pub(super) fn window(sequence: &[TokenId], last_n: i32) -> &[TokenId] {
    let keep = usize::try_from(last_n).unwrap_or(sequence.len()).min(sequence.len());
    &sequence[sequence.len() - keep..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// A change of a sequence between two draws.
    #[derive(Debug, Clone)]
    enum Change {
        Append(Vec<TokenId>),
        Backtrack(usize),
        Remove(usize, usize),
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            4 => proptest::collection::vec(0..9i32, 1..3).prop_map(Change::Append),
            1 => proptest::collection::vec(0..9i32, 0..150).prop_map(Change::Append),
            2 => (0usize..20).prop_map(Change::Backtrack),
            1 => (0usize..60, 0usize..90).prop_map(|(at, count)| Change::Remove(at, count)),
        ]
    }

    proptest! {
        #[test]
        fn incremental_counts_equal_full_counts(last_n in prop_oneof![Just(-1), 1..200i32], changes in proptest::collection::vec(change(), 1..60)) {
            let mut recent = RecentCounts::new(last_n);
            let mut sequence = Vec::new();
            for change in changes {
                match change {
                    Change::Append(tokens) => sequence.extend(tokens),
                    Change::Backtrack(count) => sequence.truncate(sequence.len().saturating_sub(count)),
                    Change::Remove(at, count) => {
                        let at = at.min(sequence.len());
                        sequence.drain(at..(at + count).min(sequence.len()));
                    }
                }
                let mut plain = BTreeMap::new();
                window(&sequence, last_n).iter().for_each(|&token| *plain.entry(token).or_insert(0u32) += 1);
                prop_assert_eq!(recent.count(&sequence), plain.into_iter().collect::<Vec<_>>());
            }
        }
    }
}
