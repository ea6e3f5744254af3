//! A PostgreSQL server of our own: the real one, private to one data directory.
//!
//! `initdb` runs once; the server listens where nobody else can connect (see `listen`), and fsync stays on. A task starts
//! it again when it ends or is told to stop by another process. It has its own process group, so that Ctrl-C reaches
//! Thunder alone, which stores what it still holds and then stops it. If Thunder itself is killed with SIGKILL, the server
//! outlives it, and the next Thunder on the directory stops it before starting its own.

mod account;
mod listen;
mod postmaster;
mod processes;
mod programs;

use super::EmbeddedError;
use account::Account;
use listen::Listen;
use postmaster::{Postmaster, supervise};
use processes::Processes;
use programs::Programs;
use sha2::{Digest, Sha256};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

pub use postmaster::stop_all;

/// Name of the database and of its owner.
const NAME: &str = "thunder";

/// A start after a crash replays the log first, which can take a while.
const START_TIMEOUT: Duration = Duration::from_mins(5);

/// A running embedded server. Stop it with [`Embedded::stop`]; dropping it stops it in the background.
pub struct Embedded {
    server: Arc<Server>,
    supervisor: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
    /// Held as long as we live; the kernel lets go of it whatever way we die.
    _lock: File,
}

/// What is needed to start the server, again and again.
struct Server {
    account: Account,
    programs: Programs,
    processes: Processes,
    listen: Listen,
    log: PathBuf,
}

impl Embedded {
    /// Starts the server on a data directory, making the database if there is none.
    pub async fn start(data_dir: &Path, progress: &impl Fn(&str)) -> Result<Self, EmbeddedError> {
        Self::start_on(data_dir, progress, Listen::choose).await
    }

