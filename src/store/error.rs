//! Errors of the store, with remedies, and their conversion from errors of the database.

mod embedded;

pub use embedded::EmbeddedError;

use crate::events::RunId;
use sqlx::error::DatabaseError;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters that [`ErrorCounts::now`] reads.
static UNAVAILABLE: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// Counts of failed database operations since the start of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorCounts {
    /// The database could not be reached, or did not answer in time.
    pub unavailable: u64,
    /// The database rejected a statement.
    pub refused: u64,
}

impl ErrorCounts {
    /// Returns the current counts.
    #[must_use]
    pub fn now() -> Self {
        Self { unavailable: UNAVAILABLE.load(Relaxed), refused: REFUSED.load(Relaxed) }
    }

    /// Counts an operation that had no answer in time.
    pub(super) fn add_timeout() {
        UNAVAILABLE.fetch_add(1, Relaxed);
    }
}

/// An error of the store.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The embedded server could not be started.
    #[error(transparent)]
    Embedded(#[from] EmbeddedError),
    /// The address of the database is invalid.
    #[error("'{url}' is not a PostgreSQL address ({reason}); expected postgres://user:password@host:5432/name")]
    Address {
        /// The address, its password replaced.
        url: String,
        /// The problem.
        reason: String,
    },
    /// The server is too old.
    #[error("the database server is PostgreSQL {found}; Thunder needs PostgreSQL 14 or newer")]
    ServerTooOld {
        /// The server's version.
        found: String,
    },
    /// A later release has changed the schema.
    #[error(
        "the database was changed by a later release of Thunder (its schema has version {found}, this release knows {known}); \
         start that release, or choose another database"
    )]
    NewerSchema {
        /// Version of the schema.
        found: i32,
        /// The newest version that this release knows.
        known: i32,
    },
    /// The database is on a worker node of a Citus cluster.
    #[error(
        "the database is on a worker node of a Citus cluster; give the address of the coordinator{} instead",
        coordinator.as_ref().map(|at| format!(", {at},")).unwrap_or_default()
    )]
    WorkerNode {
        /// Host and port of the coordinator, as the worker knows them.
        coordinator: Option<String>,
    },
    /// The schema is older than this release needs.
    #[error(
        "the schema of the database has version {found}, but this release needs version {needed}; start `thunder serve` once to bring \
         it up to date"
    )]
    OldSchema {
        /// Version of the schema, 0 for a database without one.
        found: i32,
        /// The version of this release.
        needed: i32,
    },
    /// A table is distributed differently from the planned distribution.
    #[error(
        "the table '{table}' is {found}, but must be {expected}; undo it with select undistribute_table('{table}'), then run \
         this command again"
    )]
    DistributionPlan {
        /// Name of the table.
        table: String,
        /// Its current distribution.
        found: String,
        /// The required distribution.
        expected: &'static str,
    },
    /// The database does not accept writes.
    #[error("the database does not accept writes: {0}")]
    ReadOnly(&'static str),
    /// The schema could not be brought up to date.
    #[error("the database schema could not be brought up to date: {0}")]
    Migration(String),
    /// The filter of a run list is invalid.
    #[error(transparent)]
    BadFilter(#[from] BadFilter),
    /// The run is still being generated.
    #[error("run {0} is still running; cancel it first with POST /api/v1/runs/{0}/cancel")]
    StillRunning(RunId),
    /// A run would have more tags than [`MAX_TAGS`](super::MAX_TAGS).
    #[error("run {0} would have {1} tags, but at most {max} are allowed; remove some of them", max = super::MAX_TAGS)]
    TooManyTags(RunId, usize),
    /// A run would have more notes than [`MAX_NOTES`](super::MAX_NOTES).
    #[error("run {0} would have {1} notes, but at most {max} are allowed; remove some of them", max = super::MAX_NOTES)]
    TooManyNotes(RunId, usize),
    /// The run is recorded, but its rows are not in the database yet.
    #[error(
        "run {0} cannot be read yet: the database is unavailable or slow; the recorded data is kept until the database accepts it"
    )]
    NotStored(RunId),
    /// Stored data is damaged.
    #[error("stored data of run {run_id} cannot be read: {reason}")]
    Damaged {
        /// The run.
        run_id: RunId,
        /// Description of the damage, with its location.
        reason: String,
    },
    /// The database cannot be reached at the moment.
    #[error("the database cannot be reached: {}{}", message(.0), hint(.0))]
    Unavailable(sqlx::Error),
    /// No server answers at the configured addresses.
    #[error("no database answers at {addresses}: {error}{}", hint(error))]
    NoServer {
        /// Hosts and ports.
        addresses: String,
        /// Error of the last one.
        error: sqlx::Error,
    },
    /// A server answers, and rejects the password, the name of the database or the number of connections.
    #[error("the database at {addresses} rejected the connection: {}", message(error))]
    ConnectionRejected {
        /// Hosts and ports.
        addresses: String,
        /// Error of the last one.
        error: sqlx::Error,
    },
    /// The role lacks a privilege that Thunder needs.
    #[error("the database rejected the statement: {}; {hint}", message(.0), hint = OWNER_HINT)]
    Privilege(sqlx::Error),
    /// The database rejected the statement.
    #[error("the database rejected the statement: {}", message(.0))]
    Database(sqlx::Error),
    /// An operation on a file or folder of the data directory failed.
    #[error("{action} {}: {source}", path.display())]
    Disk {
        /// The failed operation, e.g. `cannot write`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Cause of the failure.
        source: std::io::Error,
    },
}

