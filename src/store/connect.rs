//! Opening the store.

use super::address::{Addresses, without_password};
use super::embedded::{self, Embedded};
use super::pool::{PgConnection, PgPool};
use super::servers::{self, Announcement, link::Link};
use super::spool::Spool;
use super::writer::RunWriter;
use super::{
    EmbeddedError, Error, Inner, LiveHub, RecorderChannel, RecorderState, Retention, Store, citus, maintenance,
    migrate, recorder,
};
use crate::events::system;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use uuid::Uuid;

/// Minimum major version of the server.
const MIN_MAJOR_VERSION: i32 = 14;
/// Maximum connections of readers and of `/ingest`.
const MAX_CONNECTIONS: u32 = 16;
/// Maximum time for a response of the database to a reader or to `/ingest`.
const RESPONSE_TIMEOUT: Duration = Duration::from_mins(2);
/// Maximum time for a response of the database to the maintenance, which counts and removes many rows at once.
const MAINTENANCE_TIMEOUT: Duration = Duration::from_mins(30);

/// The location of the data.
#[derive(Clone, PartialEq, Eq)]
pub enum Database {
    /// The embedded PostgreSQL server on this data directory.
    Embedded {
        /// Directory of the database, its log and the spool.
        data_dir: PathBuf,
    },
    /// An external PostgreSQL server.
    Url {
        /// `postgres://user:password@host:port/name`, or several hosts with commas between them.
        url: String,
        /// Address of the same database that bypasses the pooler at `url`.
        direct_url: Option<String>,
        /// Directory of the spool.
        data_dir: PathBuf,
    },
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded { data_dir } => write!(f, "embedded in {}", data_dir.display()),
            Self::Url { url, .. } => f.write_str(&without_password(url)),
        }
    }
}

impl Database {
    /// Checks that an embedded database has been created.
    ///
    /// # Errors
    /// The data directory has no database.
    pub fn check_exists(&self) -> Result<(), Error> {
        match self {
            Self::Embedded { data_dir } if !embedded::exists(data_dir) => {
                Err(EmbeddedError::NoDatabase { data_dir: data_dir.clone() }.into())
            }
            Self::Embedded { .. } | Self::Url { .. } => Ok(()),
        }
    }

    /// Checks that a store can write to its data directory, and that no other process runs the embedded server. Removes the
    /// files that the check creates.
    ///
    /// # Errors
    /// The errors of [`Store::open`] about the data directory.
    pub fn check_data_dir(&self) -> Result<(), Error> {
        let (Self::Embedded { data_dir } | Self::Url { data_dir, .. }) = self;
        if matches!(self, Self::Embedded { .. }) {
            embedded::check_unused(data_dir)?;
        }
        Spool::check(&data_dir.join("spool"))
    }
}

impl Store {
    /// Connects to the database or starts the embedded server, migrates the schema, drains the spool, and marks the runs of
    /// dead servers as interrupted.
    ///
    /// `progress` receives messages for the user.
    ///
    /// # Errors
    /// There is no server, it is too old, or its schema cannot be migrated; see [`Error`].
    pub async fn open(database: Database, progress: impl Fn(&str)) -> Result<Self, Error> {
        Self::open_with(database, RecorderChannel::new(), progress).await
    }

    /// Opens the store like [`Store::open`]. Its recorder stores the signals of `channel`.
    ///
    /// # Errors
    /// Same as [`Store::open`].
    pub async fn open_with(
        database: Database,
        channel: RecorderChannel,
        progress: impl Fn(&str),
    ) -> Result<Self, Error> {
        let (embedded, addresses, data_dir) = match database {
            Database::Embedded { data_dir } => {
                let embedded = Embedded::start(&data_dir, &progress).await?;
                let addresses = Addresses::embedded(embedded.options());
                (Some(embedded), addresses, data_dir)
            }
            Database::Url { url, direct_url, data_dir } => {
                (None, Addresses::connect(&url, direct_url.as_deref()).await?, data_dir)
            }
        };
        match PreparedStore::prepare(addresses, &data_dir, embedded.is_some(), &progress).await {
            Ok(opening) => Ok(Self { inner: Arc::new(opening.start(embedded, channel)) }),
            Err(error) => {
                if let Some(embedded) = embedded {
                    embedded.stop().await;
                }
                Err(error)
            }
        }
    }
}