    /// The same with another choice of where it listens, from the account, its folder and the mark of the data directory.
    async fn start_on(
        data_dir: &Path,
        progress: &impl Fn(&str),
        listen: impl FnOnce(&Account, &Path, &str) -> Result<Listen, EmbeddedError>,
    ) -> Result<Self, EmbeddedError> {
        let account = Account::choose()?;
        let data_dir = make_data_dir(data_dir)?;
        let lock = lock(&data_dir)?;
        account.can_enter(&data_dir)?;
        let folder = data_dir.join("postgres");
        account.make_folder(&folder)?;
        let data = folder.join("data");
        let version = fs::read_to_string(data.join("PG_VERSION")).ok().map(|text| text.trim().to_owned());
        let programs = Programs::find(&data, version.as_deref())?;
        let [a, b, c, d, ..]: [u8; 32] = Sha256::digest(data.as_os_str().as_encoded_bytes()).into();
        let mark = format!("{:08x}", u32::from_be_bytes([a, b, c, d]));
        let listen = listen(&account, &folder, &mark)?;
        let processes = Processes { data, cluster: format!("thunder-{mark}") };
        let server = Arc::new(Server { account, programs, processes, listen, log: data_dir.join("postgres.log") });
        if server.clear().await {
            progress("stopped the database server that an earlier Thunder left behind");
        }
        if version.is_none() {
            progress("making a new database");
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

    /// How to connect to it.
    pub fn options(&self) -> PgConnectOptions {
        self.server.options(NAME)
    }

    /// Lets it write what it must and stops it. The connections should be closed by then.
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

    /// Stops what an earlier server left running, and removes what it left behind.
    async fn clear(&self) -> bool {
        let found_any = self.processes.clear().await;
        self.listen.clear();
        found_any
    }

    /// Makes the data directory under another name, so that an interrupted start leaves no half of one.
    async fn init(&self, folder: &Path) -> Result<(), EmbeddedError> {
        // an initdb that outlived its Thunder may still be writing: everyone has a folder of their own
        let fresh = folder.join(format!("data.new.{}", std::process::id()));
        for entry in fs::read_dir(folder).map_err(disk("cannot read", folder))?.flatten() {
            if entry.file_name().to_string_lossy().starts_with("data.new") {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let mut command = Command::new(self.programs.initdb());
        command.args(["--username", NAME, "--auth", "trust", "--no-locale", "--encoding", "UTF8", "--no-instructions"]);
        command.arg("--pgdata").arg(&fresh).env("LC_ALL", "C").current_dir(folder);
        self.account.lend(&mut command);
        self.finish(command, self.programs.initdb(), "").await?;
        fs::rename(&fresh, &self.processes.data).map_err(disk("cannot rename", &fresh))?;
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(disk("cannot write", folder))
    }

    /// Makes the password valid, where one is asked for: in single-user mode, where nobody can connect.
    async fn set_password(&self) -> Result<(), EmbeddedError> {
        let Listen::Loopback { password, .. } = &self.listen else { return Ok(()) };
        let mut command = Command::new(self.programs.postgres());
        command.arg("--single").arg("-D").arg(&self.processes.data).arg("postgres");
        command.env("LC_ALL", "C").env_remove("PGDATA").current_dir(&self.processes.data);
        self.account.lend(&mut command);
        self.finish(command, self.programs.postgres(), &format!("alter role {NAME} password '{password}'\n")).await
    }

    /// Runs a program to its end.
    async fn finish(&self, mut command: Command, program: PathBuf, input: &str) -> Result<(), EmbeddedError> {
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
        // Single-user mode tells errors and ends well.
        let refused = output.stderr.windows(6).any(|window| window == b"ERROR:");
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
            // after a crash every file is synced first: one call instead of one for each of thousands of partitions
            command.args(["-c", "recovery_init_sync_method=syncfs"]);
        }
        command.env("LC_ALL", "C").env_remove("PGDATA").current_dir(&self.processes.data);
        command.stdin(Stdio::null()).stdout(log).stderr(errors).process_group(0);
        self.account.lend(&mut command);
        command.spawn().map(Postmaster::new).map_err(|error| EmbeddedError::Program {
            program: self.programs.postgres(),
            status: error.to_string(),
            output: String::new(),
        })
    }

    fn open_log(&self) -> std::io::Result<File> {
        const LARGE: u64 = 16 << 20;
        if fs::metadata(&self.log).is_ok_and(|log| log.len() > LARGE) {
            fs::rename(&self.log, self.log.with_extension("log.old"))?;
        }
        open_private(File::options().create(true).append(true), &self.log)
    }

    async fn wait_until_ready(&self, postmaster: &mut Postmaster) -> Result<(), EmbeddedError> {
        let begin = Instant::now();
        loop {
            // the file of the socket comes first, and what listens there says that it is still starting
            if self.listen.may_answer() && self.make_database().await.is_ok() {
                return Ok(());
            }
            if let Ok(Some(status)) = postmaster.try_wait() {
                return Err(EmbeddedError::Program {
                    program: self.programs.postgres(),
                    status: status.to_string(),
                    output: self.end_of_log(),
                });
            }
            if begin.elapsed() > START_TIMEOUT {
                let (seconds, log) = (START_TIMEOUT.as_secs(), self.log.clone());
                return Err(EmbeddedError::NotReady { seconds, log, output: self.end_of_log() });
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    async fn make_database(&self) -> Result<(), sqlx::Error> {
        let mut connection = PgConnection::connect_with(&self.options("postgres").disable_statement_logging()).await?;
        let there: bool = sqlx::query_scalar("select exists (select from pg_database where datname = 'thunder')")
            .fetch_one(&mut connection)
            .await?;
        if !there {
            sqlx::query("create database thunder").execute(&mut connection).await?;
        }
        connection.close().await
    }

    /// Returns true if the server is shutting down and takes no new connections.
    fn is_stopping(&self) -> bool {
        // The eighth line is its state: "starting", "ready", "standby" or "stopping".
        let file = fs::read_to_string(self.processes.data.join("postmaster.pid"));
        file.is_ok_and(|text| text.lines().nth(7).is_some_and(|state| state.trim() == "stopping"))
    }

    fn end_of_log(&self) -> String {
        const LENGTH: i64 = 2000;
        let mut text = Vec::new();
        if let Ok(mut log) = File::open(&self.log) {
            let _ = log.seek(SeekFrom::End(-LENGTH)).or_else(|_| log.rewind().map(|()| 0));
            let _ = log.read_to_end(&mut text);
        }
        String::from_utf8_lossy(&text).trim().to_owned()
    }
}

/// The directory's absolute path; made if it is missing.
fn make_data_dir(data_dir: &Path) -> Result<PathBuf, EmbeddedError> {
    // the account that runs PostgreSQL must get through a folder that root makes, into one of its own
    let mode = if nix::unistd::geteuid().is_root() { 0o755 } else { 0o700 };
    DirBuilder::new().recursive(true).mode(mode).create(data_dir).map_err(disk("cannot create", data_dir))?;
    data_dir.canonicalize().map_err(disk("cannot find", data_dir))
}

fn lock(data_dir: &Path) -> Result<File, EmbeddedError> {
    let path = data_dir.join("thunder.lock");
    let file = open_private(File::options().create(true).truncate(false).read(true).write(true), &path);
    let mut file = file.map_err(disk("cannot open", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut owner = String::new();
            let _ = file.read_to_string(&mut owner);
            return Err(EmbeddedError::InUse { data_dir: data_dir.to_owned(), owner: owner.trim().parse().ok() });
        }
        Err(TryLockError::Error(error)) => return Err(disk("cannot lock", &path)(error)),
    }
    let _ = file.set_len(0).and_then(|()| file.write_all(format!("{}\n", std::process::id()).as_bytes()));
    Ok(file)
}

/// Opens a file that only its owner may read, also one that an earlier release made.
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
    async fn listens_with_a_password_where_no_socket_can_be() {
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
