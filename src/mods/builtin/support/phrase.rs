//! Search for phrases in the text of the answer, across token boundaries. Only the end of the answer is read.

use crate::events::TokenId;
use crate::model::Vocabulary;
use std::ops::Range;

/// Maximum phrases. All are searched at every token.
pub const MAX_PHRASES: usize = 10_000;
/// Maximum characters of a phrase.
pub const MAX_PHRASE_CHARS: usize = 1000;

/// Phrases to search for.
pub struct Phrases {
    all: Vec<Phrase>,
    /// Indexes of the phrases, sorted by their characters. Phrases with the same beginning are adjacent, the shortest
    /// first, so the search at one position is logarithmic in the number of phrases.
    order: Vec<usize>,
    ignores_case: bool,
    /// True if a phrase must not be part of a longer word.
    whole_words: bool,
    /// Characters of the longest phrase.
    longest: usize,
}

struct Phrase {
    text: String,
    /// Characters, lower-cased if case does not matter.
    chars: Vec<char>,
}

/// A phrase found at the end of the sequence.
#[derive(Debug, PartialEq)]
pub struct PhraseMatch {
    /// Index of the phrase.
    pub phrase: usize,
    /// Number of tokens from the one with the phrase's first character to the end of the sequence.
    pub tokens: usize,
    /// Number of tokens whose text is `before`, the phrase and `after`: more than `tokens` if the first one begins within a
    /// character.
    pub tokens_from_char_boundary: usize,
    /// Text of these tokens that precedes the phrase.
    pub before: String,
    /// Text after the phrase.
    pub after: String,
    /// True if the text ends within a character, whose rest may follow.
    pub is_cut: bool,
}

/// End of the generated text, and the token of each byte.
struct Tail {
    bytes: Vec<u8>,
    /// Index in `generated` of the token of each byte.
    token_indexes: Vec<usize>,
    /// Characters, lower-cased if case does not matter, each with its first and last byte.
    chars: Vec<(char, usize, usize)>,
    /// First byte of a character that is not complete yet.
    incomplete: Option<usize>,
}

/// Result of the word-boundary check for a phrase whose characters were found.
#[derive(PartialEq, Eq)]
enum BoundaryCheck {
    Yes,
    No,
    /// Depends on the next character, because the word may continue.
    Perhaps,
}

impl Phrases {
    pub fn new(texts: &[impl AsRef<str>], case_sensitive: bool, whole_words: bool) -> Self {
        let ignores_case = !case_sensitive;
        let all: Vec<Phrase> = texts
            .iter()
            .map(|text| Phrase {
                text: text.as_ref().to_owned(),
                chars: text.as_ref().chars().flat_map(|c| fold_case(c, ignores_case)).collect(),
            })
            .collect();
        let longest = all.iter().map(|phrase| phrase.chars.len()).max().unwrap_or(0);
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.sort_by(|&one, &other| all[one].chars.cmp(&all[other].chars));
        Self { all, order, ignores_case, whole_words, longest }
    }

    pub fn text(&self, phrase: usize) -> &str {
        &self.all[phrase].text
    }

    /// Returns the maximum number of tokens of a phrase: one for each of its bytes.
    pub fn max_tokens(&self) -> usize {
        self.all.iter().map(|phrase| phrase.text.len()).max().unwrap_or(0)
    }

    /// Finds the earliest phrase in `generated` that ends in its last `fresh` tokens; of several with the same start,
    /// the longest. If `is_over` is false, the word at the end of the answer may still continue.
    pub fn find(
        &self,
        vocabulary: &Vocabulary,
        generated: &[TokenId],
        fresh: usize,
        is_over: bool,
    ) -> Option<PhraseMatch> {
        let tail = self.tail(vocabulary, generated, fresh);
        let first_new = generated.len().saturating_sub(fresh);
        let ends_in_new =
            |start: usize, length: usize| tail.token_indexes[tail.chars[start + length - 1].2] >= first_new;
        let is_match = |start: usize, phrase: usize| {
            let chars = &self.all[phrase].chars;
            ends_in_new(start, chars.len())
                && match self.check_boundary(&tail, start, chars) {
                    BoundaryCheck::Yes => true,
                    BoundaryCheck::No => false,
                    BoundaryCheck::Perhaps => is_over,
                }
        };
        let longest_at = |start| self.longest_prefix(&tail.chars[start..], |phrase| is_match(start, phrase));
        let (start, phrase) = (0..tail.chars.len()).find_map(|start| Some((start, longest_at(start)?)))?;
        let last = start + self.all[phrase].chars.len() - 1;
        let (first_byte, last_byte) = (tail.chars[start].1, tail.chars[last].2);
        let (first_replaced, from) = tail.replaceable_from(first_byte);
        Some(PhraseMatch {
            phrase,
            tokens: generated.len() - tail.token_indexes[first_byte],
            tokens_from_char_boundary: generated.len() - first_replaced,
            before: String::from_utf8_lossy(&tail.bytes[from..first_byte]).into_owned(),
            after: String::from_utf8_lossy(&tail.bytes[last_byte + 1..]).into_owned(),
            is_cut: tail.incomplete.is_some(),
        })
    }

    /// Finds a phrase anywhere in a text.
    pub fn find_in(&self, text: &str) -> Option<usize> {
        let chars: Vec<_> = text.chars().flat_map(|c| fold_case(c, self.ignores_case)).map(|c| (c, 0, 0)).collect();
        (0..chars.len()).find_map(|start| self.longest_prefix(&chars[start..], |_| true))
    }

