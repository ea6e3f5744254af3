//! The recorder: a task that receives the engine's signals and writes them in batches.
//!
//! Receiving never waits for a write, so no sender waits for the database. For each running run the recorder keeps the
//! fold, from which the counts of the run list and the column file are computed. When the database is unavailable, batches
//! go to the spool file, and so do all later ones until the file is drained, which preserves the order. When the disk is
//! full as well, runs that require durability fail at once, and the others stay in memory up to a limit.

mod batch_writer;
mod drop;
mod metrics;
mod persist;
#[cfg(test)]
mod tests;

use super::record::Record;
use super::spool::Spool;
use super::summary_builder::{RunRow, RunSummaryBuilder};
use super::writer::RunWriter;
use super::{Flush, LiveHub, MAX_QUEUED_SIGNALS};
use crate::events::{RunId, RunStatus, TraceItem};
use crate::recording::{DurabilityAcks, NotStored, Signal, UnstoredRuns};
use crate::trace::document::Numbering;
use batch_writer::BatchWriter;
use persist::{Batch, PersistOutcome, PersistResult};
use std::collections::{HashMap, HashSet};
use std::future::pending;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

pub use metrics::RecorderMetrics;
pub use persist::drain_batch;

/// Maximum time before received items are written.
const FLUSH_INTERVAL: Duration = Duration::from_millis(250);
/// Time for which the start of a run waits for further records. An immediate write would compete with the prompt of the
/// run for the processor, and each run of a burst would need a write of its own.
const START_DELAY: Duration = Duration::from_millis(100);
/// Number of pending items that starts a write.
const BATCH_ITEMS: usize = 512;
/// Maximum items that wait for a slow database. Beyond this number, batches go to the spool file.
const MAX_PENDING_ITEMS: usize = 50_000;
/// Maximum items in memory while neither the database nor the disk accepts them. Beyond this number, the oldest runs are
/// dropped.
const MAX_MEMORY_ITEMS: usize = 100_000;

/// The destination of the recorder, and the recipients of its results.
#[derive(Clone)]
pub struct Target {
    /// Writes with the connections reserved for the recorder.
    pub writer: RunWriter,
    /// Subscribers to live runs.
    pub live: LiveHub,
    /// Runs that require durability.
    pub durability_acks: DurabilityAcks,
    /// Runs that readers must wait for.
    pub unstored: UnstoredRuns,
    /// Counters for operators.
    pub metrics: Arc<RecorderMetrics>,
}

/// The state of the recorder between the received signals and the batches.
struct RecordingTask {
    target: Target,
    runs: HashMap<RunId, RecordedRun>,
    pending: Vec<Record>,
    pending_items: usize,
    /// Dropped runs that are still being generated. Their signals are ignored.
    dropped_active: HashSet<RunId>,
    /// Dropped runs whose stored part must be marked as interrupted.
    to_interrupt: Vec<RunId>,
    /// Final rows of runs whose end is in `pending`, because neither the database nor the disk accepted it.
    unsaved_rows: Vec<RunRow>,
    /// Ended runs of which a part may be only in the spool file.
    ended_in_spool: Vec<RunId>,
    /// Readers that wait until everything received so far is stored.
    flushes: Vec<Flush>,
    /// Time of the next write if a run has started or ended since the last batch; run lists on all servers show such changes
    /// soon.
    write_at: Option<Instant>,
    /// Time at which the oldest record in `pending` was received.
    received_at: Option<Instant>,
}

struct RecordedRun {
    summary: RunSummaryBuilder,
    numbering: Numbering,
    changed: bool,
}

