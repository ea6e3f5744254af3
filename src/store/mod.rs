//! Storage in PostgreSQL, and the only module with SQL.
//!
//! [`Store::open`] connects, or starts a private server on the data directory, and migrates the schema. Live runs arrive as
//! [`Signal`]s at the [recorder](Store::start_recorder), ingested runs as documents at [`Store::ingest`]. One writer
//! converts both to rows, with one transaction per batch. A run shown as finished is completely committed. When the
//! database is unavailable, live runs go to spool files in the data directory and are stored later.
//!
//! Readers receive the same values of the types in [`crate::events`] that were written. Rows never leave this module.

mod address;
pub mod admin;
mod attention;
mod citus;
mod connect;
mod copy;
mod deletions;
mod embedded;
mod error;
mod experiments;
mod extras;
mod family;
mod feedback;
pub mod filter;
mod full_text;
mod images;
mod ingest;
mod items;
mod list;
mod live;
mod maintenance;
mod measured;
mod migrate;
mod mods;
mod notes;
mod pool;
mod read;
mod record;
mod recorder;
mod removed_runs;
mod responses;
mod retention;
mod rows;
mod run_summary;
mod runs;
mod saved_filters;
mod scope;
mod script;
mod servers;
mod spool;
mod statistics;
mod summary_builder;
mod table;
mod tags;
#[cfg(test)]
mod test_store;
mod text;
mod unstored;
mod uuid_v7;
mod writer;

pub use attention::{AttentionParts, HeadRowsPart, ValueRow};
pub use connect::Database;
pub use deletions::Deletion;
pub use error::{BadFilter, EmbeddedError, Error, ErrorCounts, IngestError};
pub use experiments::{
    CellOutcome, CellRecord, CellState, Experiment, ExperimentCell, ExperimentState, MAX_LISTED_EXPERIMENTS,
    NewExperiment,
};
pub use extras::Reported;
pub use family::{Family, FamilyRun};
pub use feedback::{Feedback, NewFeedback};
pub use ingest::Ingested;
pub use items::{ItemPage, ItemRange};
pub use list::{MAX_PAGE_RUNS, RunPage, RunQuery};
pub use live::{LiveHub, LiveUpdate, RunChange, RunChanges, RunListUpdate};
pub use mods::{ModChanges, ModState, ModVersion, ModVersionInfo};
pub use notes::{MAX_NOTES, Note};
pub use read::EndDetails;
pub use recorder::RecorderMetrics;
pub use responses::NewResponse;
pub use retention::Retention;
pub use run_summary::RunSummary;
pub use saved_filters::{MAX_SAVED_FILTERS, SavedFilter};
pub use servers::{Announcement, ServerInfo};
pub use spool::SpoolStatus;
pub use statistics::{
    CallTime, CallTimeStep, GroupStatistics, HourCount, MAX_STATISTICS_DAYS, ModCallStatistics, ModStatistics,
    ModelCallTime, ModelStatistics, RunCounts, Statistics, StatisticsQuery, StatisticsUnit, TimeStep,
};
pub use tags::{MAX_TAGS, TaggedRun};

use crate::recording::{DurabilityAcks, RecorderHandle, Signal, UnstoredRuns};
use embedded::Embedded;
use pool::PgPool;
use recorder::Target;
use servers::notification::RunNotification;
use spool::Spool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use uuid::Uuid;
use writer::RunWriter;

/// Capacity of the recorder's signal channel.
const MAX_QUEUED_SIGNALS: usize = 1024;

