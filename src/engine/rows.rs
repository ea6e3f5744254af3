//! Tokens with the attention that they were drawn with, on their way to a client that wants each of them.
//!
//! A row waits with its token: through a mod's calls, through what a mod holds back, and until the client reads.

use super::run::Run;
use super::{CLIENT_CHANNEL, Output, ReportOptions, TextDelta};
use crate::model::Model;
use crate::model::llama::AttentionRow;
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of attention that may wait for a client that does not read, before its run pauses.
const WAITING_BYTES: usize = 64 << 20;

/// Outputs that may wait for the client of such a run.
pub(super) fn places(report: ReportOptions, model: &Model, context: u32) -> usize {
    if !report.attention_rows {
        return CLIENT_CHANNEL;
    }
    let card = model.card();
    let row_bytes = size_of::<f32>() * card.layers as usize * card.heads as usize * context as usize;
    (WAITING_BYTES / row_bytes.max(1)).clamp(2, CLIENT_CHANNEL)
}

/// Rows of one run, for a client that wants them.
#[derive(Debug, Default)]
pub(super) struct Rows {
    wanted: bool,
    /// Of tokens that are being appended.
    drawn: Vec<Option<Arc<AttentionRow>>>,
    /// Of tokens that the client has not been told of, in their order.
    unsent: VecDeque<Option<Arc<AttentionRow>>>,
}

impl Rows {
    pub fn new(report: ReportOptions) -> Self {
        Self { wanted: report.attention_rows, ..Self::default() }
    }

    /// The next token that is appended was drawn with this row.
    pub fn drawn_with(&mut self, row: Option<Arc<AttentionRow>>) {
        if self.wanted {
            self.drawn.push(row);
        }
    }

    /// What was noted of tokens that are not appended after all is void.
    pub fn forget_drawn(&mut self) {
        self.drawn.clear();
    }

    /// So many tokens were appended.
    pub fn added(&mut self, tokens: usize) {
        if self.wanted {
            self.drawn.resize(tokens, None);
            self.unsent.extend(self.drawn.drain(..));
        }
    }

    /// Only the first `unsent` of the tokens that the client has not been told of are left.
    pub fn truncate(&mut self, unsent: usize) {
        self.unsent.truncate(unsent);
    }

    fn take(&mut self, tokens: usize) -> Vec<Option<Arc<AttentionRow>>> {
        self.unsent.drain(..tokens.min(self.unsent.len())).collect()
    }
}

impl Run {
    /// Whether the attention of the token at `position` is read when it is decoded: that of the last one always, that of others
    /// when a token behind them is one of the answer's and the client wants its row.
    pub(super) fn captures(&self, position: usize, output: bool) -> bool {
        let last = position + 1 == self.sequence.len();
        self.request.attention && (last || (output && self.rows.wanted && position + 1 >= self.prompt_len))
    }

    /// Hands the client all tokens but the last `holdback`. A token that would end the generation waits: a mod may go on
    /// behind it.
    pub(super) fn send_tokens(&mut self, holdback: usize) {
        let ends = self.unsent.back().is_some_and(|(measure, _)| self.ends_generation(measure.token));
        self.hand_over(self.unsent.len().saturating_sub(holdback.max(usize::from(ends))));
    }

    /// Hands the client what is left at the end of the run. The token that ended the generation is no part of the answer.
    pub(super) fn send_last_tokens(&mut self) {
        let ends = self.unsent.back().is_some_and(|(measure, _)| self.ends_generation(measure.token));
        self.hand_over(self.unsent.len() - usize::from(ends));
    }

    fn hand_over(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let tokens: Vec<_> = self.unsent.drain(..count).collect();
        let text = tokens.iter().map(|(measure, _)| measure.text.as_str()).collect();
        let rows = self.rows.take(count);
        self.outbox.push_back(Output::Text(TextDelta { text, tokens, rows, ..TextDelta::default() }));
    }

    /// Tells a client that wants each token that the last `count` it was told of are gone.
    pub(super) fn tell_taken_back(&mut self, count: usize) {
        if self.request.report.per_token && count > 0 {
            self.outbox.push_back(Output::Text(TextDelta { retracted: count, ..TextDelta::default() }));
        }
    }
}
