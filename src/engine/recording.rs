//! Signals to the recorder: each run's signals in order, the end of the run last. Nothing here waits for the recorder.
//! Signals that it has no room for are queued, and nothing is decoded until they are sent.

use super::run::Run;
use super::scheduler::{ActiveRun, Scheduler};
use crate::events::{RunId, Signal, TraceItem};
use std::sync::Arc;
use tokio::sync::mpsc::error::TrySendError;

/// A signal that was not sent to the recorder yet.
pub(super) struct PendingSignal {
    signal: Signal,
    /// True if attention rows that are still being encoded must be sent first.
    after_attention: bool,
}

impl Scheduler<'_> {
    /// Sends collected events to the recorder: those that are due, or all of them before the thread sleeps and after
    /// slow decodes.
    pub(super) fn flush_events(&mut self, everything: bool) {
        while let Some(next) = self.pending_signals.pop_front() {
            if let Err(next) = self.try_send(next) {
                self.pending_signals.push_front(next);
                return;
            }
        }
        for index in 0..self.slots.len() {
            let Some(mut live) = self.slots[index].active.take() else { continue };
            let items =
                if everything { Some(live.run.event_buffer.take_all()) } else { live.run.event_buffer.take_due() };
            if let Some(items) = items {
                self.send_items(live.run.id, items);
            }
            self.send_attention_row(&mut live.run);
            self.slots[index].active = Some(live);
        }
    }

    /// Records the collected events of a run.
    pub(super) fn record_run(&mut self, run: &mut Run) {
        let items = run.event_buffer.take_all();
        self.send_items(run.id, items);
        self.send_attention_row(run);
    }

    /// Records the last items and the end of a run.
    pub(super) fn record_end(&mut self, mut live: ActiveRun) {
        if let Some(panic_guard) = live.run.panic_guard.take() {
            panic_guard.disarm();
        }
        if !live.run.event_buffer.is_recorded() {
            return;
        }
        self.record_run(&mut live.run);
        if let Some(end) = live.run.end.clone() {
            self.queue_signal(PendingSignal {
                signal: Signal::Ended(live.run.id, end),
                after_attention: live.run.request.attention,
            });
        }
    }

    /// Sends a signal to the recorder, after all earlier ones.
    pub(super) fn send_signal(&mut self, signal: Signal) {
        self.queue_signal(PendingSignal { signal, after_attention: false });
    }

    /// Sends everything that is queued. The thread is about to end, so it may wait for the recorder.
    pub(super) fn finish_recording(mut self) {
        for next in std::mem::take(&mut self.pending_signals) {
            match &self.attention_encoder {
                Some(encoder) if next.after_attention => encoder.forward(next.signal),
                _ => {
                    if self.recorder.blocking_send(next.signal).is_err() {
                        return;
                    }
                }
            }
        }
        // The ends of runs whose attention is still being encoded follow it.
        if let Some(encoder) = self.attention_encoder.take() {
            encoder.finish();
        }
    }

    fn send_items(&mut self, run: RunId, items: Vec<TraceItem>) {
        if !items.is_empty() {
            self.send_signal(Signal::Items(run, Arc::new(items)));
        }
    }

    fn send_attention_row(&mut self, run: &mut Run) {
        if let (Some((order, captured)), Some(encoder)) = (run.attention_ready.take(), &self.attention_encoder)
            && run.event_buffer.is_recorded()
        {
            encoder.row(run.id, order, captured);
        }
    }

    fn queue_signal(&mut self, next: PendingSignal) {
        let kept = if self.pending_signals.is_empty() { self.try_send(next).err() } else { Some(next) };
        self.pending_signals.extend(kept);
    }

    /// Tries to send a signal; returns it if there is no room.
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
