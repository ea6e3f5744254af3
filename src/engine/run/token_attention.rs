//! Attention rows of a run: the row of the current logits, rows to record, and rows to send to the client together with
//! their tokens.

use crate::engine::head_rows;
use crate::engine::request::Request;
use crate::events::StoredHeads;
use crate::model::llama::AttentionRow;
use std::collections::VecDeque;
use std::sync::Arc;

/// Attention rows of one run.
#[derive(Debug, Default)]
pub struct TokenAttention {
    /// True if attention is captured and recorded.
    captured: bool,
    /// True if the client receives the row of each token.
    sent: bool,
    /// Row of the decode that produced the current logits.
    current: Option<Arc<AttentionRow>>,
    /// True if the current row belongs to an event.
    is_assigned: bool,
    /// Rows to record, with the numbers of their events.
    ready: Vec<(i32, Arc<AttentionRow>)>,
    /// Rows of tokens that are about to be appended.
    drawn: Vec<Option<Arc<AttentionRow>>>,
    /// Rows of tokens that were not released yet, in order.
    unreleased: VecDeque<Option<Arc<AttentionRow>>>,
    /// Bytes of the recorded rows of selected heads.
    head_bytes: u64,
}

impl TokenAttention {
    /// Creates the state of a run that has no rows.
    pub fn new(request: &Request) -> Self {
        Self { captured: request.attention, sent: request.report.attention_rows, ..Self::default() }
    }

    /// Returns true if the attention of the token at `position` is captured in its decode: for the last of `len`
    /// tokens, and, if rows are sent to the client, for every token with `logits` that a token of the answer
    /// follows.
    pub fn is_captured(&self, position: usize, logits: bool, len: usize, prompt_len: usize) -> bool {
        self.captured && (position + 1 == len || (logits && self.sent && position + 1 >= prompt_len))
    }

    /// Sets the row of the decode that produced the current logits.
    pub fn set_current(&mut self, row: Arc<AttentionRow>) {
        self.current = Some(row);
        self.is_assigned = false;
    }

    /// Assigns the current row to the `ForwardPass` event with the number `order`. A row is recorded only with its
    /// first event: after a backtrack, the same logits and row give the next token, too.
    pub fn assign_event(&mut self, order: i32) {
        if let Some(current) = &self.current
            && !std::mem::replace(&mut self.is_assigned, true)
        {
            self.ready.push((order, Arc::clone(current)));
        }
    }

    /// Takes the rows to record, with the numbers of their events.
    pub fn take_ready(&mut self) -> Vec<(i32, Arc<AttentionRow>)> {
        std::mem::take(&mut self.ready)
    }

    /// Returns the heads of a row to record: the selected ones, or none once the rows of the run exceed their maximum
    /// size, which is possible if mods remove many tokens.
    pub fn stored_heads(&mut self, selected: &StoredHeads, row: &AttentionRow) -> StoredHeads {
        self.head_bytes += head_rows::row_bytes(selected, row.layer_ids.len(), row.heads, row.row_len.into());
        if self.head_bytes <= head_rows::MAX_BYTES { selected.clone() } else { StoredHeads::None }
    }

    /// Assigns the current row to the next token to append.
    pub fn push_drawn(&mut self) {
        let row = self.current.take();
        if self.sent {
            self.drawn.push(row);
        }
    }

    /// Discards the rows of tokens that were not appended.
    pub fn clear_drawn(&mut self) {
        self.drawn.clear();
    }

    /// Queues the rows of `tokens` tokens that were appended.
    pub fn queue(&mut self, tokens: usize) {
        if self.sent {
            self.drawn.resize(tokens, None);
            self.unreleased.extend(self.drawn.drain(..));
        }
    }

    /// Keeps only the rows of the first `unreleased` unreleased tokens.
    pub fn truncate(&mut self, unreleased: usize) {
        self.unreleased.truncate(unreleased);
    }

    /// Takes the rows of the first unreleased tokens.
    pub fn take(&mut self, tokens: usize) -> Vec<Option<Arc<AttentionRow>>> {
        self.unreleased.drain(..tokens.min(self.unreleased.len())).collect()
    }
}
