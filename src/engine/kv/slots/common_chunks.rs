//! Search for chunks of cached tokens that a prompt has after its common prefix.

use crate::events::TokenId;
use crate::model::common_prefix;
use std::ops::Range;

/// Returns the chunks of `min_len` or more `cached` tokens, after the `matched` prefix, that the prompt has in the same
/// order after that prefix.
pub fn common_chunks(cached: &[TokenId], prompt: &[TokenId], matched: usize, min_len: usize) -> Vec<Range<usize>> {
    let (mut at, mut prompt_at) = (matched, matched);
    let mut chunks = Vec::new();
    while let Some(start) = prompt.get(prompt_at..prompt_at.saturating_add(min_len))
        && let Some(skipped) = find(&cached[at..], start)
    {
        at += skipped;
        let len = common_prefix(&cached[at..], &prompt[prompt_at..]);
        chunks.push(at..at + len);
        at += len;
        prompt_at += len;
    }
    chunks
}

/// Returns the first position of a non-empty pattern. Takes linear time (Knuth–Morris–Pratt), because clients choose
/// tokens and pattern.
fn find(tokens: &[TokenId], pattern: &[TokenId]) -> Option<usize> {
    // Length of the longest proper prefix of the pattern that ends at each of its positions.
    let mut borders = vec![0; pattern.len()];
    let extend = |borders: &[usize], mut len: usize, token: TokenId| {
        while len > 0 && pattern[len] != token {
            len = borders[len - 1];
        }
        len + usize::from(pattern[len] == token)
    };
    for at in 1..pattern.len() {
        borders[at] = extend(&borders, borders[at - 1], pattern[at]);
    }
    let mut len = 0;
    for (at, &token) in tokens.iter().enumerate() {
        len = extend(&borders, len, token);
        if len == pattern.len() {
            return Some(at + 1 - len);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::common_chunks;
    use crate::events::TokenId;
    use crate::model::common_prefix;
    use proptest::prelude::*;
    use std::ops::Range;

    /// Compares the tokens at every position.
    fn compare_all(cached: &[TokenId], prompt: &[TokenId], matched: usize, min_len: usize) -> Vec<Range<usize>> {
        let (mut at, mut prompt_at, mut chunks) = (matched, matched, Vec::new());
        while at < cached.len() {
            let len = common_prefix(&cached[at..], &prompt[prompt_at..]);
            if len >= min_len {
                chunks.push(at..at + len);
                prompt_at += len;
            }
            at += if len >= min_len { len } else { 1 };
        }
        chunks
    }

    proptest! {
        #[test]
        fn chunks_equal_those_of_a_full_comparison(
            cached in prop::collection::vec(0..3, 0..60), prompt in prop::collection::vec(0..3, 0..60), min_len in 1usize..6,
        ) {
            let matched = common_prefix(&cached, &prompt);
            prop_assert_eq!(
                common_chunks(&cached, &prompt, matched, min_len),
                compare_all(&cached, &prompt, matched, min_len)
            );
        }
    }

    #[test]
    fn repetitive_tokens_are_matched_in_linear_time() {
        let repeated = vec![7; 2_000_000];
        let cached = [&[1, 2], &repeated[..1_000_000], &[3], &repeated[..1_000_000]].concat();
        let prompt = [&[1], repeated.as_slice(), &[4]].concat();
        assert!(common_chunks(&cached, &prompt, 1, 1_000_001).is_empty());
        assert!(common_chunks(&cached, &prompt, 1, usize::MAX).is_empty());
        assert_eq!(common_chunks(&cached, &prompt, 1, 1_000_000), [2..1_000_002, 1_000_003..2_000_003]);
    }

    #[test]
    fn chunks_are_found_in_order() {
        let cached = [1, 2, 3, 90, 91, 4, 5, 6, 92, 7, 8, 9];
        assert_eq!(common_chunks(&cached, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 3, 3), [5..8, 9..12]);
        assert!(common_chunks(&cached, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 3, 4).is_empty());
        assert!(common_chunks(&cached, &[1, 2, 3], 3, 1).is_empty());
        assert_eq!(common_chunks(&cached, &[1, 2, 3, 7, 8, 4, 5, 6], 3, 2), [9..11]);
    }
}
