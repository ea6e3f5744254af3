//! The embedded database: a standard PostgreSQL server, private to one data directory.
//!
//! `initdb` runs once. The server accepts only local, private connections (see `listen`), and fsync stays on. A
//! supervisor task restarts the server when it ends or when another process stops it. The server has its own process
//! group, so Ctrl-C reaches only Thunder, which stores its remaining data and then stops the server. If Thunder is
//! killed with SIGKILL, the server keeps running; the next Thunder process with this directory stops it before it
//! starts its own.

mod account;
mod data_dir;
mod listen;
mod postmaster;
mod processes;
mod programs;

use super::EmbeddedError;
use account::Account;
use data_dir::{DataDirLock, lock, make_data_dir};
use listen::Listen;
use memchr::memmem;
use postmaster::{Postmaster, supervise};
use processes::Processes;
use programs::Programs;
use rustix::process::{Pid, getpriority_process, setpriority_process};
use sha2::{Digest, Sha256};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

pub use data_dir::{check_unused, exists};
pub use postmaster::stop_all;

/// Name of the database and of its owner.
const NAME: &str = "thunder";

/// Nice value of the server, added to that of this thread.
const EXTRA_NICE: i32 = 5;

/// Maximum duration of a start. After a crash, PostgreSQL replays its write-ahead log first, which can take minutes.
const START_TIMEOUT: Duration = Duration::from_mins(5);

/// Interval between checks of a server that is starting.
const READY_INTERVAL: Duration = Duration::from_millis(2);

/// SQLSTATE of a connection to a database that does not exist.
const UNKNOWN_DATABASE: &str = "3D000";

/// Returns the connection options of the server that another process runs on this data directory; `None` if it has no
/// Unix socket.
pub fn running_server_options(data_dir: &Path) -> Option<PgConnectOptions> {
    // The fifth line is the folder of its socket.
    let file = fs::read_to_string(data_dir.join("postgres/data/postmaster.pid")).ok()?;
    let folder = file.lines().nth(4).filter(|folder| !folder.is_empty())?;
    Some(Listen::Socket(folder.into()).options().database(NAME))
}

/// A running embedded server. Stop it with [`Embedded::stop`]; dropping it stops it in the background.
pub struct Embedded {
    server: Arc<Server>,
    supervisor: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
    /// Lock of the data directory. The kernel releases it when the process ends, even after SIGKILL.
    _lock: DataDirLock,
}

/// The configuration of the server process, used at every start.
struct Server {
    account: Account,
    programs: Programs,
    processes: Processes,
    listen: Listen,
    log: PathBuf,
}

impl Embedded {
    /// Starts the server on a data directory and creates the database if it does not exist.
    pub async fn start(data_dir: &Path, progress: &impl Fn(&str)) -> Result<Self, EmbeddedError> {
        Self::start_on(data_dir, progress, Listen::choose).await
    }

    /// Starts the server like [`Embedded::start`], with a function that chooses the address from the account, the
    /// `postgres` folder and the id of the data directory.
    async fn start_on(
        data_dir: &Path,
        progress: &impl Fn(&str),
        listen: impl FnOnce(&Account, &Path, &str) -> Result<Listen, EmbeddedError>,
    ) -> Result<Self, EmbeddedError> {
        let account = Account::choose()?;
        let data_dir = make_data_dir(data_dir)?;
        let lock = lock(&data_dir)?;
        account.check_can_enter(&data_dir)?;
        let folder = data_dir.join("postgres");
        account.create_folder(&folder)?;
        let data = folder.join("data");
        let version = fs::read_to_string(data.join("PG_VERSION")).ok().map(|text| text.trim().to_owned());
        // The search starts programs of PostgreSQL, so it takes as long as the search for processes of an earlier start.
        let found = {
            let (data, version) = (data.clone(), version.clone());
            tokio::task::spawn_blocking(move || Programs::find(&data, version.as_deref()))
        };
        let [a, b, c, d, ..]: [u8; 32] = Sha256::digest(data.as_os_str().as_encoded_bytes()).into();
        let data_dir_id = format!("{:08x}", u32::from_be_bytes([a, b, c, d]));
        let listen = listen(&account, &folder, &data_dir_id)?;
        let processes = Processes { data, cluster: format!("thunder-{data_dir_id}") };
        let (found_processes, programs) = tokio::join!(processes.clear(), found);
        listen.clear();
        let programs = programs.unwrap_or_else(|error| {
            Err(disk("cannot search for the programs of PostgreSQL for", &data_dir)(std::io::Error::other(error)))
        });
        let programs = programs.inspect_err(|_| listen.remove())?;
        let server = Arc::new(Server { account, programs, processes, listen, log: data_dir.join("postgres.log") });
        if found_processes {
            progress("stopped the database server of an earlier Thunder process");
        }
        if version.is_none() {
            progress("creating the database");
            server.init(&folder).await?;
        }
        server.set_password().await?;
        progress("starting the database");
        let mut postmaster = server.spawn()?;
        server.wait_until_ready(&mut postmaster).await?;
        let (stop, stopped) = oneshot::channel();
        let supervisor = tokio::spawn(supervise(Arc::clone(&server), postmaster, stopped));
        Ok(Self { server, supervisor: Mutex::new(Some((stop, supervisor))), _lock: lock })
    }

