//! Databases of the tests of the store.

use crate::harness::folder;
use crate::harness::postgres::{Postgres, TestDatabase};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thunder::store::{Database, EmbeddedError, Error, Store};
use tokio::net::{TcpStream, UnixListener};
use tokio::sync::watch;

/// A data directory and a database, which are removed with the test.
pub struct Data(pub PathBuf, Location);

enum Location {
    /// A database of the shared PostgreSQL server.
    Shared(TestDatabase),
    /// The same, with an address at which it can become unavailable.
    Proxied(TestDatabase, Proxy),
    /// A PostgreSQL server in the data directory.
    Embedded,
}

impl Data {
    /// Returns a migrated database.
    pub fn new() -> Self {
        Self(folder(), Location::Shared(TestDatabase::new()))
    }

    /// Returns an empty database.
    pub fn empty() -> Self {
        Self(folder(), Location::Shared(TestDatabase::empty()))
    }

    /// Returns a migrated database that [`Data::begin_outage`] makes unavailable to the stores of [`Data::open`].
    pub fn with_outages() -> Self {
        let (folder, database) = (folder(), TestDatabase::new());
        let proxy = Proxy::start(&folder, &database);
        Self(folder, Location::Proxied(database, proxy))
    }

    /// Closes all connections to the database and refuses others until [`Data::end_outage`].
    pub async fn begin_outage(&self) {
        let available = self.available();
        available.send_replace(false);
        // Each connection has a receiver, and the listener has one.
        while available.receiver_count() > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub fn end_outage(&self) {
        self.available().send_replace(true);
    }

    fn available(&self) -> &watch::Sender<bool> {
        let Location::Proxied(_, proxy) = &self.1 else { panic!("use `Data::with_outages`") };
        &proxy.is_available
    }

    /// Returns an embedded PostgreSQL server, which [`Data::open`] starts.
    pub fn embedded() -> Self {
        Self(folder(), Location::Embedded)
    }

    /// Returns a data directory for a store that uses another database.
    pub fn folder() -> Self {
        Self::embedded()
    }

    pub fn database(&self) -> Database {
        let data_dir = self.0.clone();
        let url = match &self.1 {
            Location::Shared(database) => database.url(),
            Location::Proxied(_, proxy) => proxy.url.clone(),
            Location::Embedded => return Database::Embedded { data_dir },
        };
        Database::Url { url, direct_url: None, data_dir }
    }

    /// Opens the store. Waits for the lock of the folder: processes that other tests start inherit it, and hold it briefly.
    pub async fn open(&self) -> Store {
        let begun = Instant::now();
        loop {
            match self.try_open().await {
                Err(Error::Embedded(EmbeddedError::InUse { .. })) if begun.elapsed() < Duration::from_mins(1) => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                opened => return opened.unwrap(),
            }
        }
    }

    pub async fn try_open(&self) -> Result<Store, Error> {
        Store::open(self.database(), |_| {}).await
    }

    /// Waits for the database server and returns its process id.
    pub async fn postmaster(&self) -> i32 {
        self.postmaster_after(0).await
    }

    /// Waits for the database server that replaces the process `killed`, and returns its process id.
    pub async fn postmaster_after(&self, killed: i32) -> i32 {
        let path = self.0.join("postgres/data/postmaster.pid");
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_mins(1) {
            let file = std::fs::read_to_string(&path).unwrap_or_default();
            let number = file.lines().next().and_then(|line| line.parse().ok());
            if let Some(number) = number.filter(|&number| number != killed) {
                return number;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the database server was not restarted");
    }

    /// Returns the address of the database for a second, independent client.
    pub fn url(&self) -> String {
        if let Location::Shared(database) | Location::Proxied(database, _) = &self.1 {
            return database.url();
        }
        let file = std::fs::read_to_string(self.0.join("postgres/data/postmaster.pid")).unwrap();
        let socket = file.lines().nth(4).unwrap().replace('/', "%2F");
        format!("postgres://thunder@{socket}/thunder")
    }

    pub fn spool_files(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.0.join("spool")).unwrap();
        files.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A Unix socket whose connections lead to a database while it is available.
struct Proxy {
    url: String,
    is_available: watch::Sender<bool>,
}

impl Proxy {
    fn start(folder: &Path, database: &TestDatabase) -> Self {
        let listener = UnixListener::bind(folder.join(".s.PGSQL.5432")).unwrap();
        let (is_available, receiver) = watch::channel(true);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut is_available = receiver.clone();
                tokio::spawn(async move {
                    let forward = async {
                        let mut server = TcpStream::connect(("127.0.0.1", Postgres::shared().port)).await?;
                        tokio::io::copy_bidirectional(&mut client, &mut server).await
                    };
                    tokio::select! {
                        biased;
                        _ = is_available.wait_for(|is_available| !is_available) => {}
                        _ = forward => {}
                    }
                });
            }
        });
        let name = database.url().rsplit_once('/').unwrap().1.to_owned();
        let folder = folder.to_str().unwrap().replace('/', "%2F");
        Self { url: format!("postgres://postgres@{folder}/{name}?sslmode=disable"), is_available }
    }
}