/// The store; cheap to clone.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    pool: PgPool,
    /// True if rows of ingested runs are written with COPY.
    uses_copy: bool,
    /// The recorder's own connections.
    recorder_pool: PgPool,
    server_id: Uuid,
    live: LiveHub,
    recorder: Mutex<RecorderState>,
    recorder_metrics: Arc<RecorderMetrics>,
    durability_acks: DurabilityAcks,
    unstored: UnstoredRuns,
    closing: watch::Sender<bool>,
    retention: watch::Sender<Retention>,
    announcement: watch::Sender<Announcement>,
    /// Committed changes that the link notifies the other servers of.
    changes: mpsc::UnboundedSender<RunNotification>,
    /// Notified when mods may have changed.
    mods: watch::Sender<()>,
    /// Tasks that end with the store.
    tasks: Vec<JoinHandle<()>>,
    /// Time of the last document that could not be stored; `None` after a later document was stored.
    write_failed: Mutex<Option<Instant>>,
    embedded: Option<Embedded>,
}

/// A request to the recorder to store everything received so far. The reply is true if all of it is in the database.
type Flush = oneshot::Sender<bool>;

/// The channel of the recorder. It exists before the store is open, so that engines can start while the database does.
/// Signals wait in it until the recorder starts.
#[derive(Debug)]
pub struct RecorderChannel {
    sender: mpsc::Sender<Signal>,
    signals: mpsc::Receiver<Signal>,
    durability_acks: DurabilityAcks,
    unstored: UnstoredRuns,
}

impl RecorderChannel {
    /// Creates a channel. [`Store::open_with`] connects it to a store.
    #[must_use]
    pub fn new() -> Self {
        let (sender, signals) = mpsc::channel(MAX_QUEUED_SIGNALS);
        Self { sender, signals, durability_acks: DurabilityAcks::default(), unstored: UnstoredRuns::default() }
    }

    /// Returns a sender for an engine.
    #[must_use]
    pub fn recorder(&self) -> RecorderHandle {
        RecorderHandle {
            signals: self.sender.clone(),
            durability_acks: Some(self.durability_acks.clone()),
            unstored: Some(self.unstored.clone()),
        }
    }
}

impl Default for RecorderChannel {
    fn default() -> Self {
        Self::new()
    }
}

/// The recorder before its start, while it runs, and after [`Store::close`].
enum RecorderState {
    Pending { spool: Spool, channel: RecorderChannel },
    Running { signals: mpsc::Sender<Signal>, flushes: mpsc::Sender<Flush>, task: JoinHandle<()> },
    Closed,
}

impl Store {
    /// Starts the recorder, unless it runs or the store is closed. It ends with [`Store::close`].
    pub fn start_recorder(&self) {
        let inner = &self.inner;
        let mut state = inner.recorder.lock().unwrap_or_else(PoisonError::into_inner);
        *state = match std::mem::replace(&mut *state, RecorderState::Closed) {
            RecorderState::Pending { spool, channel } => {
                let (flushes, received_flushes) = mpsc::channel(MAX_QUEUED_SIGNALS);
                let target = Target {
                    writer: RunWriter { pool: inner.recorder_pool.clone(), server_id: inner.server_id },
                    live: inner.live.clone(),
                    durability_acks: inner.durability_acks.clone(),
                    unstored: inner.unstored.clone(),
                    metrics: Arc::clone(&inner.recorder_metrics),
                };
                let closing = inner.closing.subscribe();
                let record = recorder::record(target, spool, channel.signals, received_flushes, closing);
                RecorderState::Running { signals: channel.sender, flushes, task: tokio::spawn(record) }
            }
            other => other,
        };
    }

    /// Returns a sender to the recorder. Signals sent before its start wait in its channel.
    #[must_use]
    pub fn recorder(&self) -> RecorderHandle {
        let inner = &self.inner;
        let signals = match &*inner.recorder.lock().unwrap_or_else(PoisonError::into_inner) {
            RecorderState::Pending { channel, .. } => channel.sender.clone(),
            RecorderState::Running { signals, .. } => signals.clone(),
            // Nothing is recorded any more.
            RecorderState::Closed => mpsc::channel(1).0,
        };
        let (durability_acks, unstored) = (Some(inner.durability_acks.clone()), Some(inner.unstored.clone()));
        RecorderHandle { signals, durability_acks, unstored }
    }