    /// Returns the options of a connection to the server.
    pub fn options(&self) -> PgConnectOptions {
        self.server.options(NAME)
    }

    /// Stops the server with a checkpoint. Close all connections first.
    pub async fn stop(&self) {
        if let Some((stop, supervisor)) = self.supervisor.lock().await.take() {
            let _ = stop.send(());
            let _ = supervisor.await;
        }
    }
}

impl Server {
    fn options(&self, database: &str) -> PgConnectOptions {
        self.listen.options().database(database)
    }

    /// Stops processes of an earlier server and removes its files. Returns true if there were such processes.
    async fn clear(&self) -> bool {
        let found_any = self.processes.clear().await;
        self.listen.clear();
        found_any
    }

    /// Creates PostgreSQL's data directory under a temporary name and renames it, so an interrupted start leaves no
    /// partial directory.
    async fn init(&self, folder: &Path) -> Result<(), EmbeddedError> {
        // The initdb of a killed Thunder process may still be writing, so every process uses its own folder.
        let fresh = folder.join(format!("data.new.{}", std::process::id()));
        for entry in fs::read_dir(folder).map_err(disk("cannot read", folder))?.flatten() {
            if entry.file_name().to_string_lossy().starts_with("data.new") {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let mut command = Command::new(self.programs.initdb());
        command.args(["--username", NAME, "--auth", "trust", "--no-locale", "--encoding", "UTF8", "--no-instructions"]);
        command.arg("--pgdata").arg(&fresh).env("LC_ALL", "C").current_dir(folder);
        self.account.set_account(&mut command);
        self.run_program(command, self.programs.initdb(), "").await?;
        fs::rename(&fresh, &self.processes.data).map_err(disk("cannot rename", &fresh))?;
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(disk("cannot write", folder))
    }

    /// Sets the password for connections over a loopback address. Uses single-user mode, so that no client can connect
    /// before the password is set.
    async fn set_password(&self) -> Result<(), EmbeddedError> {
        let Listen::Loopback { password, .. } = &self.listen else { return Ok(()) };
        let mut command = Command::new(self.programs.postgres());
        command.arg("--single").arg("-D").arg(&self.processes.data).arg("postgres");
        command.env("LC_ALL", "C").env_remove("PGDATA").current_dir(&self.processes.data);
        self.account.set_account(&mut command);
        self.run_program(command, self.programs.postgres(), &format!("alter role {NAME} password '{password}'\n")).await
    }

    /// Runs a program and waits until it ends.
    async fn run_program(&self, mut command: Command, program: PathBuf, input: &str) -> Result<(), EmbeddedError> {
        let failed = |status: String, output: &[u8]| EmbeddedError::Program {
            program: program.clone(),
            status,
            output: String::from_utf8_lossy(output).trim().to_owned(),
        };
        let broken = |error: std::io::Error| failed(error.to_string(), &[]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(broken)?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input.as_bytes()).await.map_err(broken)?;
        }
        let output = child.wait_with_output().await.map_err(broken)?;
        // Single-user mode prints errors and still exits with status 0.
        let refused = memmem::find(&output.stderr, b"ERROR:").is_some();
        if output.status.success() && !refused {
            Ok(())
        } else {
            Err(failed(output.status.to_string(), &output.stderr))
        }
    }

    fn spawn(&self) -> Result<Postmaster, EmbeddedError> {
        let log = self.open_log().map_err(disk("cannot open", &self.log))?;
        let errors = log.try_clone().map_err(disk("cannot open", &self.log))?;
        let mut command = Command::new(self.programs.postgres());
        command.arg("-D").arg(&self.processes.data);
        for setting in self.listen.settings() {
            command.arg("-c").arg(setting);
        }
        command.arg("-c").arg(format!("cluster_name={}", self.processes.cluster));
        for setting in [
            "max_connections=64",
            "logging_collector=off",
            "log_destination=stderr",
            "timezone=UTC",
            "log_timezone=UTC",
            "jit=off",
        ] {
            command.args(["-c", setting]);
        }
        if cfg!(target_os = "linux") {
            // After a crash PostgreSQL syncs every file. With syncfs that is one call instead of one for each of
            // thousands of partition files.
            command.args(["-c", "recovery_init_sync_method=syncfs"]);
        }
        command.env("LC_ALL", "C").env_remove("PGDATA").current_dir(&self.processes.data);
        command.stdin(Stdio::null()).stdout(log).stderr(errors).process_group(0);
        self.account.set_account(&mut command);
        let child = command.spawn().map_err(|error| EmbeddedError::Program {
            program: self.programs.postgres(),
            status: error.to_string(),
            output: String::new(),
        })?;
        // The threads of a decode wait for each other, so one that shares its core with PostgreSQL delays all. The
        // server's other processes inherit the priority.
        let nice = getpriority_process(None).unwrap_or(0) + EXTRA_NICE;
        if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed()))
            && let Err(error) = setpriority_process(Some(pid), nice)
        {
            tracing::debug!(%error, "cannot lower the priority of the database");
        }
        Ok(Postmaster::new(child))
    }

    fn open_log(&self) -> std::io::Result<File> {
        const MAX_LOG_BYTES: u64 = 16 << 20;
        if fs::metadata(&self.log).is_ok_and(|log| log.len() > MAX_LOG_BYTES) {
            fs::rename(&self.log, self.log.with_extension("log.old"))?;
        }
        open_private(File::options().create(true).append(true), &self.log)
    }

    async fn wait_until_ready(&self, postmaster: &mut Postmaster) -> Result<(), EmbeddedError> {
        let begin = Instant::now();
        loop {
            if self.is_ready() && self.create_database().await.is_ok() {
                return Ok(());
            }
            if let Ok(Some(status)) = postmaster.try_wait() {
                return Err(EmbeddedError::Program {
                    program: self.programs.postgres(),
                    status: status.to_string(),
                    output: self.log_tail(),
                });
            }
            if begin.elapsed() > START_TIMEOUT {
                let (seconds, log) = (START_TIMEOUT.as_secs(), self.log.clone());
                return Err(EmbeddedError::NotReady { seconds, log, output: self.log_tail() });
            }
            sleep(READY_INTERVAL).await;
        }
    }

    /// Creates the database if it does not exist.
    async fn create_database(&self) -> Result<(), sqlx::Error> {
        match PgConnection::connect_with(&self.options(NAME).disable_statement_logging()).await {
            Ok(connection) => return connection.close().await,
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(UNKNOWN_DATABASE) => {}
            Err(error) => return Err(error),
        }
        let mut connection = PgConnection::connect_with(&self.options("postgres").disable_statement_logging()).await?;
        let exists: bool = sqlx::query_scalar("select exists (select from pg_database where datname = 'thunder')")
            .fetch_one(&mut connection)
            .await?;
        if !exists {
            sqlx::query("create database thunder").execute(&mut connection).await?;
        }
        connection.close().await
    }

    /// Returns true if the server accepts connections.
    fn is_ready(&self) -> bool {
        self.has_state("ready")
    }

    /// Returns true if the server is shutting down and takes no new connections.
    fn is_stopping(&self) -> bool {
        self.has_state("stopping")
    }

    fn has_state(&self, wanted: &str) -> bool {
        // The eighth line of postmaster.pid is the state: "starting", "ready", "standby" or "stopping".
        let file = fs::read_to_string(self.processes.data.join("postmaster.pid"));
        file.is_ok_and(|text| text.lines().nth(7).is_some_and(|state| state.trim() == wanted))
    }

    fn log_tail(&self) -> String {
        const LENGTH: i64 = 2000;
        let mut text = Vec::new();
        if let Ok(mut log) = File::open(&self.log) {
            let _ = log.seek(SeekFrom::End(-LENGTH)).or_else(|_| log.rewind().map(|()| 0));
            let _ = log.read_to_end(&mut text);
        }
        String::from_utf8_lossy(&text).trim().to_owned()
    }
}

/// Opens a file and restricts it to its owner. Earlier releases created files with wider permissions.
fn open_private(options: &mut OpenOptions, path: &Path) -> std::io::Result<File> {
    let file = options.mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(file)
}

fn disk(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> EmbeddedError {
    let path = path.to_owned();
    move |source| EmbeddedError::Disk { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn loopback_address_requires_the_password() {
        let data_dir = std::env::temp_dir().join(format!("thunder-loopback-{}", std::process::id()));
        for _ in 0..2 {
            let loopback = |account: &Account, folder: &Path, _: &str| Listen::loopback(account, folder);
            let embedded = Embedded::start_on(&data_dir, &|_| {}, loopback).await.unwrap();
            let mut connection = PgConnection::connect_with(&embedded.options()).await.unwrap();
            let one: i32 = sqlx::query_scalar("select 1").fetch_one(&mut connection).await.unwrap();
            assert_eq!(one, 1);
            connection.close().await.unwrap();
            let guess = embedded.options().password("guess");
            let refused = PgConnection::connect_with(&guess).await.unwrap_err().to_string();
            assert!(refused.contains("password authentication failed"), "{refused}");
            embedded.stop().await;
        }
        fs::remove_dir_all(&data_dir).unwrap();
    }
}
