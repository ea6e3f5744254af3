//! Writes of batches to the database, or to the spool file if that fails, and the drain of the spool file.

use crate::events::{RunId, system};
use crate::recording::NotStored;
use crate::store::record::Record;
use crate::store::spool::Spool;
use crate::store::summary_builder::RunRow;
use crate::store::writer::{Attempt, RunWriter};
use crate::store::{Error, ErrorCounts};
use futures::FutureExt;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Number of items of the spool file that are stored at once.
const BATCH_ITEMS: usize = 512;
/// Maximum duration of a write.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(15);
/// Items that a computation of a run's row reads and applies per second on a slow database.
const ITEMS_PER_SECOND: u64 = 10_000;
/// Maximum time for the rows of runs that are computed in one transaction, except for a single long run.
const MAX_ROW_TIME: Duration = Duration::from_secs(15);
/// Maximum duration of draining before the recorder continues with new batches.
const MAX_DRAIN_TIME: Duration = Duration::from_millis(500);

/// Records and rows that are written together.
pub(super) struct Batch {
    pub records: Vec<Record>,
    pub rows: Vec<RunRow>,
    pub to_interrupt: Vec<RunId>,
}

/// Conditions under which a batch is written.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WriteState {
    /// True if too many items wait for the database: the batch goes to the spool file.
    pub is_overloaded: bool,
    /// True if neither the database nor the disk accepted the previous batch.
    pub previous_failed: bool,
}

/// The result of writing a batch.
pub(super) struct PersistResult {
    pub records: Vec<Record>,
    pub rows: Vec<RunRow>,
    pub outcome: PersistOutcome,
    /// Dropped runs that are not yet marked as interrupted.
    pub to_interrupt: Vec<RunId>,
    /// Runs of which a part is neither stored nor spooled.
    pub not_stored: BTreeMap<RunId, NotStored>,
}

/// The destination of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PersistOutcome {
    /// The database.
    Stored,
    /// The spool file.
    Spooled,
    /// None: neither the database nor the disk accepted it. Its records wait in memory for the next batch.
    Failed,
}

/// Writes a batch to the database or, if that is unavailable, to the spool file.
pub(super) async fn persist(writer: &RunWriter, spool: &mut Spool, batch: Batch, state: WriteState) -> PersistResult {
    let Batch { records, rows, to_interrupt } = batch;
    if spool.is_drained() && !state.is_overloaded {
        match attempt(write_timeout(&records), writer.write(&records, &rows, Attempt::First)).await {
            Ok(removed) => {
                let to_interrupt = interrupt_all(writer, to_interrupt).await;
                let not_stored = removed.into_iter().map(|run_id| (run_id, NotStored::Removed)).collect();
                return PersistResult { records, rows, outcome: PersistOutcome::Stored, to_interrupt, not_stored };
            }
            Err(failure) if !failure.is_transient() => {
                tracing::error!(error = %failure, "the database rejected a batch; storing each run separately");
                let not_stored = store_one_by_one(writer, spool, &records, &rows).await;
                let outcome = if spool.is_drained() { PersistOutcome::Stored } else { PersistOutcome::Spooled };
                return PersistResult { records, rows, outcome, to_interrupt, not_stored };
            }
            _ if state.previous_failed => {}
            Err(failure) => {
                tracing::warn!(error = %failure, "the database is unavailable or too slow; writing to the spool file");
            }
        }
    }
    let outcome = match spool.append(&records) {
        Ok(()) => PersistOutcome::Spooled,
        Err(failure) => {
            if !state.previous_failed {
                tracing::error!(error = %failure, "cannot write runs to the database or the spool file");
            }
            PersistOutcome::Failed
        }
    };
    let until = Instant::now() + MAX_DRAIN_TIME;
    while !spool.is_drained() && Instant::now() < until {
        match drain_batch(writer, spool).await {
            Ok(()) if spool.is_drained() => {
                tracing::info!("the database is available again and the spool file is drained");
            }
            Ok(()) => {}
            Err(Error::Unavailable(_)) => break,
            Err(failure) => {
                tracing::error!(error = %failure, "cannot drain the spool file");
                break;
            }
        }
    }
    PersistResult { records, rows, outcome, to_interrupt, not_stored: BTreeMap::new() }
}