    /// Returns the longest of the `wanted` phrases with which `text` begins; of equal phrases the first.
    fn longest_prefix(&self, text: &[(char, usize, usize)], wanted: impl Fn(usize) -> bool) -> Option<usize> {
        let mut range = 0..self.order.len();
        let mut found = None;
        for (at, &(c, ..)) in text.iter().enumerate() {
            range = self.narrow(range, at, c);
            if range.is_empty() {
                break;
            }
            // Phrases that end here come first.
            let ending = self.order[range.clone()].iter().take_while(|&&phrase| self.all[phrase].chars.len() == at + 1);
            found = ending.copied().find(|&phrase| wanted(phrase)).or(found);
        }
        found
    }

    /// Narrows a range of `order`, whose phrases have the same first `at` characters, to those whose next character is
    /// `c`.
    fn narrow(&self, range: Range<usize>, at: usize, c: char) -> Range<usize> {
        let among = &self.order[range.clone()];
        let character = |phrase: usize| self.all[phrase].chars.get(at).copied();
        let from = among.partition_point(|&phrase| character(phrase) < Some(c));
        let end = from + among[from..].partition_point(|&phrase| character(phrase) == Some(c));
        range.start + from..range.start + end
    }

    /// Returns the number of tokens at the end that may begin a phrase, or that contain a phrase whose last word may
    /// continue.
    pub fn holdback(&self, vocabulary: &Vocabulary, generated: &[TokenId]) -> usize {
        let tail = self.tail(vocabulary, generated, 0);
        let end = tail.chars.len();
        let partial = (end.saturating_sub(self.longest)..end).map(|start| end - start).find(|&length| {
            let mut chars = tail.chars[end - length..].iter().enumerate();
            let range = chars.try_fold(0..self.order.len(), |range, (at, &(c, ..))| {
                let range = self.narrow(range, at, c);
                (!range.is_empty()).then_some(range)
            });
            // Longer phrases come last.
            let open_end = |chars: &[char]| self.whole_words && chars.last().is_some_and(|c| is_word(*c));
            let may_become = |&phrase: &usize| {
                let chars = &self.all[phrase].chars;
                chars.len() > length || open_end(chars)
            };
            range.is_some_and(|range| self.order[range].last().is_some_and(may_become))
        });
        let first_token = match (partial, tail.incomplete) {
            (Some(length), _) => tail.replaceable_from(tail.chars[end - length].1).0,
            (None, Some(byte)) => tail.replaceable_from(byte).0,
            (None, None) => generated.len(),
        };
        generated.len() - first_token
    }

    fn check_boundary(&self, tail: &Tail, start: usize, phrase: &[char]) -> BoundaryCheck {
        let (Some(first), Some(last)) = (phrase.first(), phrase.last()) else { return BoundaryCheck::No };
        if !self.whole_words {
            return BoundaryCheck::Yes;
        }
        let before = start.checked_sub(1).map(|before| tail.chars[before].0);
        if is_word(*first) && before.is_some_and(is_word) {
            return BoundaryCheck::No;
        }
        match tail.chars.get(start + phrase.len()) {
            _ if !is_word(*last) => BoundaryCheck::Yes,
            Some((next, ..)) if is_word(*next) => BoundaryCheck::No,
            Some(_) => BoundaryCheck::Yes,
            None => BoundaryCheck::Perhaps,
        }
    }

    fn tail(&self, vocabulary: &Vocabulary, generated: &[TokenId], fresh: usize) -> Tail {
        let mut start = generated.len().saturating_sub(fresh);
        // A character has up to four bytes. The character before the phrase is needed, too, since the phrase may start
        // in the middle of a token.
        let mut wanted = self.longest * 4 + 8;
        while start > 0 && wanted > 0 {
            start -= 1;
            wanted = wanted.saturating_sub(vocabulary.piece(generated[start]).len().max(1));
        }
        let (mut bytes, mut token_indexes) = (Vec::new(), Vec::new());
        for (index, &token) in generated.iter().enumerate().skip(start) {
            // Control tokens are not part of the text.
            if !vocabulary.is_control(token) {
                bytes.extend_from_slice(vocabulary.piece(token));
                token_indexes.resize(bytes.len(), index);
            }
        }
        let mut chars = Vec::with_capacity(bytes.len());
        let mut incomplete = None;
        let mut at = 0;
        for chunk in bytes.utf8_chunks() {
            for c in chunk.valid().chars() {
                let end = at + c.len_utf8();
                chars.extend(fold_case(c, self.ignores_case).map(|folded| (folded, at, end - 1)));
                at = end;
            }
            if !chunk.invalid().is_empty() {
                let end = at + chunk.invalid().len();
                if end == bytes.len() && crate::model::complete_prefix(chunk.invalid()) == 0 {
                    incomplete = Some(at);
                } else {
                    chars.push((char::REPLACEMENT_CHARACTER, at, end - 1));
                }
                at = end;
            }
        }
        Tail { bytes, token_indexes, chars, incomplete }
    }
}

impl Tail {
    /// Returns the first token to replace so that the text changes from `byte` on, and the first byte of that token. It
    /// begins with a character: a part of a character cannot be encoded again.
    fn replaceable_from(&self, mut byte: usize) -> (usize, usize) {
        loop {
            let token = self.token_indexes[byte];
            let from = self.token_indexes.partition_point(|&index| index < token);
            let chars_before = self.chars.partition_point(|&(_, first, _)| first < from);
            match chars_before.checked_sub(1).map(|last_before| self.chars[last_before]) {
                Some((_, first, last)) if last >= from => byte = first,
                _ => return (token, from),
            }
        }
    }
}

/// Returns true for word characters.
fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn fold_case(c: char, ignores_case: bool) -> impl Iterator<Item = char> {
    let lower = ignores_case.then(|| c.to_lowercase());
    let same = (!ignores_case).then_some(c);
    lower.into_iter().flatten().chain(same)
}

#[cfg(test)]
mod tests;
