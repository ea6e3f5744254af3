//! What the recorder is told: each run's signals in order, the end behind everything else. Nothing here waits for it; what it
//! has no room for is kept, and nothing is decoded meanwhile.

use super::run::Run;
use super::scheduler::{Live, Scheduler};
use crate::events::{RunId, Signal, TraceItem};
use std::sync::Arc;
use tokio::sync::mpsc::error::TrySendError;

/// A signal on its way to the recorder.
pub(super) struct Unrecorded {
    signal: Signal,
    /// Whether rows of attention that are still being coded come first.
    behind_rows: bool,
}

impl Scheduler<'_> {
    /// Sends the recorder what has gathered: what is due, or everything when the thread is about to sleep or is slow.
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

    /// Records what has gathered of a run.
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

    /// Tells the recorder something, behind everything that it was to be told before.
    pub(super) fn signal(&mut self, signal: Signal) {
        self.tell(Unrecorded { signal, behind_rows: false });
    }

    /// The thread is about to end, so that it may wait for the recorder now.
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
        // Ends of runs whose attention is still being coded are behind it.
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

    /// Gives back what there is no room for.
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
