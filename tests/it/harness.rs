//! The real program, started once for all tests: the tiny model, an embedded PostgreSQL in a temporary folder, a
//! port that the system chooses.
//!
//! [`server`] is shared; a test that changes or stops its server starts its own with [`Server::start`].

use futures::StreamExt;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum start time of a server while other tests use all cores.
const PATIENCE: Duration = Duration::from_mins(3);

/// Mods of the shared server, beside the built-in ones.
pub const MODS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/mods");

/// The model of all tests; its weights are random.
pub fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf")
}

/// The program with a clean environment: a developer's settings must not change what is tested.
pub fn thunder() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thunder"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy();
        name.starts_with("LLAMA_") || name.starts_with("THUNDER_") && name != "THUNDER_PG_BIN" || name == "DATABASE_URL"
    }) {
        command.env_remove(name);
    }
    command
}

/// A folder that is removed when the test process ends, whatever happened.
pub fn folder() -> PathBuf {
    let path = new_folder();
    clean_up_later(0, &path);
    path
}

fn new_folder() -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    // Short, since a Unix socket may live in it, and not in a private home, since root's database runs as another user.
    let path = std::env::temp_dir().join(format!("thunder-it-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// A file of fixtures/tls.
pub fn certificate(name: &str) -> String {
    format!("{}/fixtures/tls/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A client that trusts the tests' authority and no other.
pub fn client() -> reqwest::ClientBuilder {
    // An error says that it was done before.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let authority = std::fs::read(certificate("authority.pem")).unwrap();
    reqwest::Client::builder().tls_certs_only([reqwest::Certificate::from_pem(&authority).unwrap()])
}

/// A running server.
pub struct Server {
    pub base: String,
    pub data_dir: PathBuf,
    http: reqwest::Client,
    key: Option<String>,
    /// `None` for a server that something else has started.
    child: Option<Mutex<Child>>,
}

/// The server that all tests share which change nothing about it.
pub async fn server() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| Server::start(&["--mods-dir", MODS]));
    // Starting blocks; the test's own thread must not.
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

impl Server {
    /// Starts a server on a new folder with these further arguments. It is loading when this returns.
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_in(new_folder(), arguments)
    }

    /// Starts a server on that folder.
    pub fn start_in(data_dir: PathBuf, arguments: &[&str]) -> Self {
        Self::start_at(free_port(), data_dir, arguments)
    }

    /// Starts a server that other servers reach at its address, on the database of another one.
    pub fn start_beside(database: &Self, arguments: &[&str]) -> Self {
        let port = free_port();
        let (url, address) = (database.database_url(), format!("http://127.0.0.1:{port}"));
        let arguments = [&["--database-url", &url, "--server-url", &address], arguments].concat();
        Self::start_at(port, new_folder(), &arguments)
    }

    /// The address of its embedded database.
    pub fn database_url(&self) -> String {
        let file = std::fs::read_to_string(self.data_dir.join("postgres/data/postmaster.pid")).unwrap();
        let socket = file.lines().nth(4).unwrap().replace('/', "%2F");
        format!("postgres://thunder@{socket}/thunder")
    }

    fn start_at(port: u16, data_dir: PathBuf, arguments: &[&str]) -> Self {
        let mut command = thunder();
        command.args(["serve", "--listen", &format!("127.0.0.1:{port}")]);
        if !arguments.contains(&"--model") && !arguments.contains(&"--no-model") {
            command.arg("--model").arg(model());
        }
        command.arg("--data-dir").arg(&data_dir).args(["--threads", "1"]).args(arguments);
        let log = std::fs::File::create(data_dir.join("server.log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        clean_up_later(child.id(), &data_dir);
        let key = arguments.iter().position(|&argument| argument == "--api-key").map(|at| arguments[at + 1].to_owned());
        let scheme = if arguments.contains(&"--ssl-cert-file") { "https" } else { "http" };
        let prefix = arguments.iter().position(|&argument| argument == "--api-prefix").map(|at| arguments[at + 1]);
        let base = format!("{scheme}://127.0.0.1:{port}{}", prefix.unwrap_or_default().trim_end_matches('/'));
        // Each test has its own runtime, and a kept connection would die with the runtime of the test that made it.
        let http = client().pool_max_idle_per_host(0).build().unwrap();
        Self { base, data_dir, http, key, child: Some(Mutex::new(child)) }
    }

    /// A server that something else has started.
    pub fn known(base: String, key: Option<&str>) -> Self {
        let http = client().pool_max_idle_per_host(0).build().unwrap();
        Self { base, data_dir: PathBuf::new(), http, key: key.map(str::to_owned), child: None }
    }

    /// Waits until it is ready.
    pub async fn wait_ready(&self) -> &Self {
        let begun = Instant::now();
        loop {
            if let Ok(answer) = self.http.get(format!("{}/healthz", self.base)).send().await
                && answer.status() == StatusCode::OK
            {
                return self;
            }
            if let Some(status) = self.child().try_wait().unwrap() {
                panic!("the server ended ({status}):\n{}", self.log());
            }
            assert!(begun.elapsed() < PATIENCE, "the server is not ready after {PATIENCE:?}:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    /// Returns its standard error so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.data_dir.join("server.log")).unwrap_or_default()
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child().id()).unwrap()
    }

    /// Sends a signal and waits for its end; the exit code.
    pub async fn stop(&self, signal: &str) -> Option<i32> {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child().try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < PATIENCE, "the server does not stop:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until it ends by itself; the exit code.
    pub async fn exited(&self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child().try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < PATIENCE, "the server does not end:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Child> {
        self.child.as_ref().unwrap().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request to it, with its key where it has one.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// `GET`, status and JSON.
    pub async fn get(&self, path: &str) -> (u16, Value) {
        parts(self.request(Method::GET, path)).await
    }

    /// `POST` of JSON, status and JSON.
    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        parts(self.request(Method::POST, path).json(body)).await
    }

    /// `POST` of JSON that must succeed.
    pub async fn answer(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// `POST` of JSON that is answered with server-sent events: the data of each.
    pub async fn stream(&self, path: &str, body: &Value) -> Vec<String> {
        let response = self.request(Method::POST, path).json(body).send().await.unwrap();
        let status = response.status();
        assert!(status.is_success(), "{status}: {}", response.text().await.unwrap());
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let mut bytes = response.bytes_stream();
        let mut text = Vec::new();
        while let Some(chunk) = bytes.next().await {
            text.extend_from_slice(&chunk.unwrap());
        }
        let text = String::from_utf8(text).unwrap();
        text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).map(str::to_owned).collect()
    }

    /// `POST` of JSON that is answered with named server-sent events: the name and the data of each.
    pub async fn events(&self, path: &str, body: &Value) -> Vec<(String, Value)> {
        let response = self.request(Method::POST, path).json(body).send().await.unwrap();
        let status = response.status();
        let text = response.text().await.unwrap();
        assert!(status.is_success(), "{status}: {text}");
        let event = |event: &str| {
            let (name, data) = event.strip_prefix("event: ")?.split_once("\ndata: ")?;
            Some((name.to_owned(), serde_json::from_str(data).unwrap()))
        };
        text.split("\n\n").filter_map(event).collect()
    }

    /// Waits until the run is stored and over; its summary.
    pub async fn finished(&self, run_id: &str) -> Value {
        let begun = Instant::now();
        loop {
            let (status, answer) = self.get(&format!("/api/v1/runs/{run_id}")).await;
            if status == 200 && answer["run"]["status"] != "running" {
                return answer;
            }
            assert!(begun.elapsed() < PATIENCE, "run {run_id} is not over: {status} {answer}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn parts(request: RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// One value by an independent client of the database.
pub async fn psql(url: &str, sql: &str) -> String {
    let bin = ["/usr/lib/postgresql/15/bin/psql", "psql"].into_iter().find(|path| Path::new(path).exists());
    let output = tokio::process::Command::new(bin.unwrap_or("psql")).args([url, "-Atc", sql]).output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// The programs of PostgreSQL that run on a data directory.
pub fn postgres_processes(data_dir: &Path) -> Vec<String> {
    let folder = data_dir.to_str().unwrap();
    let lines = std::fs::read_dir("/proc").unwrap().flatten();
    lines
        .filter_map(|entry| String::from_utf8(std::fs::read(entry.path().join("cmdline")).ok()?).ok())
        .filter(|line| {
            let program = Path::new(line.split('\0').next().unwrap_or_default()).file_name().unwrap_or_default();
            (program == "postgres" || program == "initdb") && line.contains(folder)
        })
        .collect()
}

/// Asserts that no program of PostgreSQL runs on a data directory, nor begins to.
pub fn assert_no_postgres(data_dir: &Path, log: &str) {
    // The server's own children end a moment after it.
    for _ in 0..50 {
        if postgres_processes(data_dir).is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("left behind: {:?}\n{log}", postgres_processes(data_dir));
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Leaves a shell behind that waits for the end of the test process, however it comes, and then ends the server `pid`
/// and removes `folder`. The server stops its database before it ends.
pub fn clean_up_later(pid: u32, folder: &Path) {
    static LIFELINES: Mutex<Vec<ChildStdin>> = Mutex::new(Vec::new());
    const SCRIPT: &str = "cat; if [ $1 -gt 0 ]; then kill $1; for i in $(seq 100); do kill -0 $1 || break; sleep 0.1; done; fi; \
                          rm -rf \"$2\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", SCRIPT, "sh", &pid.to_string()]).arg(folder);
    shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    let lifeline = shell.spawn().unwrap().stdin.take().unwrap();
    LIFELINES.lock().unwrap_or_else(PoisonError::into_inner).push(lifeline);
}
