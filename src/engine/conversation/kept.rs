//! Serialisation of a history in snapshots, so that a restored conversation finds its generated answers and its dropped
//! messages. The bytes are not trusted.

use super::memory::{Answer, Gap, Memory};
use crate::events::TokenId;

impl Memory {
    /// Serialises the history: answers, then gaps, each list after its length; all numbers little-endian.
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

    /// Reads a history from the beginning of `bytes`. Returns `None` if it does not match the tokens.
    pub fn from_bytes(bytes: &mut &[u8], tokens: &[TokenId], vocabulary: usize) -> Option<Self> {
        let mut memory = Self::default();
        for _ in 0..number(bytes)? {
            let (start, len) = (number(bytes)?, number(bytes)?);
            let answer: Vec<TokenId> = take(bytes, len.checked_mul(4)?)?
                .as_chunks::<4>()
                .0
                .iter()
                .map(|&token| TokenId::from_le_bytes(token))
                .collect();
            // The last token of an answer is drawn but never decoded.
            let held = tokens.get(start..)?;
            let known = |&token: &TokenId| usize::try_from(token).is_ok_and(|token| token < vocabulary);
            let fits = !held.is_empty()
                && (1..=held.len() + 1).contains(&len)
                && answer.iter().zip(held).all(|(a, b)| a == b)
                && answer.iter().all(known);
            if !fits {
                return None;
            }
            memory.answers.push(Answer { start, tokens: answer });
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
            if at > tokens.len() || memory.gaps.last().is_some_and(|last| last.at > at) {
                return None;
            }
            memory.gaps.push(Gap { at, len, hash, messages: hashes });
        }
        Some(memory)
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

    fn memory() -> Memory {
        let answer = |start: usize, tokens: &[TokenId]| Answer { start, tokens: tokens.to_vec() };
        let gap = |at, messages: &[u64]| Gap { at, len: 40, hash: (1 << 60) | 7, messages: messages.to_vec() };
        Memory {
            answers: vec![answer(1, &[2, 3]), answer(6, &[7, 8, 9])],
            gaps: vec![gap(0, &[u64::MAX, 3]), gap(5, &[])],
        }
    }

    fn read(bytes: &[u8]) -> Option<(Memory, usize)> {
        let mut rest = bytes;
        Memory::from_bytes(&mut rest, &TOKENS, 10).map(|memory| (memory, rest.len()))
    }

    #[test]
    fn a_memory_comes_back() {
        let mut bytes = memory().to_bytes();
        bytes.extend([1, 2, 3]);
        assert_eq!(read(&bytes), Some((memory(), 3)));
        assert_eq!(read(&Memory::default().to_bytes()), Some((Memory::default(), 0)));
    }

    #[test]
    fn what_does_not_fit_the_tokens_is_no_memory() {
        let without = |change: &dyn Fn(&mut Memory)| {
            let mut memory = memory();
            change(&mut memory);
            read(&memory.to_bytes())
        };
        assert!(without(&|memory| memory.answers[0].tokens[1] = 4).is_none(), "a token that differs from the state");
        assert!(without(&|memory| memory.answers[1].tokens[2] = 10).is_none(), "outside of the vocabulary");
        assert!(without(&|memory| memory.answers[1].tokens.push(1)).is_none(), "longer than the state");
        assert!(without(&|memory| memory.answers[0].tokens.clear()).is_none());
        assert!(without(&|memory| memory.answers[0].start = 8).is_none());
        assert!(without(&|memory| memory.gaps[1].at = 9).is_none());
        assert!(without(&|memory| memory.gaps.swap(0, 1)).is_none(), "in the wrong order");
    }

    proptest! {
        #[test]
        fn noise_does_no_harm(noise: Vec<u8>, at in any::<prop::sample::Index>(), byte: u8) {
            drop(read(&noise));
            let mut forged = memory().to_bytes();
            let at = at.index(forged.len());
            forged[at] = byte;
            drop(read(&forged));
            prop_assert!(read(&forged[..at]).is_none());
        }
    }
}
