//! Opening the store.

use super::address::{Addresses, without_password};
use super::embedded::Embedded;
use super::pool::{PgConnection, PgPool};
use super::servers::{self, Announcement, link::Link};
use super::spool::Spool;
use super::{
    Error, Inner, LiveHub, RecorderChannel, RecorderTask, Retention, Store, citus, maintenance, migrate, recorder,
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
        let opened = Self::connect(addresses, &data_dir, embedded.is_some(), channel, &progress).await;
        let (mut inner, server_id) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                if let Some(embedded) = embedded {
                    embedded.stop().await;
                }
                return Err(error);
            }
        };
        inner.embedded = embedded;
        inner.server_id = server_id;
        Ok(Self { inner: Arc::new(inner) })
    }

    async fn connect(
        addresses: Addresses,
        data_dir: &Path,
        is_embedded: bool,
        channel: RecorderChannel,
        progress: &impl Fn(&str),
    ) -> Result<(Inner, Uuid), Error> {
        let addresses = Arc::new(addresses);
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
        let uses_copy = addresses.is_local();
        let folder = data_dir.join("spool");
        // The servers of these spool files are dead. An embedded database has no other server, so all listed ones are dead.
        let mut dead: Vec<Uuid> = listed.into_iter().map(|(server, _)| server).filter(|_| is_embedded).collect();
        for mut spool in Spool::orphans(&folder) {
            if !spool.is_drained() {
                progress("storing the records of the spool file");
            }
            while !spool.is_drained() {
                Box::pin(recorder::drain_batch(&pool, server_id, &mut spool)).await?;
            }
            dead.extend(spool.server_id());
            spool.remove();
        }
        for server in dead.into_iter().filter(|&server| server != server_id) {
            servers::interrupt_runs_of(&pool, &live, server_id, server, None).await?;
        }
        let maintenance_pool = pool.with_response_timeout(MAINTENANCE_TIMEOUT);
        let pool = pool.with_response_timeout(RESPONSE_TIMEOUT);
        let spool = Spool::create(&folder, server_id)?;
        let retention = watch::Sender::new(Retention::default());
        let (announcement, mods) = (watch::Sender::new(Announcement::default()), watch::Sender::new(()));
        let (changes, committed) = mpsc::unbounded_channel();
        let link = Link {
            pool: pool.clone(),
            addresses,
            server_id,
            live: live.clone(),
            mods: mods.clone(),
            announcement: announcement.subscribe(),
            committed,
        };
        let maintenance = maintenance::run(maintenance_pool, retention.subscribe());
        let tasks = vec![tokio::spawn(link.run()), tokio::spawn(maintenance)];
        let inner = Inner {
            pool,
            uses_copy,
            recorder_pool,
            server_id,
            live,
            durability_acks: channel.durability_acks.clone(),
            unstored: channel.unstored.clone(),
            recorder: Mutex::new(RecorderTask::Pending(Some((spool, channel)))),
            recorder_metrics: Arc::default(),
            closing: watch::Sender::new(false),
            retention,
            announcement,
            changes,
            mods,
            tasks,
            write_failed: Mutex::default(),
            embedded: None,
        };
        Ok((inner, server_id))
    }
}

pub(super) async fn check_version(connection: &mut PgConnection) -> Result<(), Error> {
    let (number, found): (i32, String) =
        sqlx::query_as("select current_setting('server_version_num')::integer, current_setting('server_version')")
            .fetch_one(connection)
            .await?;
    if number / 10_000 < MIN_MAJOR_VERSION { Err(Error::ServerTooOld { found }) } else { Ok(()) }
}
