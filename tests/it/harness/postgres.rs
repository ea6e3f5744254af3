//! The PostgreSQL server of the test process, and the databases in it.
//!
//! The server starts once. Test databases with all migrations are copies of a template database.

use super::cleanup::{Tracked, folder};
use super::{certificate, free_port};
use nix::unistd::{Pid, Uid, User};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use thunder::store::{Database, Store};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Maximum start time of a program.
const START_TIMEOUT: Duration = Duration::from_mins(1);
/// The migrated database that all test databases are copied from.
const TEMPLATE: &str = "template_thunder";

/// A PostgreSQL server with a Unix socket and, for the tests that need it, TLS on a port of 127.0.0.1.
pub struct Postgres {
    pub port: u16,
    folder: PathBuf,
}

impl Postgres {
    /// Returns the server of all tests; the first call starts it.
    pub fn shared() -> &'static Self {
        static SHARED: LazyLock<Postgres> = LazyLock::new(Postgres::start);
        &SHARED
    }

    /// Starts a separate server.
    pub fn start() -> Self {
        let this = Self { port: free_port(), folder: folder() };
        give_to_account(&this.folder);
        let data = this.folder.join("data");
        let mut initdb = as_postgres(&program("initdb"));
        initdb.args(["--username", "postgres", "--auth", "trust", "--no-locale", "--encoding", "UTF8", "--no-sync"]);
        let output = initdb.arg("-D").arg(&data).current_dir(&this.folder).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for name in ["server.pem", "server.key"] {
            std::fs::copy(certificate(name), data.join(name)).unwrap();
            std::fs::set_permissions(data.join(name), std::fs::Permissions::from_mode(0o600)).unwrap();
            give_to_account(&data.join(name));
        }
        // The data need not be durable, and databases of seconds need no autovacuum. Each server under test has up to 20
        // connections.
        let settings = format!(
            "listen_addresses=127.0.0.1;port={};unix_socket_directories={};ssl=on;ssl_cert_file=server.pem;\
             ssl_key_file=server.key;fsync=off;full_page_writes=off;wal_level=minimal;max_wal_senders=0;\
             shared_buffers=64MB;max_connections=1000;jit=off;autovacuum=off;timezone=UTC;log_timezone=UTC",
            this.port,
            this.folder.display()
        );
        let mut postgres = as_postgres(&program("postgres"));
        postgres.arg("-D").arg(&data).current_dir(&this.folder).env("LC_ALL", "C");
        postgres.args(settings.split(';').flat_map(|setting| ["-c", setting]));
        let log = this.folder.join("postgres.log");
        start_program(postgres, &log);
        this.wait_ready(&log);
        this.make_template();
        this
    }

    /// Kills the server. It may still answer for a moment.
    pub fn stop(&self) {
        let file = std::fs::read_to_string(self.folder.join("data/postmaster.pid")).unwrap();
        let pid = Pid::from_raw(file.lines().next().unwrap().parse().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGQUIT).unwrap();
    }

    fn make_template(&self) {
        self.sql(&format!("create database {TEMPLATE}"));
        let database =
            Database::Url { url: self.url(TEMPLATE), direct_url: None, data_dir: self.folder.join("template") };
        // The caller may be in a runtime, and a runtime must not block the thread of another.
        let migrate = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async { Store::open(database, |_| {}).await.unwrap().close().await });
        };
        std::thread::scope(|scope| scope.spawn(migrate).join().unwrap());
        self.sql(&format!("alter database {TEMPLATE} with is_template true allow_connections false"));
    }

    /// Creates an empty database and returns its address over TCP.
    pub fn empty_database(&self, name: &str) -> String {
        self.sql(&format!("create database {name}"));
        format!("postgres://postgres@localhost:{}/{name}", self.port)
    }

    /// Returns the address of a database over the Unix socket.
    fn url(&self, name: &str) -> String {
        format!("postgres://postgres@{}:{}/{name}", self.folder.to_str().unwrap().replace('/', "%2F"), self.port)
    }

    /// Waits until the server reports in its status file that it accepts connections; its port opens earlier.
    fn wait_ready(&self, log: &Path) {
        let begun = Instant::now();
        let status = self.folder.join("data/postmaster.pid");
        while std::fs::read_to_string(&status).ok().and_then(|text| Some(text.lines().nth(7)?.trim() == "ready"))
            != Some(true)
        {
            assert!(begun.elapsed() < START_TIMEOUT, "{}", std::fs::read_to_string(log).unwrap_or_default());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs a statement outside of the databases under test.
    fn sql(&self, statement: &str) {
        let output = psql_command(&self.url("postgres"), statement).output().unwrap();
        assert!(output.status.success(), "{statement}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// A migrated database of one test, in the shared server. It is removed when this is dropped.
pub struct TestDatabase {
    name: String,
}

impl TestDatabase {
    /// Copies the template.
    pub fn new() -> Self {
        Self::create(&format!("template {TEMPLATE}"))
    }

    /// Creates a database without migrations.
    pub fn empty() -> Self {
        Self::create("")
    }

    fn create(options: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        Postgres::shared().sql(&format!("create database {name} {options}"));
        Self { name }
    }

    /// Returns its address.
    pub fn url(&self) -> String {
        Postgres::shared().url(&self.name)
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        let statement = format!("drop database {} with (force)", self.name);
        let drop = move || psql_command(&Postgres::shared().url("postgres"), &statement).output();
        // The test does not wait for the removal; the whole server is removed at the end.
        std::thread::spawn(drop);
    }
}

/// A database that accepts connections but does not respond until [`SilentDatabase::answer`] is called, so that a
/// server on it keeps loading.
pub struct SilentDatabase {
    pub url: String,
    answers: watch::Sender<bool>,
    _database: TestDatabase,
}

impl SilentDatabase {
    pub async fn new() -> Self {
        let database = TestDatabase::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (answers, may_answer) = watch::channel(false);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut may_answer = may_answer.clone();
                tokio::spawn(async move {
                    may_answer.wait_for(|&answers| answers).await?;
                    let mut server = TcpStream::connect(("127.0.0.1", Postgres::shared().port)).await?;
                    tokio::io::copy_bidirectional(&mut client, &mut server).await?;
                    Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
                });
            }
        });
        let url = format!("postgres://postgres@{address}/{}?sslmode=disable", database.name);
        Self { url, answers, _database: database }
    }

    /// Makes the database respond.
    pub fn answer(&self) {
        self.answers.send_replace(true);
    }
}

/// Runs SQL with `psql`, which is an independent client, and returns its output.
pub async fn psql(url: &str, sql: &str) -> String {
    let output = tokio::process::Command::from(psql_command(url, sql)).output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Waits until the query returns `expected`, for up to a minute.
pub async fn wait_for_psql(url: &str, sql: &str, expected: &str) {
    let begun = Instant::now();
    loop {
        let found = psql(url, sql).await;
        if found == expected {
            return;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "{sql}: {found} instead of {expected}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Ends the connections of a database on which servers listen for notifications, and returns their number.
pub async fn kill_listeners(url: &str) -> String {
    let sql = "select count(pg_terminate_backend(pid)) from pg_stat_activity
        where application_name = 'thunder notifications' and datname = current_database()";
    psql(url, sql).await
}

fn psql_command(url: &str, sql: &str) -> Command {
    let mut command = Command::new(program("psql"));
    command.args([url, "-XAtc", sql]).stdin(Stdio::null());
    command
}

/// Returns the path of a program of PostgreSQL.
fn program(name: &str) -> PathBuf {
    let configured = std::env::var("THUNDER_PG_BIN").ok().map(PathBuf::from);
    let versions = (14..=30).rev().map(|version| PathBuf::from(format!("/usr/lib/postgresql/{version}/bin")));
    let path = std::env::var("PATH").unwrap_or_default();
    let paths = path.split(':').map(PathBuf::from).collect::<Vec<_>>();
    let all = configured.into_iter().chain(versions).chain(paths).map(|folder| folder.join(name));
    all.into_iter().find(|path| path.exists()).unwrap_or_else(|| panic!("{name} is not installed"))
}

/// Returns the account for programs that reject root; `None` if the tests do not run as root.
fn account() -> Option<User> {
    Uid::effective().is_root().then(|| User::from_name("postgres").unwrap().expect("there is no account postgres"))
}

/// Returns a command that runs as the account postgres if the tests run as root.
pub fn as_postgres(program: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some(account) = account() {
        command.uid(account.uid.as_raw()).gid(account.gid.as_raw());
    }
    command
}

/// Makes the account of [`as_postgres`] the owner of a path.
fn give_to_account(path: &Path) {
    if let Some(account) = account() {
        chown(path, Some(account.uid.as_raw()), Some(account.gid.as_raw())).unwrap();
    }
}

/// Starts a program that runs until the test process ends.
#[expect(clippy::zombie_processes, reason = "the program outlives the tests and is then ended with their folder")]
pub fn start_program(mut command: Command, log: &Path) {
    let log = std::fs::File::create(log).unwrap();
    let child = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
    std::mem::forget(Tracked::new(Pid::from_raw(child.id().cast_signed())));
}

/// Waits until a program accepts connections.
pub fn wait_for_port(port: u16, log: &Path) {
    let begun = Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(begun.elapsed() < START_TIMEOUT, "{}", std::fs::read_to_string(log).unwrap_or_default());
        std::thread::sleep(Duration::from_millis(20));
    }
}
