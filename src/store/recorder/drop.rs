//! Runs that the recorder stops recording before their end.

use super::{MAX_MEMORY_ITEMS, RecordingTask};
use crate::events::{RunId, RunStatus};
use crate::recording::NotStored;
use crate::store::record::Record;
use std::collections::HashSet;

impl RecordingTask {
    /// Handles a panic during the write of a batch. The stored parts of its runs remain and are marked as interrupted.
    pub(super) fn on_write_panic(&mut self, runs: HashSet<RunId>, to_interrupt: &[RunId]) {
        self.to_interrupt.extend(to_interrupt);
        for run_id in runs {
            self.drop_run(run_id, NotStored::RecorderFailed);
        }
    }

    /// Drops runs that require durability, and the oldest ones beyond the memory limit, while neither the database nor the
    /// disk accepts anything.
    pub(super) fn drop_excess_runs(&mut self) {
        let mut waiting: HashSet<RunId> = self.pending.iter().map(Record::run_id).collect();
        waiting.retain(|run_id| self.target.durability_acks.is_requested(*run_id));
        for run_id in waiting {
            self.drop_run(run_id, NotStored::NoRoom);
        }
        while self.pending_items > MAX_MEMORY_ITEMS
            && let Some(oldest) = self.pending.first().map(Record::run_id)
        {
            self.drop_run(oldest, NotStored::MemoryFull);
        }
    }

    /// Drops a run: stops recording it and removes its records. Informs the client that waits for durability, and the
    /// subscribers.
    pub(super) fn drop_run(&mut self, run_id: RunId, reason: NotStored) {
        if reason == NotStored::Removed {
            tracing::warn!(run.id = %run_id, "stopped recording a removed run");
        } else {
            tracing::error!(run.id = %run_id, %reason, "stopped recording a run");
        }
        let has_end =
            self.pending.iter().any(|record| matches!(record, Record::Ended { .. }) && record.run_id() == run_id);
        self.pending.retain(|record| record.run_id() != run_id);
        self.pending_items = self.pending.iter().map(Record::weight).sum();
        self.unsaved_rows.retain(|row| row.summary.run_id != run_id);
        if self.runs.remove(&run_id).is_some() && !has_end {
            self.dropped_active.insert(run_id);
        }
        self.to_interrupt.push(run_id);
        self.target.durability_acks.resolve(run_id, Err(reason));
        self.target.unstored.remove(run_id);
        self.target.live.end_run(run_id, RunStatus::Interrupted);
    }
}
