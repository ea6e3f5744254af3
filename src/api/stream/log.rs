//! What a run has said so far, so that a client can hear it again from any point on.

use crate::engine::TextDelta;
use crate::events::{FinishReason, TokenId};
use crate::model::Vocabulary;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Most entries that are kept; what is older is only kept as text.
const LONGEST: usize = 65_536;

/// Something a client is told of.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Entry {
    /// A token was added.
    Token(Token),
    /// A mod took the last characters back.
    Backtrack {
        /// Unicode scalar values that are gone.
        chars: usize,
        /// Tokens that had said them.
        tokens: usize,
        text: String,
    },
}

/// A token, as it is told.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Token {
    /// What it adds to the text; all of them together are the text.
    pub(super) text: String,
    /// `None` for text that no token of its own stands for.
    pub(super) id: Option<TokenId>,
    /// The token itself first, then the other most probable ones, with natural logarithms.
    pub(super) logprobs: Vec<(String, f32)>,
    /// Since the token before it.
    pub(super) took: Duration,
    /// Since the run began.
    pub(super) at: Duration,
    /// Why the run ends with it.
    pub(super) last: Option<FinishReason>,
}

/// The entries of a run, numbered from 1.
#[derive(Debug)]
pub(super) struct Log {
    began: Instant,
    heard: Instant,
    /// How many entries went, and the text after them.
    dropped: usize,
    base: String,
    entries: VecDeque<Entry>,
    /// Text so far, and how long each token's part of it is in characters.
    text: String,
    parts: Vec<usize>,
}

impl Log {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            began: now,
            heard: now,
            dropped: 0,
            base: String::new(),
            entries: VecDeque::new(),
            text: String::new(),
            parts: Vec::new(),
        }
    }

    /// How many entries there were.
    pub(super) fn len(&self) -> usize {
        self.dropped + self.entries.len()
    }

    /// Since the run began.
    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Entry number `index + 1`, if it is kept.
    pub(super) fn get(&self, index: usize) -> Option<&Entry> {
        self.entries.get(index.checked_sub(self.dropped)?)
    }

    /// The text after the first `index` entries, and how many that really are: of the oldest ones only the text is kept.
    pub(super) fn text_at(&self, index: usize) -> (usize, String) {
        let index = index.clamp(self.dropped, self.len());
        let mut text = self.base.clone();
        self.entries.iter().take(index - self.dropped).for_each(|entry| entry.apply(&mut text));
        (index, text)
    }

    /// Adds what was appended. Tokens that only end the run are not told.
    pub(super) fn add(&mut self, delta: TextDelta, vocabulary: &Vocabulary) {
        let TextDelta { mut text, tokens, last, .. } = delta;
        let shown = |id: TokenId, text: &str| !text.is_empty() || !vocabulary.is_end_of_generation(id);
        let mut told = Vec::with_capacity(tokens.len());
        for (measure, alternatives) in tokens {
            let part = if text.starts_with(&measure.text) { measure.text.len() } else { 0 };
            let rest = text.split_off(part);
            let own = std::mem::replace(&mut text, rest);
            if !shown(measure.token, &own) {
                continue;
            }
            let mut logprobs = Vec::with_capacity(alternatives.len() + 1);
            logprobs.extend(measure.logprob.map(|logprob| (measure.text, logprob)));
            let others = alternatives.into_iter().filter(|other| other.token != measure.token && other.prob > 0.0);
            logprobs.extend(others.map(|other| (other.text, other.prob.ln())));
            told.push((Some(measure.token), own, logprobs));
        }
        if !text.is_empty() {
            match told.last_mut() {
                Some((_, own, _)) => own.push_str(&text),
                None => told.push((None, text, Vec::new())),
            }
        }
        let now = Instant::now();
        let took = (now - self.heard) / told.len().max(1) as u32;
        self.heard = now;
        let count = told.len();
        for (index, (id, text, logprobs)) in told.into_iter().enumerate() {
            self.parts.push(text.chars().count());
            let last = last.filter(|_| index + 1 == count);
            self.push(Entry::Token(Token { text, id, logprobs, took, at: now - self.began, last }));
        }
    }

    /// Takes the last characters back.
    pub(super) fn retract(&mut self, chars: usize) {
        let keep = self.text.chars().count().saturating_sub(chars);
        let at = self.text.char_indices().nth(keep).map_or(self.text.len(), |(at, _)| at);
        let text = self.text[at..].to_owned();
        let (mut left, mut tokens) = (chars, 0);
        while let Some(part) = self.parts.last_mut().filter(|part| left > 0 || **part == 0) {
            if *part > left {
                *part -= left;
                break;
            }
            left -= *part;
            tokens += 1;
            self.parts.pop();
        }
        self.push(Entry::Backtrack { chars, tokens, text });
    }

    fn push(&mut self, entry: Entry) {
        entry.apply(&mut self.text);
        self.entries.push_back(entry);
        if self.entries.len() > LONGEST
            && let Some(oldest) = self.entries.pop_front()
        {
            oldest.apply(&mut self.base);
            self.dropped += 1;
        }
    }
}

impl Entry {
    /// Changes the text as this says.
    pub(super) fn apply(&self, text: &mut String) {
        match self {
            Self::Token(token) => text.push_str(&token.text),
            Self::Backtrack { text: gone, .. } => text.truncate(text.len().saturating_sub(gone.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(text: &str) -> Entry {
        let (took, at) = (Duration::ZERO, Duration::ZERO);
        Entry::Token(Token { text: text.into(), id: Some(1), logprobs: Vec::new(), took, at, last: None })
    }

    fn log(texts: &[&str]) -> Log {
        let mut log = Log::new();
        for text in texts {
            log.parts.push(text.chars().count());
            log.push(token(text));
        }
        log
    }

    #[test]
    fn a_backtrack_says_which_tokens_are_gone() {
        let mut log = log(&["a", "é€", "", "xyz"]);
        log.retract(4);
        assert_eq!(log.get(4), Some(&Entry::Backtrack { chars: 4, tokens: 2, text: "€xyz".into() }));
        assert_eq!((log.text.as_str(), log.len()), ("aé", 5));
        log.retract(1);
        assert_eq!(log.get(5), Some(&Entry::Backtrack { chars: 1, tokens: 1, text: "é".into() }));
    }

    #[test]
    fn the_text_is_known_at_every_point() {
        let mut log = log(&["a", "b", "c"]);
        log.retract(2);
        let texts: Vec<String> = (0..6).map(|index| log.text_at(index).1).collect();
        assert_eq!(texts, ["", "a", "ab", "abc", "a", "a"]);
        assert_eq!(log.text_at(9).0, 4);
    }

    #[test]
    fn of_a_long_run_the_oldest_part_stays_as_text() {
        let mut log = log(&[]);
        for _ in 0..LONGEST + 10 {
            log.push(token("x"));
        }
        assert_eq!((log.text_at(0).0, log.text_at(0).1.len(), log.len()), (10, 10, LONGEST + 10));
        assert_eq!((log.get(9), log.get(10)), (None, Some(&token("x"))));
    }
}
