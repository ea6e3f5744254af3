//! Sends signals from the decode thread to the recorder. The end of a run is its last signal.
//!
//! Nothing here waits for the recorder, except at the end of the decode thread. If the recorder's channel is full,
//! signals are queued, and the scheduler decodes nothing until they are sent.

pub mod attention_encoder;
pub mod durability;
pub mod event_buffer;

use crate::events::{RunEnd, RunId, StoredHeads, TraceItem};
use crate::model::llama::AttentionRow;
use crate::recording::Signal;
use attention_encoder::AttentionEncoderThread;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::mpsc::{Sender, error::TrySendError};

/// Connection of the decode thread to the recorder.
pub struct Recording {
    recorder: Sender<Signal>,
    /// Signals that did not fit into the recorder's channel.
    pending: VecDeque<PendingSignal>,
    attention_encoder: Option<AttentionEncoderThread>,
}

/// A signal that was not sent to the recorder yet.
struct PendingSignal {
    signal: Signal,
    /// True if the attention rows that are being encoded must be sent first.
    after_attention: bool,
}

impl Recording {
    /// Creates the connection; without an encoder, no attention is recorded.
    pub fn new(recorder: Sender<Signal>, attention_encoder: Option<AttentionEncoderThread>) -> Self {
        Self { recorder, pending: VecDeque::new(), attention_encoder }
    }

    /// Returns true if the recorder has stopped.
    pub fn is_closed(&self) -> bool {
        self.recorder.is_closed()
    }

    /// Returns true if signals wait for the recorder.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Returns true if `rows` more attention rows can be encoded.
    pub fn has_room_for_attention(&self, rows: usize) -> bool {
        self.attention_encoder.as_ref().is_none_or(|encoder| encoder.has_room(rows))
    }

    /// Sends the queued signals. Returns false if not all fit into the recorder's channel.
    pub fn flush(&mut self) -> bool {
        while let Some(next) = self.pending.pop_front() {
            if let Err(next) = self.try_send(next) {
                self.pending.push_front(next);
                return false;
            }
        }
        true
    }

    /// Sends a signal, after all earlier ones.
    pub fn send(&mut self, signal: Signal) {
        self.queue(PendingSignal { signal, after_attention: false });
    }

    /// Sends the items of a run, if there are any.
    pub fn send_items(&mut self, run: RunId, items: Vec<TraceItem>) {
        if !items.is_empty() {
            self.send(Signal::Items(run, Arc::new(items)));
        }
    }

    /// Encodes and sends the attention of the step whose `ForwardPass` event has the number `order`.
    pub fn send_attention_row(&self, run: RunId, order: i32, captured: Arc<AttentionRow>, stored: StoredHeads) {
        if let Some(encoder) = &self.attention_encoder {
            encoder.send_row(run, order, captured, stored);
        }
    }

    /// Sends the end of a run. With `after_attention`, it is sent after the attention rows that are being encoded.
    pub fn send_end(&mut self, run: RunId, end: Arc<RunEnd>, after_attention: bool) {
        self.queue(PendingSignal { signal: Signal::Ended(run, end), after_attention });
    }

    /// Sends everything that is queued, and waits for it: the decode thread is about to end.
    pub fn finish(mut self) {
        for next in std::mem::take(&mut self.pending) {
            match &self.attention_encoder {
                Some(encoder) if next.after_attention => encoder.forward(next.signal),
                _ => {
                    if self.recorder.blocking_send(next.signal).is_err() {
                        return;
                    }
                }
            }
        }
        // Waits for the ends of runs that follow attention rows.
        if let Some(encoder) = self.attention_encoder.take() {
            encoder.finish();
        }
    }

    fn queue(&mut self, next: PendingSignal) {
        let kept = if self.pending.is_empty() { self.try_send(next).err() } else { Some(next) };
        self.pending.extend(kept);
    }

    /// Tries to send a signal. Returns it if the recorder's channel is full.
    fn try_send(&self, next: PendingSignal) -> Result<(), PendingSignal> {
        let PendingSignal { signal, after_attention } = next;
        match &self.attention_encoder {
            Some(encoder) if after_attention => encoder.forward(signal),
            _ => {
                if let Err(TrySendError::Full(signal)) = self.recorder.try_send(signal) {
                    return Err(PendingSignal { signal, after_attention });
                }
            }
        }
        Ok(())
    }
}
