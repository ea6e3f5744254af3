//! Attention rows of a run: the row of the current logits, the row to record, and the rows that go to the client with
//! their tokens.
//!
//! A row waits as long as its token: during calls of mods, while a mod holds text back, and until the client reads.

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
    wanted: bool,
    /// Row of the decode that produced the current logits.
    current: Option<Arc<AttentionRow>>,
    /// True if the current row belongs to an event.
    is_assigned: bool,
    /// Rows to record, with the numbers of their events.
    ready: Vec<(i32, Arc<AttentionRow>)>,
    /// Rows of tokens that are being appended.
    drawn: Vec<Option<Arc<AttentionRow>>>,
    /// Rows of tokens that were not sent yet, in order.
    unsent: VecDeque<Option<Arc<AttentionRow>>>,
    /// Bytes of head rows that were recorded.
    head_bytes: u64,
}

impl TokenAttention {
    /// Creates the state of a run that has no rows.
    pub fn new(request: &Request) -> Self {
        Self { captured: request.attention, wanted: request.report.attention_rows, ..Self::default() }
    }

    /// Returns true if the attention of the token at `position` is captured in its decode: always for the last of `len`
    /// tokens, and for others with logits if the client wants the row of a following token of the answer.
    pub fn captures(&self, position: usize, output: bool, len: usize, prompt_len: usize) -> bool {
        self.captured && (position + 1 == len || (output && self.wanted && position + 1 >= prompt_len))
    }

    /// Notes the row of the decode that produced the current logits.
    pub fn set_current(&mut self, row: Arc<AttentionRow>) {
        self.current = Some(row);
        self.is_assigned = false;
    }

    /// Assigns the current row to the `ForwardPass` event with the number `order`. If a mod removed a sampled token, the
    /// same row leads to the next one; it stays with the first event.
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

    /// Returns the heads of a row to record: the selected ones, until the run's head rows reach their maximum size because
    /// mods removed many tokens.
    pub fn stored_heads(&mut self, selected: &StoredHeads, row: &AttentionRow) -> StoredHeads {
        self.head_bytes += head_rows::row_bytes(selected, row.layer_ids.len(), row.heads, row.row_len.into());
        if self.head_bytes <= head_rows::MAX_BYTES { selected.clone() } else { StoredHeads::None }
    }

    /// Assigns the current row to the next token to append.
    pub fn push_drawn(&mut self) {
        let row = self.current.take();
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

    /// Takes the rows of the first unsent tokens.
    pub fn take(&mut self, tokens: usize) -> Vec<Option<Arc<AttentionRow>>> {
        self.unsent.drain(..tokens.min(self.unsent.len())).collect()
    }
}
