//! Signals to the recorder: each run's signals in order, the end of the run last. Nothing here waits for the recorder.
//! Signals that it has no room for are queued, and nothing is decoded until they are sent.

use super::run::Run;
use super::scheduler::{Live, Scheduler};
use crate::events::{RunId, Signal, TraceItem};
use std::sync::Arc;
use tokio::sync::mpsc::error::TrySendError;

/// A signal that was not sent to the recorder yet.
pub(super) struct Unrecorded {
    signal: Signal,
    /// True if attention rows that are still being encoded must be sent first.
    behind_rows: bool,
}

impl Scheduler<'_> {
    /// Sends collected events to the recorder: those that are due, or all of them before the thread sleeps and after
    /// slow decodes.
    pub(super) fn record(&mut self, everything: bool) {
        while let Some(next) = self.unrecorded.pop_front() {
            if let Err(next) = self.try_send(next) {
                self.unrecorded.push_front(next);
                return;
            }
        }
        for index in 0..self.slots.len() {
            let Some(mut live) = self.slots[index].live.take() else { continue };
            let items = if everything { Some(live.run.journal.take_all()) } else { live.run.journal.take_due() };
            if let Some(items) = items {
                self.signal_items(live.run.id, items);
            }
            self.hand_over_row(&mut live.run);
            self.slots[index].live = Some(live);
        }
    }

    /// Records the collected events of a run.
    pub(super) fn record_run(&mut self, run: &mut Run) {
        let items = run.journal.take_all();
        self.signal_items(run.id, items);
        self.hand_over_row(run);
    }

    /// Records the last items and the end of a run.
    pub(super) fn record_end(&mut self, mut live: Live) {
        if let Some(last_will) = live.run.last_will.take() {
            last_will.disarm();
        }
        if !live.run.journal.recorded() {
            return;
        }
        self.record_run(&mut live.run);
        if let Some(end) = live.run.end.clone() {
            self.tell(Unrecorded { signal: Signal::Ended(live.run.id, end), behind_rows: live.run.request.attention });
        }
    }

    /// Sends a signal to the recorder, after all earlier ones.
    pub(super) fn signal(&mut self, signal: Signal) {
        self.tell(Unrecorded { signal, behind_rows: false });
    }

    /// Sends everything that is queued. The thread is about to end, so it may wait for the recorder.
    pub(super) fn finish_recording(mut self) {
        for next in std::mem::take(&mut self.unrecorded) {
            match &self.capture {
                Some(capture) if next.behind_rows => capture.pass(next.signal),
                _ => {
                    if self.recorder.blocking_send(next.signal).is_err() {
                        return;
                    }
                }
            }
        }
        // The ends of runs whose attention is still being encoded follow it.
        if let Some(capture) = self.capture.take() {
            capture.finish();
        }
    }

    fn signal_items(&mut self, run: RunId, items: Vec<TraceItem>) {
        if !items.is_empty() {
            self.signal(Signal::Items(run, Arc::new(items)));
        }
    }

    fn hand_over_row(&mut self, run: &mut Run) {
        if let (Some((order, captured)), Some(capture)) = (run.attention_ready.take(), &self.capture)
            && run.journal.recorded()
        {
            capture.row(run.id, order, captured);
        }
    }

    fn tell(&mut self, next: Unrecorded) {
        let kept = if self.unrecorded.is_empty() { self.try_send(next).err() } else { Some(next) };
        self.unrecorded.extend(kept);
    }

    /// Tries to send a signal; returns it if there is no room.
    fn try_send(&self, next: Unrecorded) -> Result<(), Unrecorded> {
        let Unrecorded { signal, behind_rows } = next;
        match &self.capture {
            Some(capture) if behind_rows => capture.pass(signal),
            _ => {
                if let Err(TrySendError::Full(signal)) = self.recorder.try_send(signal) {
                    return Err(Unrecorded { signal, behind_rows });
                }
            }
        }
        Ok(())
    }
}