/// Records until `closing` is set. Everything received before is then stored or spooled.
pub async fn record(
    target: Target,
    spool: Spool,
    mut signals: mpsc::Receiver<Signal>,
    mut flushes: mpsc::Receiver<Flush>,
    mut closing: watch::Receiver<bool>,
) {
    target.metrics.set_spool_bytes(spool.undrained_bytes());
    let mut writer = BatchWriter::new(spool);
    let mut recorder = RecordingTask::new(target);
    let mut tick = interval(FLUSH_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut open = true;
    loop {
        let mut due = false;
        tokio::select! {
            signal = signals.recv(), if open => match signal {
                Some(signal) => recorder.receive(signal),
                None => open = false,
            },
            Some(flush) = flushes.recv(), if open => {
                // Signals sent before the request are part of it.
                for _ in 0..MAX_QUEUED_SIGNALS {
                    let Ok(signal) = signals.try_recv() else { break };
                    recorder.receive(signal);
                }
                recorder.flushes.push(flush);
            }
            Some((batch, result)) = writer.ended() => writer.finish(batch, result, &mut recorder),
            _ = closing.wait_for(|closing| *closing), if open => {
                signals.close();
                due = true;
            }
            () = wait_until(recorder.write_at), if !writer.is_busy() => due = true,
            _ = tick.tick() => due = true,
        }
        if writer.is_busy() {
            continue;
        }
        // The next process drains the records that remain in the spool file.
        if !open && (recorder.pending_items == 0 || writer.is_failing) {
            break;
        }
        let has_work = recorder.pending_items > 0 || !recorder.to_interrupt.is_empty() || !writer.is_drained;
        if !has_work {
            recorder.write_at = None;
            complete_flushes(recorder.flushes.drain(..), true);
        }
        due |= !recorder.flushes.is_empty() || recorder.write_at.is_some_and(|at| at <= Instant::now());
        if has_work && (due || !open || recorder.pending_items >= BATCH_ITEMS) {
            writer.start(&mut recorder);
        }
    }
    writer.close();
}

impl RecordingTask {
    fn new(target: Target) -> Self {
        Self {
            target,
            runs: HashMap::new(),
            pending: Vec::new(),
            pending_items: 0,
            dropped_active: HashSet::new(),
            to_interrupt: Vec::new(),
            unsaved_rows: Vec::new(),
            ended_in_spool: Vec::new(),
            flushes: Vec::new(),
            write_at: None,
            received_at: None,
        }
    }

    fn receive(&mut self, signal: Signal) {
        let run_id = signal.run_id();
        // A panic for one run must not affect the others.
        if catch_unwind(AssertUnwindSafe(|| self.apply(signal))).is_err() {
            self.drop_run(run_id, NotStored::RecorderFailed);
        }
    }

    fn apply(&mut self, signal: Signal) {
        match signal {
            Signal::Started(start) => {
                let run_id = start.run_id;
                let server_id = self.target.writer.server_id;
                let summary = RunSummaryBuilder::from_start(&start, server_id);
                let run = RecordedRun { summary, numbering: Numbering::default(), changed: false };
                self.runs.insert(run_id, run);
                self.target.live.add_run(run_id, start.owner.clone());
                self.push(Record::Started { start, server_id });
            }
            Signal::Items(run_id, items) => {
                let Some(run) = self.runs.get_mut(&run_id) else {
                    if self.dropped_active.contains(&run_id) {
                        return;
                    }
                    tracing::error!(run.id = %run_id, "received items of an unknown run; they are not recorded");
                    return;
                };
                self.target.metrics.add_items(&items);
                let first_numbers = run.numbering;
                for item in items.iter() {
                    run.summary.apply(item);
                    run.numbering.skip(item);
                }
                run.changed = true;
                if has_live_items(&items) {
                    self.target.live.add_items(run_id, &items);
                }
                self.push(Record::Items { run_id, first_numbers, items });
            }
            Signal::Ended(run_id, end) => {
                let Some(run) = self.runs.get_mut(&run_id) else {
                    self.dropped_active.remove(&run_id);
                    return;
                };
                run.summary.end(&end);
                run.changed = true;
                self.push(Record::Ended { run_id, end });
            }
        }
    }

    fn push(&mut self, record: Record) {
        let delay = match record {
            Record::Started { .. } => Some(START_DELAY),
            Record::Ended { .. } => Some(Duration::ZERO),
            Record::Items { .. } => None,
        };
        let times = self.write_at.into_iter().chain(delay.map(|delay| Instant::now() + delay));
        self.write_at = times.min();
        self.received_at.get_or_insert_with(Instant::now);
        self.pending_items += record.weight();
        self.target.metrics.set_pending_items(self.pending_items);
        self.pending.push(record);
    }

    /// Takes the pending records and the rows of changed runs. Ended runs are then complete, so they are no longer kept.
    fn take_batch(&mut self) -> Batch {
        self.pending_items = 0;
        self.target.metrics.set_pending_items(0);
        self.write_at = None;
        let records = std::mem::take(&mut self.pending);
        let changed =
            self.runs.values_mut().filter_map(|run| std::mem::take(&mut run.changed).then(|| run.summary.row()));
        let mut rows: Vec<RunRow> = std::mem::take(&mut self.unsaved_rows).into_iter().chain(changed).collect();
        // Changes of several runs by clients lock the rows in this order, too. Another order could cause a deadlock.
        rows.sort_unstable_by_key(|row| row.summary.run_id);
        self.runs.retain(|_, run| run.summary.status() == RunStatus::Running);
        Batch { records, rows, to_interrupt: std::mem::take(&mut self.to_interrupt) }
    }

    /// Adds a written batch to the counters. The records of a failed batch wait for the next one.
    fn count_batch(&mut self, outcome: PersistOutcome, received_at: Option<Instant>) {
        match (outcome, received_at) {
            (PersistOutcome::Stored, Some(at)) => self.target.metrics.add_batch(at.elapsed()),
            (PersistOutcome::Failed, Some(at)) => self.received_at = Some(at),
            _ => {}
        }
    }

    /// Handles a written batch and informs the subscribers. `drained` is true if the spool file is empty.
    fn on_written(&mut self, result: PersistResult, drained: bool) {
        self.to_interrupt.extend(&result.to_interrupt);
        for (&run_id, &reason) in &result.not_stored {
            // The rejected part is kept in a file, and the rest of a running run is stored.
            if reason == NotStored::Rejected && self.runs.contains_key(&run_id) {
                self.target.durability_acks.resolve(run_id, Err(reason));
            } else {
                self.drop_run(run_id, reason);
            }
        }
        let live = &self.target.live;
        if result.outcome == PersistOutcome::Stored {
            let mut stored: HashMap<RunId, Vec<Arc<Vec<TraceItem>>>> = HashMap::new();
            for record in &result.records {
                if let Record::Items { run_id, items, .. } = record
                    && has_live_items(items)
                {
                    stored.entry(*run_id).or_default().push(Arc::clone(items));
                }
            }
            for (run_id, items) in &stored {
                live.remove_stored_items(*run_id, items);
            }
        }
        if result.outcome == PersistOutcome::Failed {
            self.pending_items += result.records.iter().map(Record::weight).sum::<usize>();
            self.pending.splice(..0, result.records);
            for row in result.rows {
                match self.runs.get_mut(&row.summary.run_id) {
                    Some(run) => run.changed = true,
                    None => self.unsaved_rows.push(row),
                }
            }
            self.drop_excess_runs();
            return;
        }
        let is_recorded = |run_id: RunId| !result.not_stored.contains_key(&run_id) || self.runs.contains_key(&run_id);
        for record in result.records.iter().filter(|record| is_recorded(record.run_id())) {
            match record {
                Record::Started { start, .. } => {
                    live.report_change(start.run_id, start.owner.clone(), RunStatus::Running);
                }
                Record::Ended { run_id, end } => {
                    live.end_run(*run_id, end.status);
                    self.target.durability_acks.resolve(*run_id, Ok(()));
                    self.ended_in_spool.push(*run_id);
                }
                Record::Items { .. } => {}
            }
        }
        if drained {
            self.ended_in_spool.drain(..).for_each(|run_id| self.target.unstored.remove(run_id));
        }
    }
}

/// Waits until a time, or forever for `None`.
async fn wait_until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

fn complete_flushes(flushes: impl IntoIterator<Item = Flush>, stored: bool) {
    for flush in flushes {
        // Fails if the reader no longer waits.
        let _ = flush.send(stored);
    }
}

/// Returns true if some items go to subscribers. Subscribers read attention from the store, because buffered attention of
/// a long run would fill the memory while the database is unavailable.
fn has_live_items(items: &[TraceItem]) -> bool {
    items.iter().any(|item| !matches!(item, TraceItem::Attention(_)))
}
