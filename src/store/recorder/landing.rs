//! Where a batch of records lands: in the database, else in the spool file; and the spool file's way back.

use crate::events::RunId;
use crate::store::Error;
use crate::store::spool::Spool;
use crate::store::summary_builder::RunRow;
use crate::store::writer::{self, Attempt, Record};
use chrono::Utc;
use futures::FutureExt;
use sqlx::PgPool;
use std::panic::AssertUnwindSafe;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

/// So many records of the spool file are stored at once.
const BATCH: usize = 512;
/// A write that takes longer counts as failed.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
/// Draining pauses that often to append what came meanwhile.
const DRAIN: Duration = Duration::from_millis(500);

/// What is written at once.
pub(super) struct Batch {
    pub records: Vec<Record>,
    pub rows: Vec<RunRow>,
    pub given_up: Vec<RunId>,
}

/// What became of a batch.
pub(super) struct Landed {
    pub records: Vec<Record>,
    pub rows: Vec<RunRow>,
    pub fate: Fate,
    /// Those of the batch that are still to be marked.
    pub given_up: Vec<RunId>,
    /// Runs of which a part was lost.
    pub lost: Vec<RunId>,
}

/// Where a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// In the database.
    Stored,
    /// In the spool file.
    Spooled,
    /// Neither: the disk is full, too.
    Lost,
}

/// Brings a batch to the database or, when it is away, to the disk. `told` says that it is known that neither takes any.
pub(super) async fn land(
    pool: &PgPool,
    server: Uuid,
    spool: &mut Spool,
    batch: Batch,
    overload: bool,
    told: bool,
) -> Landed {
    let Batch { records, rows, mut given_up } = batch;
    if spool.is_drained() && !overload {
        match attempt(writer::write(pool, server, &records, &rows, Attempt::First)).await {
            Ok(()) => {
                while let Some(run_id) = given_up.last()
                    && attempt(writer::interrupt(pool, server, *run_id, Utc::now())).await.is_ok()
                {
                    given_up.pop();
                }
                return Landed { records, rows, fate: Fate::Stored, given_up, lost: Vec::new() };
            }
            Err(failure) if !failure.is_transient() => {
                tracing::error!(error = %failure, "the database refused a batch; trying run by run");
                let lost = store_one_by_one(pool, server, spool, &records, &rows).await;
                let fate = if spool.is_drained() { Fate::Stored } else { Fate::Spooled };
                return Landed { records, rows, fate, given_up, lost };
            }
            _ if told => {}
            Err(failure) => {
                tracing::warn!(error = %failure, "the database is away or too slow; runs go to the spool file");
            }
        }
    }
    let fate = match spool.append(&records) {
        Ok(()) => Fate::Spooled,
        Err(failure) => {
            if !told {
                tracing::error!(error = %failure, "runs can neither be stored nor spooled");
            }
            Fate::Lost
        }
    };
    let until = Instant::now() + DRAIN;
    while !spool.is_drained() && Instant::now() < until {
        match drain_some(pool, server, spool).await {
            Ok(()) if spool.is_drained() => tracing::info!("the database is back and the spool file is drained"),
            Ok(()) => {}
            Err(Error::Unavailable(_)) => break,
            Err(failure) => {
                tracing::error!(error = %failure, "the spool file cannot be drained");
                break;
            }
        }
    }
    Landed { records, rows, fate, given_up, lost: Vec::new() }
}

/// Stores the next records of a spool file.
pub async fn drain_some(pool: &PgPool, server: Uuid, spool: &mut Spool) -> Result<(), Error> {
    let (records, at) = spool.next(BATCH)?;
    match attempt(writer::rewrite(pool, server, &records)).await {
        Ok(()) => {}
        Err(failure) if !failure.is_transient() => {
            tracing::error!(error = %failure, "the database refused spooled records; trying run by run");
            for (_, records) in by_run(&records) {
                match attempt(writer::rewrite(pool, server, &records)).await {
                    Ok(()) => {}
                    Err(failure) if failure.is_transient() => return Err(away()),
                    Err(failure) => refuse(spool, &records, &failure)?,
                }
            }
        }
        Err(_) => return Err(away()),
    }
    spool.drained(at)
}

/// Returns the runs that found no place.
async fn store_one_by_one(
    pool: &PgPool,
    server: Uuid,
    spool: &mut Spool,
    records: &[Record],
    rows: &[RunRow],
) -> Vec<RunId> {
    let mut lost = Vec::new();
    let mut is_away = false;
    for (run_id, records) in by_run(records) {
        let row = rows.iter().find(|row| row.summary.run_id == run_id);
        // Waiting in vain once is enough: meanwhile everything else that is recorded waits in memory.
        let result = if is_away {
            Err(Failure::from(away()))
        } else {
            attempt(writer::write(pool, server, &records, row, Attempt::Again)).await
        };
        let put_aside = match result {
            Ok(()) => Ok(()),
            Err(failure) if failure.is_transient() => {
                is_away = true;
                spool.append(&records)
            }
            Err(failure) => match refuse(spool, &records, &failure) {
                // what the run list shows of it may still fit
                Ok(()) => attempt(writer::write(pool, server, &[], row, Attempt::Again)).await.or(Ok(())),
                Err(failure) => Err(failure),
            },
        };
        if let Err(failure) = put_aside {
            tracing::error!(error = %failure, run.id = %run_id, "a run can neither be stored nor spooled");
            lost.push(run_id);
        }
    }
    lost
}

fn refuse(spool: &Spool, records: &[Record], failure: &dyn std::error::Error) -> Result<(), Error> {
    let path = spool.refuse(records)?;
    let run = records.first().map(|record| record.run_id().to_string()).unwrap_or_default();
    tracing::error!(error = %failure, run.id = run, path = %path.display(), "the database refuses a part of a run; it is kept in a file");
    Ok(())
}

/// What keeps records from the database.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Store(#[from] Error),
    /// It may have been written all the same.
    #[error("the database did not take them within {} seconds", PATIENCE.as_secs())]
    TooSlow,
    /// A mistake of ours, which must not take the other runs along.
    #[error("writing it failed at a place where that was not thought possible; please report this")]
    Panicked,
}

impl Failure {
    /// Whether it goes away by itself.
    fn is_transient(&self) -> bool {
        matches!(self, Self::Store(Error::Unavailable(_)) | Self::TooSlow)
    }
}

/// Waits for a write, but not for ever, and takes a panic in it for a refusal.
async fn attempt<T, E: Into<Error>>(write: impl Future<Output = Result<T, E>>) -> Result<T, Failure> {
    match timeout(PATIENCE, AssertUnwindSafe(write).catch_unwind()).await {
        Ok(Ok(result)) => result.map_err(|failure| Failure::Store(failure.into())),
        Ok(Err(_)) => Err(Failure::Panicked),
        Err(_) => Err(Failure::TooSlow),
    }
}

fn away() -> Error {
    Error::Unavailable(sqlx::Error::PoolTimedOut)
}

/// Records by run, both in the order they had.
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
