//! Text of the answer, and its tokens that were not released yet.
//!
//! Decides what may be released to the client: only complete characters, nothing within the holdback of the mods, and
//! nothing that could be the start of a stop string. Released text is in the outbox, from which the scheduler sends it.

use super::outbox::Outbox;
use super::output_text::OutputText;
use crate::engine::output::{MeasuredToken, Output, TextDelta};
use crate::engine::request::{Limits, ReportOptions};
use crate::events::{Alternative, TokenId, TokenMeasurement};
use std::collections::VecDeque;

/// Text of the generated tokens, and the tokens to release.
pub struct PendingAnswer {
    text: OutputText,
    /// The last tokens of the answer, which were not released.
    unreleased: VecDeque<MeasuredToken>,
    delivery: Delivery,
}

/// Form in which the client receives the answer.
enum Delivery {
    /// Text, which ends before a stop string. A token is released with the end of its text.
    Text,
    /// Whole tokens, see [`ReportOptions::per_token`].
    Tokens {
        /// Number of characters of each released token.
        released_chars: Vec<usize>,
    },
}

impl PendingAnswer {
    /// Creates an empty answer.
    pub fn new(limits: &Limits, report: ReportOptions) -> Self {
        Self {
            text: OutputText::new(&limits.stop).with_min_indent(limits.min_indent as usize),
            unreleased: VecDeque::new(),
            delivery: if report.per_token { Delivery::Tokens { released_chars: Vec::new() } } else { Delivery::Text },
        }
    }

    /// Returns the text, for its stop strings and line breaks.
    pub fn text(&self) -> &OutputText {
        &self.text
    }

    /// Appends the text of a token. Returns the characters that it completes. A hidden token adds no text.
    pub fn push(&mut self, piece: &[u8], hidden: bool) -> String {
        self.text.push(piece, hidden)
    }

    /// Queues the tokens that were pushed last. `alternatives` are the most probable tokens at the position of the first;
    /// `None` for forced tokens.
    pub fn queue(&mut self, tokens: Vec<TokenMeasurement>, alternatives: Option<Vec<Alternative>>) {
        let mut alternatives = alternatives.into_iter();
        let first = self.text.tokens() - tokens.len();
        self.unreleased.extend(tokens.into_iter().enumerate().map(|(index, measurement)| {
            let alternatives = alternatives.next().unwrap_or_default();
            MeasuredToken { measurement, alternatives, is_hidden: !self.text.has_text(first + index) }
        }));
    }

    /// Returns the number of tokens that were not released.
    pub fn unreleased(&self) -> usize {
        self.unreleased.len()
    }

    /// Returns the ids of the tokens that were not released.
    pub fn unreleased_ids(&self) -> impl Iterator<Item = TokenId> {
        self.unreleased.iter().map(|token| token.measurement.token)
    }

    /// Returns the last token that was not released.
    pub fn last_unreleased(&self) -> Option<TokenId> {
        self.unreleased.back().map(|token| token.measurement.token)
    }

    /// Takes the text and tokens that may be released while the last `holdback` tokens are held back. `ends` is true if
    /// the last unreleased token ends the generation. A client that receives whole tokens does not get that token yet,
    /// since a mod may continue after it.
    pub fn take_releasable(&mut self, holdback: usize, ends: bool) -> Option<TextDelta> {
        let end = self.text.tokens().saturating_sub(holdback);
        match self.delivery {
            Delivery::Text => {
                let text = self.text.take_releasable(holdback);
                // Hidden tokens have no text, but are held back, too.
                self.take_with_text(text, self.text.released_tokens().min(end))
            }
            Delivery::Tokens { .. } => self.take_tokens(end.min(self.text.tokens() - usize::from(ends))),
        }
    }

    /// Takes everything that was not released, at the end of the run. `ends` is true if the last unreleased token ended
    /// the generation. A client that receives whole tokens does not get that token, which is not part of the answer.
    pub fn take_remaining(&mut self, ends: bool) -> Option<TextDelta> {
        match self.delivery {
            Delivery::Text => {
                let text = self.text.take_remaining();
                self.take_with_text(text, self.text.released_tokens())
            }
            Delivery::Tokens { .. } => self.take_tokens(self.text.tokens() - usize::from(ends)),
        }
    }

    /// Discards the tokens after the first `kept` that were not released. Returns their number.
    pub fn discard_after(&mut self, kept: usize, outbox: &mut Outbox) -> usize {
        let discarded = self.text.tokens().saturating_sub(kept.max(self.released_tokens()));
        if discarded > 0 {
            self.retract(self.text.tokens() - discarded, outbox);
        }
        discarded
    }