/// Stores the next records of a spool file.
pub async fn drain_batch(writer: &RunWriter, spool: &mut Spool) -> Result<(), Error> {
    let (records, at) = spool.next(BATCH_ITEMS)?;
    match store_spooled(writer, &records).await {
        Ok(()) => {}
        Err(failure) if !failure.is_transient() => {
            tracing::error!(error = %failure, "the database rejected spooled records; storing each run separately");
            for (_, records) in by_run(&records) {
                match store_spooled(writer, &records).await {
                    Ok(()) => {}
                    Err(failure) if failure.is_transient() => return Err(unavailable()),
                    Err(failure) => reject(spool, &records, &failure)?,
                }
            }
        }
        Err(_) => return Err(unavailable()),
    }
    if let Some(runs) = spool.open_runs(at).filter(|runs| !runs.is_empty()) {
        match update_interrupted_runs(writer, runs).await {
            Ok(()) => {}
            Err(failure) if failure.is_transient() => return Err(unavailable()),
            Err(failure) => tracing::error!(error = %failure, "cannot find interrupted runs to update their counts"),
        }
    }
    spool.mark_drained(at)
}

/// Stores records of a spool file, in several transactions if the rows of their runs take long.
async fn store_spooled(writer: &RunWriter, records: &[Record]) -> Result<(), WriteFailure> {
    let (mut first, mut total_row_time) = (0, Duration::ZERO);
    for (index, record) in records.iter().enumerate() {
        if let Record::Ended { run_id, .. } = record {
            total_row_time += row_time(writer, *run_id).await?;
        }
        let next = index + 1;
        if total_row_time >= MAX_ROW_TIME || next == records.len() {
            let part = &records[first..next];
            let limit = write_timeout(part) + total_row_time;
            attempt(limit, writer.write_spooled(part)).await?;
            (first, total_row_time) = (next, Duration::ZERO);
        }
    }
    Ok(())
}

/// Marks dropped runs as interrupted. Returns those that need a later attempt.
async fn interrupt_all(writer: &RunWriter, mut to_interrupt: Vec<RunId>) -> Vec<RunId> {
    while let Some(&run_id) = to_interrupt.last() {
        match interrupt(writer, run_id).await {
            Ok(()) => {}
            Err(failure) if failure.is_transient() => break,
            Err(failure) => {
                tracing::error!(run.id = %run_id, error = %failure, "cannot mark a run as interrupted");
            }
        }
        to_interrupt.pop();
    }
    to_interrupt
}

async fn interrupt(writer: &RunWriter, run_id: RunId) -> Result<(), WriteFailure> {
    let limit = WRITE_TIMEOUT + row_time(writer, run_id).await?;
    attempt(limit, writer.interrupt(run_id, system::now())).await.map(drop)
}

/// Updates the counts of those of the runs that are marked as interrupted.
async fn update_interrupted_runs(writer: &RunWriter, runs: &BTreeSet<RunId>) -> Result<(), WriteFailure> {
    for run_id in attempt(WRITE_TIMEOUT, writer.interrupted_runs(runs)).await? {
        match update_interrupted(writer, run_id).await {
            Err(failure) if !failure.is_transient() => {
                tracing::error!(run.id = %run_id, error = %failure, "cannot update the counts of an interrupted run");
            }
            result => result?,
        }
    }
    Ok(())
}

async fn update_interrupted(writer: &RunWriter, run_id: RunId) -> Result<(), WriteFailure> {
    let limit = WRITE_TIMEOUT + row_time(writer, run_id).await?;
    attempt(limit, writer.update_interrupted(run_id)).await
}

/// Returns the maximum duration of a computation of a run's row from all its items. A computation that is always too slow
/// would be repeated forever.
pub(super) async fn row_time(writer: &RunWriter, run_id: RunId) -> Result<Duration, WriteFailure> {
    let items = attempt(WRITE_TIMEOUT, writer.count_items(run_id)).await?;
    Ok(Duration::from_millis(items.unsigned_abs() * 1000 / ITEMS_PER_SECOND))
}

