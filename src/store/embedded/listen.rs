//! Where the server listens: on a Unix socket in a folder that only its account can enter, or, where no such socket can be
//! made, on a port of 127.0.0.1 that asks for a random password.

use super::account::Account;
use super::{NAME, disk};
use crate::store::EmbeddedError;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// A socket address holds little more than 100 bytes; PostgreSQL appends `/.s.PGSQL.5432`.
const LONGEST_SOCKET_DIR: usize = 80;
/// The port in the name of a Unix socket.
const SOCKET_PORT: u16 = 5432;

/// Where the server listens.
pub(super) enum Listen {
    /// On a Unix socket in this folder, without a password.
    Socket(PathBuf),
    /// On 127.0.0.1.
    Loopback {
        /// The port.
        port: u16,
        /// Made anew at every start.
        password: String,
        /// The server's rules on who may connect.
        rules: PathBuf,
    },
}

impl Listen {
    /// A Unix socket where there can be one. `folder` belongs to the account, `mark` names the data directory.
    pub fn choose(account: &Account, folder: &Path, mark: &str) -> Result<Self, EmbeddedError> {
        let socket_dir = make_socket_dir(account, mark)?;
        let probe = socket_dir.join("probe");
        let _ = fs::remove_file(&probe);
        match UnixListener::bind(&probe) {
            Ok(_) => {
                let _ = fs::remove_file(&probe);
                Ok(Self::Socket(socket_dir))
            }
            Err(error) => {
                tracing::warn!(%error, folder = %socket_dir.display(),
                    "no Unix socket can be made here: the database listens on 127.0.0.1, and is slower to write to");
                Self::loopback(account, folder)
            }
        }
    }

    /// A free port of 127.0.0.1 and a new password.
    pub fn loopback(account: &Account, folder: &Path) -> Result<Self, EmbeddedError> {
        let rules = folder.join("loopback.conf");
        fs::write(&rules, format!("host all {NAME} 127.0.0.1/32 scram-sha-256\n"))
            .and_then(|()| account.take(&rules))
            .map_err(disk("cannot write", &rules))?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr());
        let port = port.map_err(disk("cannot listen on 127.0.0.1 for", folder))?.port();
        Ok(Self::Loopback { port, password: format!("{:032x}", rand::random::<u128>()), rules })
    }

    /// The server's settings.
    pub fn settings(&self) -> Vec<OsString> {
        let path = |name: &str, path: &Path| {
            let mut setting = OsString::from(name);
            setting.push(path);
            setting
        };
        match self {
            Self::Socket(folder) => vec![
                path("unix_socket_directories=", folder),
                "unix_socket_permissions=0700".into(),
                "listen_addresses=".into(),
                format!("port={SOCKET_PORT}").into(),
            ],
            Self::Loopback { port, rules, .. } => vec![
                "unix_socket_directories=".into(),
                "listen_addresses=127.0.0.1".into(),
                path("hba_file=", rules),
                format!("port={port}").into(),
            ],
        }
    }

    /// How to connect.
    pub fn options(&self) -> PgConnectOptions {
        let options = PgConnectOptions::new_without_pgpass().username(NAME).ssl_mode(PgSslMode::Disable);
        match self {
            Self::Socket(folder) => options.socket(folder).port(SOCKET_PORT),
            Self::Loopback { port, password, .. } => options.host("127.0.0.1").port(*port).password(password),
        }
    }

    /// Whether it makes sense to connect yet.
    pub fn may_answer(&self) -> bool {
        match self {
            Self::Socket(folder) => folder.join(socket_name()).exists(),
            Self::Loopback { .. } => true,
        }
    }

    /// Removes what a server that is gone left.
    pub fn clear(&self) {
        if let Self::Socket(folder) = self {
            let _ = fs::remove_file(folder.join(socket_name()));
            let _ = fs::remove_file(folder.join(format!("{}.lock", socket_name())));
        }
    }

    /// Removes the folder of the socket; the next start makes it anew.
    pub fn remove(&self) {
        self.clear();
        if let Self::Socket(folder) = self {
            let _ = fs::remove_dir(folder);
        }
    }
}

fn socket_name() -> String {
    format!(".s.PGSQL.{SOCKET_PORT}")
}

/// A short private folder in the temp directory, the same one at every start.
fn make_socket_dir(account: &Account, mark: &str) -> Result<PathBuf, EmbeddedError> {
    let mut parent = env::temp_dir();
    if parent.as_os_str().len() > LONGEST_SOCKET_DIR - 30 || account.can_enter(&parent).is_err() {
        parent = PathBuf::from("/tmp");
    }
    let folder = parent.join(format!("thunder-{}-{mark}", account.uid));
    account.make_folder(&folder)?;
    Ok(folder)
}
