//! PostgreSQL: everything that is kept, and the only place with SQL.
//!
//! [`Store::open`] connects, or starts a private server on the data directory, and brings the schema up to date.
//! Live runs arrive as [`Signal`]s at the [recorder](Store::recorder), foreign ones as documents at [`Store::ingest`];
//! both become rows by one writer, a batch a transaction. A run that is shown as finished is committed as a whole. When
//! the database is away, live runs go to spool files in the data directory and follow when it is back.
//!
//! Readers get the vocabulary of [`crate::events`] back exactly as it went in; rows never leave this module.

mod error;
mod live;
mod runs;

pub use error::{BadFilter, EmbeddedError, Error, IngestError};
pub use live::{Live, LiveUpdate, RunChange};
pub use runs::{MAX_PAGE, RunPage, RunQuery, RunSummary};

use crate::events::{AttentionStep, Item, RunId, Signal};
use crate::trace::document::{Document, Numbering};
use std::ops::Range;
use std::path::PathBuf;
use tokio::sync::mpsc;

/// Where the data lives.
#[derive(Clone, PartialEq, Eq)]
pub enum Database {
    /// A PostgreSQL server of our own on this data directory.
    Embedded {
        /// Holds the database, its log and the spool.
        data_dir: PathBuf,
    },
    /// A server that somebody runs.
    Url {
        /// `postgres://user:password@host:port/name`.
        url: String,
        /// Holds the spool.
        data_dir: PathBuf,
    },
}

/// What became of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ingested {
    /// The run it is stored as.
    pub run_id: RunId,
    /// False when the same document was there already.
    pub created: bool,
}

/// The open store; cheap to clone.
#[derive(Clone)]
pub struct Store {}

impl Store {
    /// Connects or starts the server, migrates, marks runs of dead servers as interrupted, drains the spool.
    ///
    /// `progress` is told what is going on, in words for a person who waits.
    ///
    /// # Errors
    /// No server, an old server, a schema that cannot be migrated; see [`Error`].
    pub async fn open(database: Database, progress: impl Fn(&str)) -> Result<Self, Error> {
        let _ = (database, progress);
        todo!()
    }

    /// Starts the recorder on the first call; later calls give more senders to the same one. It ends when all senders
    /// are gone, after everything is stored or spooled.
    #[must_use]
    pub fn recorder(&self) -> (mpsc::Sender<Signal>, Live) {
        todo!()
    }

    /// Stores a document of somebody else's engine as a finished run, in one transaction.
    ///
    /// # Errors
    /// The `request_id` is taken by other content, or the database is away; see [`IngestError`].
    pub async fn ingest(&self, document: Document) -> Result<Ingested, IngestError> {
        let _ = document;
        todo!()
    }

    /// A page of runs, newest first.
    ///
    /// # Errors
    /// [`Error::BadFilter`], or the database failed.
    pub async fn runs(&self, query: &RunQuery) -> Result<RunPage, Error> {
        let _ = query;
        todo!()
    }

    /// The run with that `run_id`, else with that `request_id`.
    ///
    /// # Errors
    /// The database failed.
    pub async fn find(&self, id_or_request_id: &str) -> Result<Option<RunSummary>, Error> {
        let _ = id_or_request_id;
        todo!()
    }

    /// The items of those events, without attention, in item order: each event, then for each of its mod calls the
    /// call, its logs, its actions. `measured` is filled.
    ///
    /// # Errors
    /// The database failed, or what is stored is damaged.
    pub async fn items(&self, run_id: RunId, events: Range<i32>) -> Result<Vec<Item>, Error> {
        Ok(self.numbered_items(run_id, events).await?.1)
    }

    /// As [`Store::items`], with the numbers of the calls, logs and actions before the first of them.
    ///
    /// # Errors
    /// The database failed, or what is stored is damaged.
    pub async fn numbered_items(&self, run_id: RunId, events: Range<i32>) -> Result<(Numbering, Vec<Item>), Error> {
        let _ = (run_id, events);
        todo!()
    }

    /// The whole run as a document: a foreign one as it was given, one of ours in the same shape.
    ///
    /// # Errors
    /// The database failed, or what is stored is damaged.
    pub async fn document(&self, run_id: RunId) -> Result<Option<Document>, Error> {
        let _ = run_id;
        todo!()
    }

    /// The replay's column file of a run (see [`crate::trace::columns`]); `None` when there is no such run.
    ///
    /// # Errors
    /// The database failed, or what is stored is damaged.
    pub async fn columns(&self, run_id: RunId) -> Result<Option<Vec<u8>>, Error> {
        let _ = run_id;
        todo!()
    }

    /// The attention of one step, both tiers.
    ///
    /// # Errors
    /// The database failed, or what is stored is damaged.
    pub async fn attention(&self, run_id: RunId, sequence_order: i32) -> Result<Option<AttentionStep>, Error> {
        let _ = (run_id, sequence_order);
        todo!()
    }

    /// The attention of the steps in that range of events, in order; `t1` is left empty unless `with_t1`.
    ///
    /// # Errors
    /// The database failed, or what is stored is damaged.
    pub async fn attention_range(
        &self,
        run_id: RunId,
        events: Range<i32>,
        with_t1: bool,
    ) -> Result<Vec<AttentionStep>, Error> {
        let _ = (run_id, events, with_t1);
        todo!()
    }

    /// Removes a run and everything of it; false when there is none.
    ///
    /// # Errors
    /// [`Error::StillRunning`], or the database failed.
    pub async fn delete(&self, run_id: RunId) -> Result<bool, Error> {
        let _ = run_id;
        todo!()
    }

    /// Whether the database answers.
    ///
    /// # Errors
    /// Why it does not.
    pub async fn ready(&self) -> Result<(), Error> {
        todo!()
    }

    /// Stores or spools what the recorder still holds, closes the connections and stops the embedded server.
    pub async fn close(self) {
        todo!()
    }
}
