//! Search for phrases in the text of the answer, across token boundaries. Only the end of the answer is read.

use crate::events::TokenId;
use crate::model::Vocabulary;
use std::ops::Range;

/// Maximum phrases. All are searched at every token.
pub const MAX_PHRASES: usize = 10_000;
/// Maximum characters of a phrase.
pub const MAX_PHRASE_CHARS: usize = 1000;

/// Returns an error if there are too many phrases or one is too long; `field` is the configuration field.
pub fn check(field: &str, phrases: &[&str]) -> Result<(), String> {
    if phrases.len() > MAX_PHRASES {
        return Err(format!("`{field}` has {} phrases; the maximum is {MAX_PHRASES}", phrases.len()));
    }
    match phrases.iter().find(|phrase| phrase.chars().count() > MAX_PHRASE_CHARS) {
        Some(phrase) => {
            let (begin, length) = (phrase.chars().take(40).collect::<String>(), phrase.chars().count());
            Err(format!("`{field}`: the phrase '{begin}…' has {length} characters; the maximum is {MAX_PHRASE_CHARS}"))
        }
        None => Ok(()),
    }
}

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
    /// Part of the first token's text that precedes the phrase.
    pub before: String,
    /// Text after the phrase.
    pub after: String,
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
    pub fn new(texts: &[&str], case_sensitive: bool, whole_words: bool) -> Self {
        let ignores_case = !case_sensitive;
        let all: Vec<Phrase> = texts
            .iter()
            .map(|text| Phrase {
                text: (*text).to_owned(),
                chars: text.chars().flat_map(|c| fold_case(c, ignores_case)).collect(),
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
        let token = tail.token_indexes[first_byte];
        let token_begins = tail.token_indexes.partition_point(|&index| index < token);
        Some(PhraseMatch {
            phrase,
            tokens: generated.len() - token,
            before: String::from_utf8_lossy(&tail.bytes[token_begins..first_byte]).into_owned(),
            after: String::from_utf8_lossy(&tail.bytes[last_byte + 1..]).into_owned(),
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
        let first_byte = partial.map(|length| tail.chars[tail.chars.len() - length].1).or(tail.incomplete);
        first_byte.map_or(0, |byte| generated.len() - tail.token_indexes[byte])
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
mod tests {
    use super::{PhraseMatch, Phrases};
    use crate::mods::builtin::testing::vocabulary;
    use proptest::prelude::*;

    fn found(phrases: &[&str], text: &str, added: usize) -> Option<PhraseMatch> {
        let vocabulary = vocabulary();
        let tokens = vocabulary.encode(text, false, false);
        Phrases::new(phrases, false, false).find(&vocabulary, &tokens, added, false)
    }

    #[test]
    fn match_counts_tokens_from_start_of_phrase() {
        // " a", " very", " bad", " idea"
        let hit = found(&["bad idea"], "Hello a very bad idea", 1).unwrap();
        assert_eq!(hit, PhraseMatch { phrase: 0, tokens: 2, before: " ".into(), after: String::new() });
        let hit = found(&["very bad"], "Hello a very bad idea", 2).unwrap();
        assert_eq!(hit, PhraseMatch { phrase: 0, tokens: 3, before: " ".into(), after: " idea".into() });
        assert_eq!(found(&["very bad"], "Hello a very bad idea", 1), None, "it ended before the new token");
    }

    #[test]
    fn earliest_phrase_wins_then_longest() {
        assert_eq!(found(&["idea", "bad idea", "bad"], " bad idea", 2).unwrap().phrase, 1);
    }

    #[test]
    fn case_folding_handles_multibyte_characters() {
        assert_eq!(found(&["ÄRGER"], "so ärger", 1).unwrap().tokens, 6);
        let vocabulary = vocabulary();
        let tokens = vocabulary.encode("ärger", false, false);
        assert!(Phrases::new(&["Ärger"], true, false).find(&vocabulary, &tokens, 1, false).is_none());
    }

    #[test]
    fn holdback_covers_partial_phrases() {
        let vocabulary = vocabulary();
        let phrases = Phrases::new(&["very bad", "bäh"], false, false);
        let held = |text: &str| phrases.holdback(&vocabulary, &vocabulary.encode(text, false, false));
        assert_eq!(held("Hello"), 0);
        assert_eq!(held("Hello very"), 1);
        assert_eq!(held("Hello very b"), 2, "' very' and ' b'");
        assert_eq!(held("Hello verx"), 0);
        let mut tokens = vocabulary.encode("Hello b", false, false);
        tokens.push(0xc3);
        assert_eq!(phrases.holdback(&vocabulary, &tokens), 2, "half of an ä");
    }

    #[test]
    fn whole_words_wait_for_next_character() {
        let vocabulary = vocabulary();
        let phrases = Phrases::new(&["bad", "c++"], false, true);
        let find = |text: &str, over| {
            let tokens = vocabulary.encode(text, false, false);
            phrases.find(&vocabulary, &tokens, tokens.len(), over).map(|found| found.phrase)
        };
        assert_eq!(find("a bad", false), None, "it may become 'badly'");
        assert_eq!(find("a bad", true), Some(0));
        assert_eq!(find("a bad!", false), Some(0));
        assert_eq!(find("a badly", true), None);
        assert_eq!(find("abad ", true), None);
        assert_eq!(find("C++", false), Some(1), "it does not end with a word");
        assert_eq!(find("c++x", false), Some(1));
        let held = |text: &str| phrases.holdback(&vocabulary, &vocabulary.encode(text, false, false));
        assert_eq!((held("a bad"), held("a bad "), held("a badx")), (1, 0, 0));
    }

    #[test]
    fn phrase_limits_are_enforced() {
        let many = vec!["a"; super::MAX_PHRASES + 1];
        assert_eq!(super::check("phrases", &many).unwrap_err(), "`phrases` has 10001 phrases; the maximum is 10000");
        let long = "ä".repeat(super::MAX_PHRASE_CHARS + 1);
        let message = super::check("phrases", &[&long]).unwrap_err();
        assert!(message.ends_with("ä…' has 1001 characters; the maximum is 1000"), "{message}");
        assert_eq!(super::check("phrases", &["ä".repeat(super::MAX_PHRASE_CHARS).as_str()]), Ok(()));
    }

    proptest! {
        #[test]
        fn search_for_many_phrases_equals_separate_searches(
            text in "[abA ]{0,24}", phrases in proptest::collection::vec("[abA ]{1,4}", 1..6), whole: bool, over: bool,
        ) {
            let vocabulary = vocabulary();
            let tokens = vocabulary.encode(&text, false, false);
            let texts: Vec<&str> = phrases.iter().map(String::as_str).collect();
            let all = Phrases::new(&texts, false, whole);
            let single = |text: &&str| Phrases::new(&[text], false, whole);
            let one_by_one = texts.iter().enumerate().filter_map(|(index, text)| {
                let found = single(text).find(&vocabulary, &tokens, tokens.len(), over)?;
                let before = vocabulary.decode(&tokens[..tokens.len() - found.tokens]) + &found.before;
                Some((before.len(), std::cmp::Reverse(text.len()), index))
            });
            let found = all.find(&vocabulary, &tokens, tokens.len(), over).map(|found| found.phrase);
            prop_assert_eq!(found, one_by_one.min().map(|(.., index)| index));
            let held = texts.iter().map(|text| single(text).holdback(&vocabulary, &tokens)).max();
            prop_assert_eq!(Some(all.holdback(&vocabulary, &tokens)), held);
            let within = texts.iter().any(|phrase| text.to_lowercase().contains(&phrase.to_lowercase()));
            prop_assert_eq!(all.find_in(&text).is_some(), within);
        }

        #[test]
        fn find_equals_search_in_whole_text(text in "[ab ]{0,30}", phrase in "[ab ]{1,5}") {
            let vocabulary = vocabulary();
            let tokens = vocabulary.encode(&text, false, false);
            let phrases = Phrases::new(&[&phrase], true, false);
            let hit = phrases.find(&vocabulary, &tokens, tokens.len(), false);
            prop_assert_eq!(hit.is_some(), text.contains(&phrase));
            if let Some(hit) = hit {
                let kept = vocabulary.decode(&tokens[..tokens.len() - hit.tokens]);
                prop_assert_eq!(kept + &hit.before, text.split(&phrase).next().unwrap());
                prop_assert!(hit.tokens <= tokens.len());
            }
        }

        #[test]
        fn found_phrase_was_held_back(text in "[abä ]{0,30}", phrase in "[abä ]{1,6}") {
            let vocabulary = vocabulary();
            let tokens = vocabulary.encode(&text, false, false);
            let phrases = Phrases::new(&[&phrase], true, false);
            for end in 1..=tokens.len() {
                let held = phrases.holdback(&vocabulary, &tokens[..end - 1]);
                prop_assert!(held <= phrases.max_tokens());
                if let Some(hit) = phrases.find(&vocabulary, &tokens[..end], 1, false) {
                    prop_assert!(hit.tokens <= held + 1);
                    break;
                }
            }
        }
    }
}
