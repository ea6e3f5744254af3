//! The writer of batches: one task at a time, so that the recorder receives signals meanwhile.

use super::persist::{PersistOutcome, PersistResult, WriteState, persist};
use super::{MAX_PENDING_ITEMS, RecordingTask, complete_flushes};
use crate::events::RunId;
use crate::store::Flush;
use crate::store::record::Record;
use crate::store::spool::Spool;
use std::collections::HashSet;
use std::sync::Arc;
use tokio::sync::Mutex;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

pub(super) struct BatchWriter {
    /// Shared, so that the spool survives a panic of the task that writes a batch.
    spool: Arc<Mutex<Spool>>,
    in_progress: Option<BatchInProgress>,
    /// True if the spool file was empty after the last batch.
    pub is_drained: bool,
    /// True if neither the database nor the disk accepted the last batch.
    pub is_failing: bool,
}

/// A batch that is being written.
pub(super) struct BatchInProgress {
    task: JoinHandle<PersistResult>,
    /// Runs of the batch, in case the write panics.
    runs: HashSet<RunId>,
    to_interrupt: Vec<RunId>,
    flushes: Vec<Flush>,
    /// Time at which its oldest record was received.
    received_at: Option<Instant>,
}

impl BatchWriter {
    pub fn new(spool: Spool) -> Self {
        let is_drained = spool.is_drained();
        Self { spool: Arc::new(Mutex::new(spool)), in_progress: None, is_drained, is_failing: false }
    }

    /// Returns true while a batch is being written.
    pub fn is_busy(&self) -> bool {
        self.in_progress.is_some()
    }

    /// Starts to write everything that is pending. No other batch may be in progress.
    pub fn start(&mut self, recorder: &mut RecordingTask) {
        let state =
            WriteState { is_overloaded: recorder.pending_items >= MAX_PENDING_ITEMS, previous_failed: self.is_failing };
        let flushes = std::mem::take(&mut recorder.flushes);
        let received_at = recorder.received_at.take();
        let batch = recorder.take_batch();
        let (runs, to_interrupt) = (batch.records.iter().map(Record::run_id).collect(), batch.to_interrupt.clone());
        let (writer, spool) = (recorder.target.writer.clone(), Arc::clone(&self.spool));
        let task = tokio::spawn(async move { persist(&writer, &mut *spool.lock().await, batch, state).await });
        self.in_progress = Some(BatchInProgress { task, runs, to_interrupt, flushes, received_at });
    }

    /// Waits for the end of the batch in progress, and returns it for [`BatchWriter::finish`]; `None` without such a
    /// batch.
    pub async fn ended(&mut self) -> Option<(BatchInProgress, Result<PersistResult, JoinError>)> {
        let result = (&mut self.in_progress.as_mut()?.task).await;
        Some((self.in_progress.take()?, result))
    }

    /// Informs the recorder and the readers of the result of a batch.
    pub fn finish(
        &mut self,
        batch: BatchInProgress,
        result: Result<PersistResult, JoinError>,
        recorder: &mut RecordingTask,
    ) {
        self.is_drained = self.spool.try_lock().is_ok_and(|spool| {
            recorder.target.metrics.set_spool_bytes(spool.undrained_bytes());
            spool.is_drained()
        });
        let Ok(result) = result else {
            recorder.on_write_panic(batch.runs, &batch.to_interrupt);
            complete_flushes(batch.flushes, false);
            return;
        };
        let was_failing = recorder.target.metrics.is_failing();
        self.is_failing = result.outcome == PersistOutcome::Failed;
        recorder.count_batch(result.outcome, batch.received_at);
        recorder.on_written(result, self.is_drained);
        // A failed batch whose runs were all dropped leaves nothing to write but their interruption. Batches without
        // records succeed even if nothing can be written.
        let is_failing = self.is_failing || (was_failing && !recorder.to_interrupt.is_empty());
        if was_failing && !is_failing {
            tracing::info!("runs can be stored or spooled again");
        }
        recorder.target.metrics.set_failing(is_failing);
        complete_flushes(batch.flushes, self.is_drained && !self.is_failing);
    }

    /// Removes the spool file if it is drained; the next process drains it otherwise.
    pub fn close(self) {
        if let Some(spool) = Arc::into_inner(self.spool).map(Mutex::into_inner).filter(Spool::is_drained) {
            spool.remove();
        }
    }
}
