//! The address of the embedded server: a Unix socket in a folder that only its account can enter. If no such socket can
//! be created, a port of 127.0.0.1 that requires a random password.

use super::account::Account;
use super::{NAME, disk};
use crate::events::system;
use crate::store::EmbeddedError;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Maximum length of the socket's folder. A socket address holds little more than 100 bytes, and PostgreSQL appends
/// `/.s.PGSQL.5432`.
const MAX_SOCKET_DIR_BYTES: usize = 80;
/// The port in the name of a Unix socket.
const SOCKET_PORT: u16 = 5432;

/// The address of the embedded server.
pub(super) enum Listen {
    /// On a Unix socket in this folder, without a password.
    Socket(PathBuf),
    /// On 127.0.0.1.
    Loopback {
        /// The port.
        port: u16,
        /// Password, generated at every start.
        password: String,
        /// File with the server's authentication rules (`pg_hba.conf` format).
        rules: PathBuf,
    },
}

impl Listen {
    /// Returns a Unix socket if one can be created, else a loopback port. `folder` belongs to the account; `data_dir_id`
    /// identifies the data directory.
    pub fn choose(account: &Account, folder: &Path, data_dir_id: &str) -> Result<Self, EmbeddedError> {
        let socket_dir = make_socket_dir(account, data_dir_id)?;
        let probe = socket_dir.join("probe");
        let _ = fs::remove_file(&probe);
        match UnixListener::bind(&probe) {
            Ok(_) => {
                let _ = fs::remove_file(&probe);
                Ok(Self::Socket(socket_dir))
            }
            Err(error) => {
                tracing::warn!(%error, folder = %socket_dir.display(),
                    "cannot create a Unix socket; the database listens on 127.0.0.1, where writes are slower");
                Self::loopback(account, folder)
            }
        }
    }

    /// Returns a free port of 127.0.0.1 with a new password.
    pub fn loopback(account: &Account, folder: &Path) -> Result<Self, EmbeddedError> {
        let rules = folder.join("loopback.conf");
        fs::write(&rules, format!("host all {NAME} 127.0.0.1/32 scram-sha-256\n"))
            .and_then(|()| account.make_private(&rules))
            .map_err(disk("cannot write", &rules))?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr());
        let port = port.map_err(disk("cannot listen on 127.0.0.1 for", folder))?.port();
        Ok(Self::Loopback { port, password: format!("{:032x}", system::random::<u128>()), rules })
    }

    /// Returns the server settings for this address.
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

    /// Returns the options of a connection to this address.
    pub fn options(&self) -> PgConnectOptions {
        let options = PgConnectOptions::new_without_pgpass().username(NAME).ssl_mode(PgSslMode::Disable);
        match self {
            Self::Socket(folder) => options.socket(folder).port(SOCKET_PORT),
            Self::Loopback { port, password, .. } => options.host("127.0.0.1").port(*port).password(password),
        }
    }

    /// Removes the socket files of a server that has ended.
    pub fn clear(&self) {
        if let Self::Socket(folder) = self {
            let _ = fs::remove_file(folder.join(socket_name()));
            let _ = fs::remove_file(folder.join(format!("{}.lock", socket_name())));
        }
    }

    /// Removes the socket's folder. The next start creates it again.
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

/// Creates a short private folder in the temp directory, with the same name at every start.
fn make_socket_dir(account: &Account, data_dir_id: &str) -> Result<PathBuf, EmbeddedError> {
    let mut parent = env::temp_dir();
    if parent.as_os_str().len() > MAX_SOCKET_DIR_BYTES - 30 || account.check_can_enter(&parent).is_err() {
        parent = PathBuf::from("/tmp");
    }
    let folder = parent.join(format!("thunder-{}-{data_dir_id}", account.uid));
    account.create_folder(&folder)?;
    Ok(folder)
}