    /// Returns the counters of the recorder.
    #[must_use]
    pub fn recorder_metrics(&self) -> &RecorderMetrics {
        &self.inner.recorder_metrics
    }

    /// Returns the hub of live updates, which also works before the recorder starts.
    #[must_use]
    pub fn live(&self) -> &LiveHub {
        &self.inner.live
    }

    /// Checks that the database accepts documents and runs.
    ///
    /// # Errors
    /// The database does not answer, does not accept writes, or has just failed to store a document; or runs can be
    /// written neither to it nor to the spool file.
    pub async fn ready(&self) -> Result<(), Error> {
        const READINESS_TIMEOUT: Duration = Duration::from_secs(3);
        const FAILURE_INTERVAL: Duration = Duration::from_secs(5);
        let query = sqlx::query_scalar("select current_setting('transaction_read_only') = 'on'");
        let answer = timeout(READINESS_TIMEOUT, query.fetch_one(&self.inner.pool)).await;
        let read_only: bool = answer.unwrap_or(Err(sqlx::Error::PoolTimedOut))?;
        if read_only {
            return Err(Error::ReadOnly(error::READ_ONLY));
        }
        if self.inner.recorder_metrics.is_failing() {
            return Err(Error::ReadOnly(
                "runs can be written neither to it nor to the spool file in the data directory; check the free space of \
                 their disks",
            ));
        }
        let failed = *self.inner.write_failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.is_some_and(|at| at.elapsed() < FAILURE_INTERVAL) {
            return Err(Error::ReadOnly("a document could not be stored a few seconds ago"));
        }
        Ok(())
    }

    /// Returns the broken references between stored rows, one line each; none in an intact database. Reads all tables.
    ///
    /// # Errors
    /// The database failed.
    pub async fn damaged_links(&self) -> Result<Vec<String>, Error> {
        let rows: Vec<(String, Uuid, i64)> =
            sqlx::query_as("select child, run_id, rows from damaged_links").fetch_all(&self.inner.pool).await?;
        Ok(rows.into_iter().map(|(child, run, rows)| format!("{child}: {rows} rows of run {run}")).collect())
    }

    /// Stops every embedded server of this process, including one whose start was cancelled, and waits until they have
    /// ended. Call it at the end of the program, because no other server can be started afterwards.
    pub async fn stop_servers() {
        embedded::stop_all().await;
    }

    /// Stores or spools the remaining records, closes the connections and stops the embedded server.
    pub async fn close(self) {
        const RECORDER_TIMEOUT: Duration = Duration::from_secs(30);
        const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);
        let inner = &self.inner;
        inner.closing.send_replace(true);
        let recorder = std::mem::replace(
            &mut *inner.recorder.lock().unwrap_or_else(PoisonError::into_inner),
            RecorderState::Closed,
        );
        match recorder {
            RecorderState::Running { task, .. } => {
                if timeout(RECORDER_TIMEOUT, task).await.is_err() {
                    tracing::error!("the recorder did not finish in time");
                }
            }
            RecorderState::Pending { spool, .. } if spool.is_drained() => spool.remove(),
            RecorderState::Pending { .. } | RecorderState::Closed => {}
        }
        inner.tasks.iter().for_each(JoinHandle::abort);
        // Unfinished runs will not be continued, so they are marked now instead of by another server later.
        let writer = RunWriter { pool: inner.pool.clone(), server_id: inner.server_id };
        let leave = servers::interrupt_runs_of(&writer, &inner.live, inner.server_id, None);
        if !matches!(timeout(LEAVE_TIMEOUT, leave).await, Ok(Ok(_))) {
            tracing::debug!("cannot remove this server from the list of servers");
        }
        inner.recorder_pool.close().await;
        inner.pool.close().await;
        if let Some(embedded) = &inner.embedded {
            embedded.stop().await;
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}
