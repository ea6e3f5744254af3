//! Errors of the embedded database.

use std::path::PathBuf;

/// An error at the start of the embedded PostgreSQL.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    /// No server programs were found.
    #[error(
        "no PostgreSQL server programs were found (looked in {searched}); install PostgreSQL 14 or newer (for example \
         `apt install postgresql` or `brew install postgresql`), set THUNDER_PG_BIN to its folder, or give the address \
         of a running server with --database-url or DATABASE_URL"
    )]
    NoPrograms {
        /// The searched folders.
        searched: String,
    },
    /// The data was created by a major version other than those of the programs found.
    #[error(
        "{} was created by PostgreSQL {data}, but the programs found are {found}; install PostgreSQL {data} or set \
         THUNDER_PG_BIN to its folder", data_dir.display()
    )]
    WrongVersion {
        /// The database's folder.
        data_dir: PathBuf,
        /// Major version of the data.
        data: String,
        /// The versions found, with their folders.
        found: String,
    },
    /// Another Thunder process uses the same data directory.
    #[error(
        "the data directory {} is in use by another Thunder{}; stop it, or choose another directory with --data-dir",
        data_dir.display(), owner.map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    InUse {
        /// The data directory.
        data_dir: PathBuf,
        /// Id of the other process, if known.
        owner: Option<i32>,
    },
    /// The data directory has no database, and the command does not create one.
    #[error(
        "no database in {}: choose the directory of an existing database with --data-dir, or create one with `thunder serve`",
        data_dir.display()
    )]
    NoDatabase {
        /// The data directory.
        data_dir: PathBuf,
    },
    /// PostgreSQL refuses to run as root, and the account used instead cannot reach the data.
    #[error(
        "PostgreSQL refuses to run as root, and the account '{account}' that runs it instead cannot enter {}; choose \
         another directory with --data-dir, for example /var/lib/thunder, or open that folder (chmod o+x)", folder.display()
    )]
    Unreachable {
        /// The account.
        account: String,
        /// The first folder of the path that it cannot enter.
        folder: PathBuf,
    },
    /// Neither `postgres` nor `nobody` exists.
    #[error(
        "PostgreSQL refuses to run as root, and there is neither an account 'postgres' nor 'nobody' to run it as; run \
         Thunder as another user, or give the address of a running server with --database-url"
    )]
    NoAccount,
    /// A server program failed.
    #[error("{program} failed ({status}): {output}")]
    Program {
        /// Path of the program.
        program: PathBuf,
        /// Exit status, or the reason why it could not be started.
        status: String,
        /// The end of its output.
        output: String,
    },
    /// The server did not answer in time.
    #[error("PostgreSQL did not accept connections within {seconds} seconds; the end of {} says: {output}", log.display())]
    NotReady {
        /// Seconds of waiting.
        seconds: u64,
        /// Log file of the server.
        log: PathBuf,
        /// The end of the log file.
        output: String,
    },
    /// An operation on a file or folder failed.
    #[error("{action} {}: {source}", path.display())]
    Disk {
        /// The failed operation, e.g. `cannot create`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Cause of the failure.
        source: std::io::Error,
    },
}