/// Stores each run separately. Returns the runs of which a part is neither stored nor spooled.
async fn store_one_by_one(
    writer: &RunWriter,
    spool: &mut Spool,
    records: &[Record],
    rows: &[RunRow],
) -> BTreeMap<RunId, NotStored> {
    let mut not_stored = BTreeMap::new();
    let mut is_unavailable = false;
    for (run_id, records) in by_run(records) {
        let row = rows.iter().find(|row| row.summary.run_id == run_id);
        // New records wait in memory during these writes, so only the first run waits for an unavailable database.
        let result = if is_unavailable {
            Err(WriteFailure::from(unavailable()))
        } else {
            attempt(write_timeout(&records), writer.write(&records, row, Attempt::Retry)).await
        };
        let kept = match result {
            Ok(removed) => {
                not_stored.extend(removed.into_iter().map(|run_id| (run_id, NotStored::Removed)));
                Ok(())
            }
            Err(failure) if failure.is_transient() => {
                is_unavailable = true;
                spool.append(&records)
            }
            Err(failure) => match reject(spool, &records, &failure) {
                Ok(()) => {
                    not_stored.insert(run_id, NotStored::Rejected);
                    store_start(writer, spool, records).await
                }
                Err(failure) => Err(failure),
            },
        };
        if let Err(failure) = kept {
            tracing::error!(error = %failure, run.id = %run_id, "cannot write a run to the database or the spool file");
            not_stored.insert(run_id, NotStored::PartLost);
        }
    }
    not_stored
}

/// Stores the start of a run, if it is one of the rejected records. The run is then listed, and its later items belong to it.
async fn store_start(writer: &RunWriter, spool: &mut Spool, mut records: Vec<Record>) -> Result<(), Error> {
    records.retain(|record| matches!(record, Record::Started { .. }));
    let Some(run_id) = records.first().map(Record::run_id) else { return Ok(()) };
    match attempt(write_timeout(&records), writer.write(&records, None, Attempt::Retry)).await {
        Ok(_) => Ok(()),
        Err(failure) if failure.is_transient() => spool.append(&records),
        Err(failure) => {
            tracing::error!(run.id = %run_id, error = %failure, "the database rejected the start of a run");
            Ok(())
        }
    }
}

fn reject(spool: &Spool, records: &[Record], failure: &dyn std::error::Error) -> Result<(), Error> {
    let path = spool.reject(records)?;
    let run = records.first().map(|record| record.run_id().to_string()).unwrap_or_default();
    tracing::error!(error = %failure, run.id = run, path = %path.display(), "the database rejected a part of a run; it is kept in a file");
    Ok(())
}

/// A failed write to the database.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteFailure {
    #[error(transparent)]
    Store(#[from] Error),
    /// The outcome is unknown.
    #[error("the database did not store the records within {} seconds", .0.as_secs())]
    TooSlow(Duration),
    /// A bug, which must not affect other runs.
    #[error("an internal error occurred during the write; please report it")]
    Panicked,
}

impl WriteFailure {
    /// Returns true if a later attempt can succeed.
    fn is_transient(&self) -> bool {
        matches!(self, Self::Store(Error::Unavailable(_)) | Self::TooSlow(_))
    }
}

/// Returns the maximum duration of a write of these records. Images and attention get a second per MiB more: a write that is
/// always too slow would be repeated forever, and no later record would leave the spool file.
fn write_timeout(records: &[Record]) -> Duration {
    let bytes: usize = records.iter().map(Record::blob_bytes).sum();
    WRITE_TIMEOUT + Duration::from_secs(bytes as u64 >> 20)
}

/// Waits for a write with a timeout, and converts a panic to an error.
async fn attempt<T, E: Into<Error>>(
    limit: Duration,
    write: impl Future<Output = Result<T, E>>,
) -> Result<T, WriteFailure> {
    match timeout(limit, AssertUnwindSafe(write).catch_unwind()).await {
        Ok(Ok(result)) => result.map_err(|failure| WriteFailure::Store(failure.into())),
        Ok(Err(_)) => Err(WriteFailure::Panicked),
        Err(_) => {
            ErrorCounts::add_timeout();
            Err(WriteFailure::TooSlow(limit))
        }
    }
}

fn unavailable() -> Error {
    Error::Unavailable(sqlx::Error::PoolTimedOut)
}

/// Groups records by run and preserves the order of both.
fn by_run(records: &[Record]) -> Vec<(RunId, Vec<Record>)> {
    let mut runs: Vec<(RunId, Vec<Record>)> = Vec::new();
    for record in records {
        let run_id = record.run_id();
        match runs.iter_mut().find(|(id, _)| *id == run_id) {
            Some((_, records)) => records.push(record.clone()),
            None => runs.push((run_id, vec![record.clone()])),
        }
    }
    runs
}
