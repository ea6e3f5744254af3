//! The output of a run, kept in memory so that a client can follow it from any point.

use crate::engine::{MeasuredToken, TextDelta};
use crate::events::{FinishReason, TokenId};
use crate::model::Vocabulary;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Maximum stored entries, except those that a follower still needs; older ones are merged into the base text.
const MAX_ENTRIES: usize = 65_536;

/// An entry of a run's output.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum LogEntry {
    /// A generated token.
    Token(LogToken),
    /// A mod removed the last tokens.
    Backtrack(LogBacktrack),
}

/// A token with its text and measurements.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LogToken {
    /// Text of the token; all texts together are the answer.
    pub(super) text: String,
    /// `None` for text without a separate token.
    pub(super) id: Option<TokenId>,
    /// Natural log-probabilities of the token, then of the most probable alternatives, as many as the client requested.
    pub(super) logprobs: Vec<(String, f32)>,
    /// Time since the previous token.
    pub(super) elapsed: Duration,
    /// Time since the start of the run.
    pub(super) at: Duration,
    /// The finish reason, if the run ends with this token.
    pub(super) last: Option<FinishReason>,
}

/// The removal of the last tokens.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LogBacktrack {
    /// Number of Unicode scalar values removed; 0 if the tokens have no text.
    pub(super) chars: usize,
    /// Number of tokens removed.
    pub(super) tokens: usize,
    /// The removed text.
    pub(super) text: String,
}

/// The entries of a run, numbered from 1.
#[derive(Debug)]
pub(super) struct RunLog {
    started: Instant,
    last_output: Instant,
    /// Number of dropped entries.
    dropped: usize,
    /// The text of the dropped entries.
    base: String,
    entries: VecDeque<LogEntry>,
    /// The text so far.
    text: String,
    /// Number of tokens that the engine has sent and not retracted.
    engine_tokens: usize,
    /// Indexes, among these tokens, of those without an entry.
    skipped: Vec<usize>,
    /// Maximum log-probabilities stored with a token.
    max_logprobs: usize,
}

impl RunLog {
    /// Creates an empty log. `logprobs` is the number of log-probabilities that the client requested with each token.
    pub(super) fn new(logprobs: Option<usize>) -> Self {
        let now = Instant::now();
        Self {
            started: now,
            last_output: now,
            dropped: 0,
            base: String::new(),
            entries: VecDeque::new(),
            text: String::new(),
            engine_tokens: 0,
            skipped: Vec::new(),
            max_logprobs: logprobs.map_or(0, |count| count.max(1)),
        }
    }

    /// Returns the number of entries so far.
    pub(super) fn len(&self) -> usize {
        self.dropped + self.entries.len()
    }

    /// Returns the time since the start of the run.
    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the entry after the first `index` ones, if it is stored.
    pub(super) fn get(&self, index: usize) -> Option<&LogEntry> {
        self.entries.get(index.checked_sub(self.dropped)?)
    }

    /// Returns the text after the first `index` entries and their number. The number is clamped to the stored entries.
    pub(super) fn text_at(&self, index: usize) -> (usize, String) {
        let index = index.clamp(self.dropped, self.len());
        let mut text = self.base.clone();
        self.entries.iter().take(index - self.dropped).for_each(|entry| entry.apply(&mut text));
        (index, text)
    }

    /// Appends a delta. End-of-generation tokens without text are skipped.
    pub(super) fn add(&mut self, delta: TextDelta, vocabulary: &Vocabulary) {
        let TextDelta { mut text, tokens, last, .. } = delta;
        let is_shown = |id: TokenId, text: &str| !text.is_empty() || !vocabulary.is_end_of_generation(id);
        let mut sent = Vec::with_capacity(tokens.len());
        for MeasuredToken { measurement, alternatives, is_hidden } in tokens {
            let has_part = !is_hidden && text.starts_with(&measurement.text);
            let rest = text.split_off(if has_part { measurement.text.len() } else { 0 });
            let token_text = std::mem::replace(&mut text, rest);
            let index = self.engine_tokens;
            self.engine_tokens += 1;
            if !is_shown(measurement.token, &token_text) {
                self.skipped.push(index);
                continue;
            }
            let own = measurement.logprob.map(|logprob| (measurement.text, logprob));
            let others = alternatives.into_iter().filter(|other| other.token != measurement.token && other.prob > 0.0);
            let logprobs = own.into_iter().chain(others.map(|other| (other.text, other.prob.ln())));
            sent.push((Some(measurement.token), token_text, logprobs.take(self.max_logprobs).collect()));
        }
        if !text.is_empty() {
            match sent.last_mut() {
                Some((_, token_text, _)) => token_text.push_str(&text),
                None => sent.push((None, text, Vec::new())),
            }
        }
        let now = Instant::now();
        let elapsed = (now - self.last_output) / sent.len().max(1) as u32;
        self.last_output = now;
        let count = sent.len();
        for (index, (id, text, logprobs)) in sent.into_iter().enumerate() {
            let last = last.filter(|_| index + 1 == count);
            self.push(LogEntry::Token(LogToken { text, id, logprobs, elapsed, at: now - self.started, last }));
        }
    }