/// An error in a filter, with its position.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}{}", did_you_mean.as_ref().map(|name| format!("; did you mean '{name}'?")).unwrap_or_default())]
pub struct BadFilter {
    /// Offset of the wrong part, in characters.
    pub at: usize,
    /// Length of the wrong part, in characters.
    pub len: usize,
    /// The problem and the expected form.
    pub message: String,
    /// The most similar valid name.
    pub did_you_mean: Option<String>,
}

/// An error of storing a document.
#[derive(Debug, thiserror::Error)]
pub enum IngestError {
    /// Another run has this `request_id`.
    #[error("request_id '{request_id}' belongs to another run with different content")]
    Conflict {
        /// The id.
        request_id: String,
    },
    /// The database is unavailable, or a deleted run still has this `request_id`; nothing was stored.
    #[error("the document cannot be stored at the moment; try again in {retry_after_s} seconds")]
    Unavailable {
        /// Seconds after which a new attempt is useful.
        retry_after_s: u32,
    },
    /// PostgreSQL cannot store a value of the document, e.g. JSON nested too deeply.
    #[error("the database cannot store this document: {0}")]
    Refused(String),
    /// The database failed.
    #[error("the database failed: {}", message(.0))]
    Database(sqlx::Error),
}

/// Returns the message of an error. sqlx adds the line of PostgreSQL's source code that reported it.
pub(super) fn message(error: &sqlx::Error) -> String {
    error.as_database_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
}

/// The reason why a server does not accept writes.
pub(super) const READ_ONLY: &str = "it is a standby, or `default_transaction_read_only` is on";

/// Returns a remedy for a connection error, with a leading semicolon; empty if none is known.
fn hint(error: &sqlx::Error) -> &'static str {
    // The TLS library reports only the name of webpki's error.
    if error.to_string().contains("UnsupportedCertVersion") {
        return "; the server's certificate has the format X.509 version 1, and version 3 is needed: create one with \
                `openssl req -x509 -nodes -newkey rsa:2048 -subj /CN=HOST -addext subjectAltName=DNS:HOST -keyout server.key \
                -out server.crt` and set the server's `ssl_cert_file` to it";
    }
    ""
}

/// Beginnings of messages of Citus, and of libpq, which Citus uses, about a node lost within a transaction.
const LOST_NODE: [&str; 8] = [
    "failure on connection marked as essential",
    "server closed the connection unexpectedly",
    "postmaster was shut down",
    "could not receive data from server",
    "could not send data to server",
    "no connection to the server",
    "connection not open",
    "SSL connection has been closed unexpectedly",
];

/// Returns true for an error of Citus about a node that was lost within a transaction. Such errors have no SQLSTATE of
/// their own.
fn is_lost_node(database: &dyn DatabaseError) -> bool {
    const INTERNAL: &str = "XX000";
    database.code().is_some_and(|code| code == INTERNAL)
        && LOST_NODE.iter().any(|beginning| database.message().starts_with(beginning))
}

/// Returns true if a later attempt can succeed: lost connections, restarts, deadlocks, a full disk.
pub(super) fn is_transient(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::BeginFailed => true,
        sqlx::Error::Database(database) => {
            database.code().is_some_and(|code| {
                // Connection, authorization, rollback, resources, operator intervention, system; 25006: a read-only server.
                ["08", "28", "3D", "40", "53", "57", "58"].iter().any(|class| code.starts_with(class))
                    || code == "25006"
            }) || is_lost_node(database.as_ref())
        }
        _ => false,
    }
}

/// Remedy for a role without the privilege to change the schema.
pub(super) const OWNER_HINT: &str = "the role that Thunder connects as must own its tables: connect as the role that \
    created them, or hand them over with `reassign owned by OTHER_ROLE to ROLE`; a new database needs `grant create on \
    schema public to ROLE`";

/// Returns true if the role lacks a privilege.
pub(super) fn is_missing_privilege(error: &sqlx::Error) -> bool {
    const INSUFFICIENT_PRIVILEGE: &str = "42501";
    error
        .as_database_error()
        .and_then(sqlx::error::DatabaseError::code)
        .is_some_and(|code| code == INSUFFICIENT_PRIVILEGE)
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        let is_transient = is_transient(&error);
        if is_transient { &UNAVAILABLE } else { &REFUSED }.fetch_add(1, Relaxed);
        if is_transient {
            Self::Unavailable(error)
        } else if is_missing_privilege(&error) {
            Self::Privilege(error)
        } else {
            Self::Database(error)
        }
    }
}

impl From<sqlx::Error> for IngestError {
    fn from(error: sqlx::Error) -> Self {
        if is_transient(&error) {
            UNAVAILABLE.fetch_add(1, Relaxed);
            return Self::Unavailable { retry_after_s: 2 };
        }
        match &error {
            // 22: a value that the type cannot hold; 54: a limit of PostgreSQL, e.g. the depth of JSON.
            sqlx::Error::Database(database)
                if database.code().is_some_and(|code| code.starts_with("22") || code.starts_with("54")) =>
            {
                Self::Refused(database.message().to_owned())
            }
            _ => {
                REFUSED.fetch_add(1, Relaxed);
                Self::Database(error)
            }
        }
    }
}
