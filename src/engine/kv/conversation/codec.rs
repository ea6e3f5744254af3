//! Serialization of a slot's history in snapshots. The bytes come from a client or a file and are not trusted.

use super::history::{DroppedGap, PastAnswer, SlotHistory};
use crate::events::TokenId;

impl SlotHistory {
    /// Serializes the history: answers, then gaps. Each list is preceded by its length; all numbers are little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut put = |number: usize| bytes.extend_from_slice(&(number as u32).to_le_bytes());
        put(self.answers.len());
        for answer in &self.answers {
            put(answer.start);
            put(answer.tokens.len());
            for &token in &answer.tokens {
                put(token as usize);
            }
        }
        put(self.gaps.len());
        for gap in &self.gaps {
            put(gap.at);
            put(gap.len);
            put(gap.messages.len());
            for hash in gap.messages.iter().chain([&gap.hash]) {
                put((hash & u64::from(u32::MAX)) as usize);
                put((hash >> 32) as usize);
            }
        }
        bytes
    }

    /// Parses a history from the beginning of `bytes`, and advances `bytes` past it. Returns `None` if the history is
    /// invalid or does not match the tokens.
    pub fn from_bytes(bytes: &mut &[u8], tokens: &[TokenId], vocabulary: usize) -> Option<Self> {
        let mut history = Self::default();
        for _ in 0..number(bytes)? {
            let (start, len) = (number(bytes)?, number(bytes)?);
            let answer: Vec<TokenId> = take(bytes, len.checked_mul(4)?)?
                .as_chunks::<4>()
                .0
                .iter()
                .map(|&token| TokenId::from_le_bytes(token))
                .collect();
            // The last token of an answer may be missing, since it is sampled but never decoded.
            let following = tokens.get(start..)?;
            let known = |&token: &TokenId| usize::try_from(token).is_ok_and(|token| token < vocabulary);
            let fits = !following.is_empty()
                && (1..=following.len() + 1).contains(&len)
                && answer.iter().zip(following).all(|(a, b)| a == b)
                && answer.iter().all(known);
            if !fits {
                return None;
            }
            history.answers.push(PastAnswer { start, tokens: answer });
        }
        for _ in 0..number(bytes)? {
            let (at, len, count) = (number(bytes)?, number(bytes)?, number(bytes)?);
            let mut hashes: Vec<u64> = take(bytes, count.checked_add(1)?.checked_mul(8)?)?
                .as_chunks::<8>()
                .0
                .iter()
                .map(|&hash| u64::from_le_bytes(hash))
                .collect();
            let hash = hashes.pop()?;
            if at > tokens.len() || history.gaps.last().is_some_and(|last| last.at > at) {
                return None;
            }
            history.gaps.push(DroppedGap { at, len, hash, messages: hashes });
        }
        Some(history)
    }
}

fn number(bytes: &mut &[u8]) -> Option<usize> {
    let number = take(bytes, 4)?.try_into().ok()?;
    Some(u32::from_le_bytes(number) as usize)
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TOKENS: [TokenId; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

    fn history() -> SlotHistory {
        let answer = |start: usize, tokens: &[TokenId]| PastAnswer { start, tokens: tokens.to_vec() };
        let gap = |at, messages: &[u64]| DroppedGap { at, len: 40, hash: (1 << 60) | 7, messages: messages.to_vec() };
        SlotHistory {
            answers: vec![answer(1, &[2, 3]), answer(6, &[7, 8, 9])],
            gaps: vec![gap(0, &[u64::MAX, 3]), gap(5, &[])],
        }
    }

    fn parse(bytes: &[u8]) -> Option<(SlotHistory, usize)> {
        let mut rest = bytes;
        SlotHistory::from_bytes(&mut rest, &TOKENS, 10).map(|history| (history, rest.len()))
    }

    #[test]
    fn history_round_trips() {
        let mut bytes = history().to_bytes();
        bytes.extend([1, 2, 3]);
        assert_eq!(parse(&bytes), Some((history(), 3)));
        assert_eq!(parse(&SlotHistory::default().to_bytes()), Some((SlotHistory::default(), 0)));
    }

    #[test]
    fn history_that_contradicts_tokens_is_rejected() {
        let parse_changed = |change: &dyn Fn(&mut SlotHistory)| {
            let mut history = history();
            change(&mut history);
            parse(&history.to_bytes())
        };
        assert!(
            parse_changed(&|history| history.answers[0].tokens[1] = 4).is_none(),
            "a token that differs from the state"
        );
        assert!(parse_changed(&|history| history.answers[1].tokens[2] = 10).is_none(), "outside of the vocabulary");
        assert!(parse_changed(&|history| history.answers[1].tokens.push(1)).is_none(), "longer than the state");
        assert!(parse_changed(&|history| history.answers[0].tokens.clear()).is_none());
        assert!(parse_changed(&|history| history.answers[0].start = 8).is_none());
        assert!(parse_changed(&|history| history.gaps[1].at = 9).is_none());
        assert!(parse_changed(&|history| history.gaps.swap(0, 1)).is_none(), "in the wrong order");
    }

    proptest! {
        #[test]
        fn corrupt_bytes_never_panic(noise: Vec<u8>, at in any::<prop::sample::Index>(), byte: u8) {
            drop(parse(&noise));
            let mut forged = history().to_bytes();
            let at = at.index(forged.len());
            forged[at] = byte;
            drop(parse(&forged));
            prop_assert!(parse(&forged[..at]).is_none());
        }
    }
}
