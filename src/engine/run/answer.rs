//! Text of the answer, and its tokens that were not sent yet.
//!
//! Decides what may be sent to the client: only complete characters, nothing within the holdback of the mods, and
//! nothing that could be the start of a stop string.

use super::outbox::Outbox;
use super::output_text::OutputText;
use crate::engine::output::{MeasuredToken, Output, TextDelta};
use crate::engine::request::{Limits, ReportOptions};
use crate::events::{Alternative, TokenId, TokenMeasurement};
use std::collections::VecDeque;

/// Text of the generated tokens, and the tokens to send.
pub struct PendingAnswer {
    text: OutputText,
    /// Tokens that were not sent.
    unsent: VecDeque<MeasuredToken>,
    /// See [`ReportOptions::per_token`].
    per_token: bool,
    /// Number of characters of each sent token; only with `per_token`, otherwise `text` knows the sent text.
    sent_chars: Vec<usize>,
}

impl PendingAnswer {
    /// Creates an empty answer.
    pub fn new(limits: &Limits, report: ReportOptions) -> Self {
        Self {
            text: OutputText::new(&limits.stop).with_min_indent(limits.min_indent as usize),
            unsent: VecDeque::new(),
            per_token: report.per_token,
            sent_chars: Vec::new(),
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

    /// Queues appended tokens. `alternatives` are the most probable tokens at the position of the first; `None` for
    /// forced tokens.
    pub fn queue(&mut self, tokens: Vec<TokenMeasurement>, alternatives: Option<Vec<Alternative>>) {
        let mut alternatives = alternatives.into_iter();
        self.unsent.extend(tokens.into_iter().map(|measurement| {
            let alternatives = alternatives.next().unwrap_or_default();
            MeasuredToken { measurement, alternatives }
        }));
    }

    /// Returns the number of tokens that were not sent.
    pub fn unsent(&self) -> usize {
        self.unsent.len()
    }

    /// Returns the last token that was not sent.
    pub fn last_unsent(&self) -> Option<TokenId> {
        self.unsent.back().map(|token| token.measurement.token)
    }

    /// Takes the text and tokens that may be sent while the last `holdback` of `generated` tokens are held back. `ends`
    /// is true if the last unsent token ends the generation; that token is not sent yet, since a mod may continue after
    /// it.
    pub fn take_sendable(&mut self, holdback: usize, generated: usize, ends: bool) -> Option<TextDelta> {
        if self.per_token {
            return self.take_tokens(self.unsent.len().saturating_sub(holdback.max(usize::from(ends))));
        }
        let text = self.text.take_sendable(holdback);
        self.take_with_text(text, generated)
    }

    /// Takes everything that was not sent, at the end of the run. `ends` is true if the last unsent token ended the
    /// generation; that token is not part of the answer.
    pub fn take_remaining(&mut self, generated: usize, ends: bool) -> Option<TextDelta> {
        if self.per_token {
            return self.take_tokens(self.unsent.len() - usize::from(ends));
        }
        let text = self.text.take_remaining();
        self.take_with_text(text, generated)
    }

    /// Discards everything of the `generated` tokens that was not sent. The answer ends with the text that was sent.
    pub fn discard_unsent(&mut self, generated: usize) {
        if self.per_token {
            self.text.truncate(generated - self.unsent.len());
        } else {
            self.text.discard_unsent();
        }
        self.unsent.clear();
    }

    /// Removes all but the first `generated` of `before` tokens, and retracts those that were sent.
    pub fn retract(&mut self, before: usize, generated: usize, outbox: &mut Outbox) {
        let unsent_from = before - self.unsent.len();
        self.unsent.truncate(generated.saturating_sub(unsent_from));
        let tokens = unsent_from.saturating_sub(generated);
        let mut chars = self.text.truncate(generated);
        if self.per_token {
            chars = self.sent_chars.split_off(self.sent_chars.len().saturating_sub(tokens)).iter().sum();
        }
        if chars > 0 || tokens > 0 {
            outbox.push(Output::Retract { chars, tokens });
        }
    }

    /// Replaces the stop strings; text that was already sent is not searched.
    pub fn set_stop_strings(&mut self, stop: &[String]) {
        self.text.set_stop_strings(stop.iter().map(|text| text.as_bytes().to_vec()).collect());
    }

    fn take_tokens(&mut self, count: usize) -> Option<TextDelta> {
        if count == 0 {
            return None;
        }
        let tokens: Vec<_> = self.unsent.drain(..count).collect();
        self.sent_chars.extend(tokens.iter().map(|token| token.measurement.text.chars().count()));
        let text = tokens.iter().map(|token| token.measurement.text.as_str()).collect();
        Some(TextDelta { text, tokens, ..TextDelta::default() })
    }

    fn take_with_text(&mut self, text: String, generated: usize) -> Option<TextDelta> {
        let unsent_from = generated - self.unsent.len();
        let count = self.text.sent_tokens().saturating_sub(unsent_from);
        let tokens: Vec<_> = self.unsent.drain(..count.min(self.unsent.len())).collect();
        (!text.is_empty() || !tokens.is_empty()).then(|| TextDelta { text, tokens, ..TextDelta::default() })
    }
}
