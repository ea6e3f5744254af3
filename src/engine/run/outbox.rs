//! Outputs of a run that its client has not received yet, in order.

use crate::engine::output::Output;
use crate::events::{FinishReason, RunEnd};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Queue of outputs. It stays short, because a run with queued outputs is not decoded.
#[derive(Default)]
pub struct Outbox {
    queue: VecDeque<Output>,
    /// True once the end of the run is being sent.
    has_ended: Arc<AtomicBool>,
}

impl Outbox {
    /// Appends an output.
    pub fn push(&mut self, output: Output) {
        self.queue.push_back(output);
    }

    /// Returns true if nothing waits for the client.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes the next output. The caller sends it immediately.
    pub fn pop(&mut self) -> Option<Output> {
        let output = self.queue.pop_front();
        if matches!(output, Some(Output::Ended(_))) {
            self.has_ended.store(true, Ordering::Release);
        }
        output
    }

    /// Returns true if the next output is the end of the run.
    pub fn is_at_end(&self) -> bool {
        matches!(self.queue.front(), Some(Output::Ended(_)))
    }

    /// Replaces all outputs with the end of the run.
    pub fn replace_with_end(&mut self, end: Arc<RunEnd>) {
        self.queue.clear();
        self.queue.push_back(Output::Ended(end));
    }

    /// Adds the finish reason to the last delta, if it is still queued.
    pub fn mark_last(&mut self, reason: FinishReason) {
        if let Some(Output::Text(delta)) = self.queue.back_mut() {
            delta.last = Some(reason);
        }
    }

    /// Returns the flag that is set before the client receives the end of the run.
    pub fn ended_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.has_ended)
    }
}
