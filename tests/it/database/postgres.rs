//! A PostgreSQL server with TLS on a TCP port, and poolers before it.

use crate::harness::{certificate, clean_up_later, folder, free_port};
use nix::unistd::{Uid, User};
use sqlx::{Connection, PgConnection, QueryBuilder};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Time for a server to begin.
const PATIENCE: Duration = Duration::from_mins(1);

/// A server that runs until the tests end.
pub struct Postgres {
    pub port: u16,
    pub folder: PathBuf,
}

impl Postgres {
    /// The one of all tests that only need databases of their own.
    pub async fn shared() -> &'static Self {
        static POSTGRES: LazyLock<Postgres> = LazyLock::new(Postgres::start);
        tokio::task::spawn_blocking(|| LazyLock::force(&POSTGRES)).await.unwrap()
    }

    /// Starts one on a new folder.
    pub fn start() -> Self {
        let this = Self { port: free_port(), folder: folder() };
        own(&this.folder);
        let data = this.folder.join("data");
        let mut initdb = as_postgres(&program("initdb"));
        initdb.args([
            "--username",
            "postgres",
            "--auth",
            "trust",
            "--no-locale",
            "--encoding",
            "UTF8",
            "--no-sync",
            "-D",
        ]);
        let output = initdb.arg(&data).current_dir(&this.folder).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for name in ["server.pem", "server.key"] {
            std::fs::copy(certificate(name), data.join(name)).unwrap();
            std::fs::set_permissions(data.join(name), std::fs::Permissions::from_mode(0o600)).unwrap();
            own(&data.join(name));
        }
        this.run();
        this
    }

    /// Starts its program, again after it ended; its process.
    pub fn run(&self) -> u32 {
        let data = self.folder.join("data");
        let settings = format!(
            "listen_addresses=127.0.0.1;port={};unix_socket_directories={};ssl=on;ssl_cert_file=server.pem;\
             ssl_key_file=server.key;fsync=off;max_connections=200",
            self.port,
            self.folder.display()
        );
        let mut postgres = as_postgres(&program("postgres"));
        postgres.arg("-D").arg(&data).current_dir(&self.folder);
        postgres.args(settings.split(';').flat_map(|setting| ["-c", setting]));
        let pid = begin(postgres, &self.folder, "postgres.log");
        wait_for_port(self.port, &self.folder.join("postgres.log"));
        pid
    }

    /// Address of a new database.
    pub async fn database(&self, name: &str) -> String {
        let server = format!("postgres://postgres@localhost:{}", self.port);
        let begun = Instant::now();
        let mut connection = loop {
            match PgConnection::connect(&format!("{server}/postgres")).await {
                Ok(connection) => break connection,
                Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        };
        let mut create = QueryBuilder::<sqlx::Postgres>::new("create database ");
        create.push(name).build().execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
        format!("{server}/{name}")
    }
}

/// pgbouncer before a server.
pub struct Pooler {
    port: u16,
}

impl Pooler {
    /// Starts one in that mode; `None`, with a sentence, where the program is missing.
    pub fn start(postgres: &Postgres, mode: &str) -> Option<Self> {
        let Some(pgbouncer) = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/opt/homebrew/bin/pgbouncer"]
            .into_iter()
            .find(|path| Path::new(path).exists())
        else {
            eprintln!("skipped: there is no pgbouncer");
            return None;
        };
        let (port, folder) = (free_port(), folder());
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = {mode}\ndefault_pool_size = 60\n",
            postgres.port
        );
        std::fs::write(folder.join("pgbouncer.ini"), settings).unwrap();
        let mut command = as_postgres(Path::new(pgbouncer));
        command.arg(folder.join("pgbouncer.ini"));
        begin(command, &folder, "pgbouncer.log");
        wait_for_port(port, &folder.join("pgbouncer.log"));
        Some(Self { port })
    }

    /// Address of a database through it.
    pub fn url(&self, name: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{name}", self.port)
    }
}

/// A program of PostgreSQL.
fn program(name: &str) -> PathBuf {
    let named = std::env::var("THUNDER_PG_BIN").ok().map(PathBuf::from);
    let versions = (14..=30).rev().map(|version| PathBuf::from(format!("/usr/lib/postgresql/{version}/bin")));
    let path = std::env::var("PATH").unwrap_or_default();
    let paths = path.split(':').map(PathBuf::from).collect::<Vec<_>>();
    let all = named.into_iter().chain(versions).chain(paths).map(|folder| folder.join(name));
    all.into_iter().find(|path| path.exists()).unwrap_or_else(|| panic!("there is no {name}"))
}

/// The account for programs that refuse root; `None` where we are not root.
fn account() -> Option<User> {
    Uid::effective().is_root().then(|| User::from_name("postgres").unwrap().expect("there is no account postgres"))
}

fn as_postgres(program: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some(account) = account() {
        command.uid(account.uid.as_raw()).gid(account.gid.as_raw());
    }
    command
}

fn own(path: &Path) {
    if let Some(account) = account() {
        chown(path, Some(account.uid.as_raw()), Some(account.gid.as_raw())).unwrap();
    }
}

/// Starts a program that ends with the tests.
fn begin(mut command: Command, folder: &Path, log: &str) -> u32 {
    let log = std::fs::File::create(folder.join(log)).unwrap();
    let pid = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap().id();
    clean_up_later(pid, folder);
    pid
}

fn wait_for_port(port: u16, log: &Path) {
    let begun = Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(begun.elapsed() < PATIENCE, "{}", std::fs::read_to_string(log).unwrap_or_default());
        std::thread::sleep(Duration::from_millis(20));
    }
}