    /// Removes the last characters and tokens. The entry does not count skipped tokens.
    pub(super) fn retract(&mut self, chars: usize, tokens: usize) {
        self.engine_tokens = self.engine_tokens.saturating_sub(tokens);
        let kept = self.skipped.partition_point(|&index| index < self.engine_tokens);
        let tokens = tokens.saturating_sub(self.skipped.len() - kept);
        self.skipped.truncate(kept);
        if chars == 0 && tokens == 0 {
            return;
        }
        let keep = self.text.chars().count().saturating_sub(chars);
        let at = self.text.char_indices().nth(keep).map_or(self.text.len(), |(at, _)| at);
        let text = self.text[at..].to_owned();
        self.push(LogEntry::Backtrack(LogBacktrack { chars, tokens, text }));
    }

    /// Merges entries above the maximum into the base text, but none after the first `taken` ones.
    pub(super) fn drop_oldest(&mut self, taken: usize) {
        while self.entries.len() > MAX_ENTRIES
            && self.dropped < taken
            && let Some(oldest) = self.entries.pop_front()
        {
            oldest.apply(&mut self.base);
            self.dropped += 1;
        }
    }

    fn push(&mut self, entry: LogEntry) {
        entry.apply(&mut self.text);
        self.entries.push_back(entry);
    }
}

impl LogEntry {
    /// Applies the entry to the text.
    pub(super) fn apply(&self, text: &mut String) {
        match self {
            Self::Token(token) => text.push_str(&token.text),
            Self::Backtrack(removed) => text.truncate(text.len().saturating_sub(removed.text.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Alternative, TokenMeasurement};
    use crate::model::grammar::testing::{CONTROL, END, vocabulary};

    fn token(text: &str) -> LogEntry {
        let (elapsed, at) = (Duration::ZERO, Duration::ZERO);
        LogEntry::Token(LogToken { text: text.into(), id: Some(1), logprobs: Vec::new(), elapsed, at, last: None })
    }

    fn log(texts: &[&str]) -> RunLog {
        let mut log = RunLog::new(None);
        texts.iter().for_each(|text| log.push(token(text)));
        log
    }

    #[test]
    fn backtrack_reports_removed_tokens() {
        let mut log = log(&["a", "é€", "", "xyz"]);
        log.retract(4, 3);
        let removed =
            |chars, tokens, text: &str| LogEntry::Backtrack(LogBacktrack { chars, tokens, text: text.into() });
        assert_eq!(log.get(4), Some(&removed(4, 3, "€xyz")));
        assert_eq!((log.text.as_str(), log.len()), ("aé", 5));
        log.retract(0, 1);
        assert_eq!(log.get(5), Some(&removed(0, 1, "")));
    }

    #[test]
    fn tokens_without_an_entry_are_not_counted_as_removed() {
        let mut log = log(&[]);
        let mut add = |token, text: &str, is_hidden| {
            let measurement = TokenMeasurement { token, text: text.into(), logprob: None, rank: None, entropy: None };
            let tokens = vec![MeasuredToken { measurement, alternatives: Vec::new(), is_hidden }];
            let text = if is_hidden { String::new() } else { text.into() };
            log.add(TextDelta { text, tokens, ..TextDelta::default() }, &vocabulary());
        };
        add(END, "<|end|>", true);
        add(97, "a", false);
        add(END, "<|end|>", true);
        add(CONTROL, "<|control|>", true);
        add(98, "b", false);
        log.retract(1, 3);
        log.retract(0, 0);
        let removed = |index| match log.get(index) {
            Some(LogEntry::Backtrack(removed)) => removed.tokens,
            other => panic!("{other:?}"),
        };
        assert_eq!((removed(3), log.len()), (2, 4), "the control token has an entry, the end token has none");
        log.retract(1, 2);
        let last = log.get(4);
        assert!(matches!(last, Some(LogEntry::Backtrack(removed)) if removed.tokens == 1), "{last:?}");
    }

    #[test]
    fn only_requested_log_probabilities_are_stored() {
        let alternative = |token, prob| Alternative { token, text: "x".into(), prob };
        let stored = |logprobs| {
            let mut log = RunLog::new(logprobs);
            let measurement =
                TokenMeasurement { token: 97, text: "a".into(), logprob: Some(-0.5), rank: None, entropy: None };
            let alternatives = vec![alternative(97, 0.6), alternative(98, 0.2), alternative(99, 0.1)];
            let tokens = vec![MeasuredToken { measurement, alternatives, is_hidden: false }];
            log.add(TextDelta { text: "a".into(), tokens, ..TextDelta::default() }, &vocabulary());
            match log.get(0) {
                Some(LogEntry::Token(token)) => token.logprobs.len(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!([None, Some(0), Some(1), Some(2), Some(9)].map(stored), [0, 1, 1, 2, 3]);
    }

    #[test]
    fn text_is_known_at_every_index() {
        let mut log = log(&["a", "b", "c"]);
        log.retract(2, 2);
        let texts: Vec<String> = (0..6).map(|index| log.text_at(index).1).collect();
        assert_eq!(texts, ["", "a", "ab", "abc", "a", "a"]);
        assert_eq!(log.text_at(9).0, 4);
    }

    #[test]
    fn oldest_entries_of_a_long_run_become_text() {
        let mut log = log(&[]);
        for _ in 0..MAX_ENTRIES + 10 {
            log.push(token("x"));
        }
        log.drop_oldest(4);
        assert_eq!((log.get(3), log.get(4)), (None, Some(&token("x"))), "a follower still needs entry 4");
        log.drop_oldest(usize::MAX);
        assert_eq!((log.text_at(0).0, log.text_at(0).1.len(), log.len()), (10, 10, MAX_ENTRIES + 10));
        assert_eq!((log.get(9), log.get(10)), (None, Some(&token("x"))));
    }
}