/// The parts of a store whose tasks have not started.
struct PreparedStore {
    addresses: Arc<Addresses>,
    pool: PgPool,
    recorder_pool: PgPool,
    server_id: Uuid,
    live: LiveHub,
    spool: Spool,
}

impl PreparedStore {
    /// Migrates the schema, lists this server, and recovers the runs of dead servers.
    async fn prepare(
        addresses: Addresses,
        data_dir: &Path,
        is_embedded: bool,
        progress: &impl Fn(&str),
    ) -> Result<Self, Error> {
        let mut connection = addresses.direct().await?;
        check_version(&mut connection).await?;
        citus::check_coordinator(&mut connection).await?;
        migrate::migrate(&addresses, &mut connection, progress).await?;
        let (server_id, live) = (system::new_id(), LiveHub::new());
        servers::renew_heartbeat(&mut connection, server_id, &Announcement::default()).await?;
        let listed = servers::heartbeats(&mut connection).await?;
        connection.close().await?;

        let pool = |connections, wait| {
            PgPool::new(addresses.hosts(), addresses.statements(), connections, Duration::from_secs(wait))
        };
        let (pool, recorder_pool) = (pool(MAX_CONNECTIONS, 4), pool(2, 1));
        migrate::make_partitions(&pool, system::now().date_naive()).await?;
        let folder = data_dir.join("spool");
        // An embedded database has no other server, so all listed ones are dead.
        let listed = listed.into_iter().map(|(listed_id, _)| listed_id);
        let dead: Vec<Uuid> = listed.filter(|listed_id| is_embedded && *listed_id != server_id).collect();
        recover(&RunWriter { pool: pool.clone(), server_id }, &live, &folder, dead, progress).await?;
        let spool = Spool::create(&folder, server_id)?;
        Ok(Self { addresses: Arc::new(addresses), pool, recorder_pool, server_id, live, spool })
    }

    /// Starts the tasks of the store.
    fn start(self, embedded: Option<Embedded>, channel: RecorderChannel) -> Inner {
        let Self { addresses, pool, recorder_pool, server_id, live, spool } = self;
        let maintenance_pool = pool.with_response_timeout(MAINTENANCE_TIMEOUT);
        let pool = pool.with_response_timeout(RESPONSE_TIMEOUT);
        let retention = watch::Sender::new(Retention::default());
        let (announcement, mods) = (watch::Sender::new(Announcement::default()), watch::Sender::new(()));
        let (changes, committed) = mpsc::unbounded_channel();
        let uses_copy = addresses.is_local();
        let link = Link {
            writer: RunWriter { pool: pool.clone(), server_id },
            addresses,
            live: live.clone(),
            mods: mods.clone(),
            announcement: announcement.subscribe(),
            committed,
        };
        let maintenance = maintenance::run(maintenance_pool, retention.subscribe());
        let tasks = vec![tokio::spawn(link.run()), tokio::spawn(maintenance)];
        Inner {
            pool,
            uses_copy,
            recorder_pool,
            server_id,
            live,
            durability_acks: channel.durability_acks.clone(),
            unstored: channel.unstored.clone(),
            recorder: Mutex::new(RecorderState::Pending { spool, channel }),
            recorder_metrics: Arc::default(),
            closing: watch::Sender::new(false),
            retention,
            announcement,
            changes,
            mods,
            tasks,
            write_failed: Mutex::default(),
            embedded,
        }
    }
}

/// Stores the records in the spool files of dead servers, and marks the runs of these servers and of those in `dead` as
/// interrupted.
async fn recover(
    writer: &RunWriter,
    live: &LiveHub,
    folder: &Path,
    mut dead: Vec<Uuid>,
    progress: &impl Fn(&str),
) -> Result<(), Error> {
    for mut spool in Spool::orphans(folder) {
        if !spool.is_drained() {
            progress("storing the records of the spool file");
        }
        while !spool.is_drained() {
            Box::pin(recorder::drain_batch(writer, &mut spool)).await?;
        }
        dead.extend(spool.server_id());
        spool.remove();
    }
    for server_id in dead {
        servers::interrupt_runs_of(writer, live, server_id, None).await?;
    }
    Ok(())
}

pub(super) async fn check_version(connection: &mut PgConnection) -> Result<(), Error> {
    let (number, found): (i32, String) =
        sqlx::query_as("select current_setting('server_version_num')::integer, current_setting('server_version')")
            .fetch_one(connection)
            .await?;
    if number / 10_000 < MIN_MAJOR_VERSION { Err(Error::ServerTooOld { found }) } else { Ok(()) }
}
