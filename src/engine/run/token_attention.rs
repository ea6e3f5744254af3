//! Per-token output with attention rows, for clients that request each token.
//!
//! A row waits together with its token: during calls of mods, while a mod holds text back, and until the client reads.

use crate::engine::output::{CLIENT_CHANNEL, Output, TextDelta};
use crate::engine::request::ReportOptions;
use crate::engine::run::Run;
use crate::model::Model;
use crate::model::llama::AttentionRow;
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum bytes of attention queued for a client that does not read, before its run pauses.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Returns the capacity of the output channel of a run.
pub fn output_capacity(report: ReportOptions, model: &Model, context: u32) -> usize {
    if !report.attention_rows {
        return CLIENT_CHANNEL;
    }
    let card = model.card();
    let row_bytes = size_of::<f32>() * card.layers as usize * card.heads as usize * context as usize;
    (MAX_WAITING_BYTES / row_bytes.max(1)).clamp(2, CLIENT_CHANNEL)
}

/// Attention rows of one run that wait for the client.
#[derive(Debug, Default)]
pub struct TokenAttention {
    wanted: bool,
    /// Rows of tokens that are being appended.
    drawn: Vec<Option<Arc<AttentionRow>>>,
    /// Rows of tokens that were not sent yet, in order.
    unsent: VecDeque<Option<Arc<AttentionRow>>>,
}

impl TokenAttention {
    pub fn new(report: ReportOptions) -> Self {
        Self { wanted: report.attention_rows, ..Self::default() }
    }

    /// Adds the row of the next token to append.
    pub fn push_drawn(&mut self, row: Option<Arc<AttentionRow>>) {
        if self.wanted {
            self.drawn.push(row);
        }
    }

    /// Discards rows of tokens that are not appended after all.
    pub fn clear_drawn(&mut self) {
        self.drawn.clear();
    }

    /// Assigns the collected rows to `tokens` appended tokens.
    pub fn added(&mut self, tokens: usize) {
        if self.wanted {
            self.drawn.resize(tokens, None);
            self.unsent.extend(self.drawn.drain(..));
        }
    }

    /// Keeps only the rows of the first `unsent` unsent tokens.
    pub fn truncate(&mut self, unsent: usize) {
        self.unsent.truncate(unsent);
    }

    fn take(&mut self, tokens: usize) -> Vec<Option<Arc<AttentionRow>>> {
        self.unsent.drain(..tokens.min(self.unsent.len())).collect()
    }
}

impl Run {
    /// Returns true if the attention of the token at `position` is captured in its decode: always for the last token,
    /// and for others if the client wants the row of a following token of the answer.
    pub fn captures(&self, position: usize, output: bool) -> bool {
        let last = position + 1 == self.sequence.len();
        self.request.attention && (last || (output && self.token_attention.wanted && position + 1 >= self.prompt_len))
    }

    /// Sends the client all tokens except the last `holdback`. A token that would end the generation waits, since a mod
    /// may continue after it.
    pub fn send_tokens(&mut self, holdback: usize) {
        let ends = self.unsent.back().is_some_and(|(measure, _)| self.ends_generation(measure.token));
        self.send_first_tokens(self.unsent.len().saturating_sub(holdback.max(usize::from(ends))));
    }

    /// Sends the remaining tokens at the end of the run. The token that ended the generation is not part of the answer.
    pub fn send_last_tokens(&mut self) {
        let ends = self.unsent.back().is_some_and(|(measure, _)| self.ends_generation(measure.token));
        self.send_first_tokens(self.unsent.len() - usize::from(ends));
    }

    fn send_first_tokens(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let tokens: Vec<_> = self.unsent.drain(..count).collect();
        let text = tokens.iter().map(|(measure, _)| measure.text.as_str()).collect();
        let rows = self.token_attention.take(count);
        self.outbox.push_back(Output::Text(TextDelta { text, tokens, rows, ..TextDelta::default() }));
    }

    /// Reports to a client with `per_token` that its last `count` tokens were removed.
    pub fn report_retraction(&mut self, count: usize) {
        if self.request.report.per_token && count > 0 {
            self.outbox.push_back(Output::Text(TextDelta { retracted: count, ..TextDelta::default() }));
        }
    }
}