    /// Removes all but the first `generated` tokens, and retracts those that were released.
    pub fn retract(&mut self, generated: usize, outbox: &mut Outbox) {
        let released = self.released_tokens();
        self.unreleased.truncate(generated.saturating_sub(released));
        let tokens = released.saturating_sub(generated);
        let mut chars = self.text.truncate(generated);
        if let Delivery::Tokens { released_chars } = &mut self.delivery {
            chars = released_chars.drain(released - tokens..).sum();
            self.text.mark_released(released - tokens);
        }
        if chars > 0 || tokens > 0 {
            outbox.push(Output::Retract { chars, tokens });
        }
    }

    /// Replaces the stop strings; text that was released is not searched.
    pub fn set_stop_strings(&mut self, stop: &[String]) {
        self.text.set_stop_strings(stop.iter().map(|text| text.as_bytes().to_vec()).collect());
    }

    fn released_tokens(&self) -> usize {
        self.text.tokens() - self.unreleased.len()
    }

    /// Takes the unreleased tokens before the index `end`, with their text.
    fn take_tokens(&mut self, end: usize) -> Option<TextDelta> {
        let delta = self.take_with_text(String::new(), end)?;
        if let Delivery::Tokens { released_chars } = &mut self.delivery {
            released_chars.extend(delta.tokens.iter().map(|token| token.measurement.text.chars().count()));
        }
        self.text.mark_released(self.released_tokens());
        let text = delta.tokens.iter().map(|token| token.measurement.text.as_str()).collect();
        Some(TextDelta { text, ..delta })
    }

    /// Takes the unreleased tokens before the index `end`, and adds them to the text.
    fn take_with_text(&mut self, text: String, end: usize) -> Option<TextDelta> {
        let count = end.saturating_sub(self.released_tokens());
        let tokens: Vec<_> = self.unreleased.drain(..count).collect();
        (!text.is_empty() || !tokens.is_empty()).then(|| TextDelta { text, tokens, ..TextDelta::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::{Outbox, PendingAnswer, TextDelta, TokenMeasurement};
    use crate::engine::request::{Limits, ReportOptions};

    fn answer(per_token: bool) -> PendingAnswer {
        PendingAnswer::new(&Limits::new(9), ReportOptions { per_token, ..ReportOptions::default() })
    }

    fn push(answer: &mut PendingAnswer, piece: &str, hidden: bool) {
        answer.push(piece.as_bytes(), hidden);
        let measurement = TokenMeasurement { token: 1, text: piece.into(), logprob: None, rank: None, entropy: None };
        answer.queue(vec![measurement], None);
    }

    fn released(delta: Option<TextDelta>) -> (String, usize) {
        delta.map_or_else(Default::default, |delta| (delta.text, delta.tokens.len()))
    }

    #[test]
    fn hidden_tokens_are_held_back() {
        let (mut answer, mut outbox) = (answer(false), Outbox::default());
        push(&mut answer, "a", false);
        push(&mut answer, "<hidden>", true);
        assert_eq!(released(answer.take_releasable(1, false)), ("a".into(), 1));
        answer.retract(1, &mut outbox);
        assert!(outbox.is_empty(), "nothing was released");
        push(&mut answer, "<hidden>", true);
        assert_eq!(released(answer.take_remaining(false)), (String::new(), 1));
    }

    #[test]
    fn released_tokens_are_not_discarded() {
        for (kept, discarded) in [(0, "bc"), (2, "c"), (3, ""), (9, "")] {
            let (mut answer, mut outbox) = (answer(false), Outbox::default());
            ["a", "b", "c"].into_iter().for_each(|piece| push(&mut answer, piece, false));
            assert_eq!(released(answer.take_releasable(2, false)), ("a".into(), 1));
            answer.discard_after(kept, &mut outbox);
            assert!(outbox.is_empty(), "nothing is retracted");
            let remaining = answer.take_remaining(false);
            assert_eq!(released(remaining).0 + discarded, "bc", "{kept}");
        }
    }

    #[test]
    fn new_stop_strings_do_not_apply_to_released_tokens() {
        let mut answer = answer(true);
        push(&mut answer, "one", false);
        assert_eq!(released(answer.take_releasable(0, false)), ("one".into(), 1));
        answer.set_stop_strings(&["one".into()]);
        assert!(!answer.text().is_stopped(answer.text().tokens()));
        push(&mut answer, "one", false);
        assert!(answer.text().is_stopped(answer.text().tokens()));
    }
}
