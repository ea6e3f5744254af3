//! A running server and the requests to it.

use super::cleanup::{Tracked, folder};
use super::postgres::TestDatabase;
use super::requests::status_and_json;
use super::{MODS, SseReader, free_port, http, model, thunder};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum wait for a server while other tests use all cores.
const WAIT_TIMEOUT: Duration = Duration::from_mins(3);

/// A running server, which ends when this is dropped.
pub struct Server {
    pub base: String,
    pub data_dir: PathBuf,
    pub(super) http: reqwest::Client,
    key: Option<String>,
    /// `None` for a server that was not started by the harness.
    process: Option<Process>,
    storage: Arc<Storage>,
}

/// Process of a server.
struct Process {
    child: Mutex<Child>,
    /// True if it must be stopped gracefully, so that it stops its PostgreSQL server.
    is_embedded: bool,
    _tracked: Tracked,
}

impl Drop for Process {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.is_embedded && matches!(child.try_wait(), Ok(None)) {
            let _ = kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM);
        } else {
            let _ = child.kill();
        }
        let _ = child.wait();
    }
}

/// The files and the database of a server, which are kept across restarts.
struct Storage {
    folder: Option<PathBuf>,
    database: StorageDatabase,
}

enum StorageDatabase {
    /// A database of the shared PostgreSQL server.
    Own(TestDatabase),
    /// The PostgreSQL server that Thunder starts in its data directory.
    Embedded,
    /// The address that an argument of the server contains.
    Argument(String),
    /// The database of another server.
    Shared(Arc<Storage>),
}

impl Storage {
    fn new(database: StorageDatabase) -> Arc<Self> {
        Arc::new(Self { folder: Some(folder()), database })
    }

    /// Returns the address of the database.
    fn url(&self) -> String {
        match &self.database {
            StorageDatabase::Own(database) => database.url(),
            StorageDatabase::Argument(url) => url.clone(),
            StorageDatabase::Shared(other) => other.url(),
            StorageDatabase::Embedded => {
                let pid_file = self.folder.as_ref().unwrap().join("postgres/data/postmaster.pid");
                let pid_file = std::fs::read_to_string(pid_file).unwrap();
                format!("postgres://thunder@{}/thunder", pid_file.lines().nth(4).unwrap().replace('/', "%2F"))
            }
        }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// Returns the server shared by all tests that do not change it.
pub async fn server() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| Server::start(&["--mods-dir", MODS]));
    // Starting blocks; the test's own thread must not.
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

impl Server {
    /// Starts a server with these additional arguments, on a new database unless `--database-url` is one of them. Does
    /// not wait until it is ready.
    pub fn start(arguments: &[&str]) -> Self {
        let url = arguments.iter().position(|&argument| argument == "--database-url").map(|at| arguments[at + 1]);
        let database = match url {
            Some(url) => StorageDatabase::Argument(url.to_owned()),
            None => StorageDatabase::Own(TestDatabase::new()),
        };
        Self::start_on(Storage::new(database), arguments, &[])
    }

    /// Starts a server with these environment variables.
    pub fn start_with_env(arguments: &[&str], env: &[(&str, &str)]) -> Self {
        Self::start_on(Storage::new(StorageDatabase::Own(TestDatabase::new())), arguments, env)
    }

    /// Starts a server that starts PostgreSQL in its data directory.
    pub fn start_embedded(arguments: &[&str]) -> Self {
        Self::start_on(Storage::new(StorageDatabase::Embedded), arguments, &[])
    }

    /// Starts a server on the data directory and the database of this one, which has ended.
    pub fn start_again(&self, arguments: &[&str]) -> Self {
        Self::start_on(Arc::clone(&self.storage), arguments, &[])
    }

    /// Starts a server on the database of this one, with an address for the other servers.
    pub fn start_beside(&self, arguments: &[&str]) -> Self {
        let address = format!("127.0.0.1:{}", free_port());
        let scheme = if arguments.contains(&"--ssl-cert-file") { "https" } else { "http" };
        let url = format!("{scheme}://{address}");
        let arguments = [&["--listen", &address, "--server-url", &url], arguments].concat();
        Self::start_on(Storage::new(StorageDatabase::Shared(Arc::clone(&self.storage))), &arguments, &[])
    }

    /// Returns the address of its database.
    pub fn database_url(&self) -> String {
        self.storage.url()
    }

    fn start_on(storage: Arc<Storage>, arguments: &[&str], env: &[(&str, &str)]) -> Self {
        let data_dir = storage.folder.clone().unwrap();
        let has = |name: &str| arguments.contains(&name);
        let mut command = thunder();
        command.arg("serve").arg("--data-dir").arg(&data_dir).args(["--threads", "1"]);
        if !has("--listen") && !has("--port") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        if !has("--model") && !has("--hf-repo") && !has("--no-model") {
            command.arg("--model").arg(model());
        }
        // The default depends on the processor, but results must not.
        if env.is_empty() && !["--attention", "-fa", "--flash-attn", "-ctv", "--no-model"].into_iter().any(has) {
            command.args(["--attention", "on"]);
        }
        if matches!(storage.database, StorageDatabase::Own(_) | StorageDatabase::Shared(_)) {
            command.args(["--database-url", &storage.url()]);
        }
        // With a random seed, an answer would end early in some runs of the tests.
        if !has("--seed") && !has("--no-model") {
            command.args(["--seed", "42"]);
        }
        // On a loaded machine, a mod call may wait for a processor longer than the default permits.
        command.env("THUNDER_MOD_TIMEOUT", "30000");
        let log = std::fs::File::create(data_dir.join("server.log")).unwrap();
        command.args(arguments).envs(env.iter().copied()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().unwrap();
        let tracked = Tracked::new(Pid::from_raw(child.id().cast_signed()));
        let is_embedded = matches!(storage.database, StorageDatabase::Embedded);
        let key = arguments.iter().position(|&argument| argument == "--api-key").map(|at| arguments[at + 1].to_owned());
        let process = Process { child: Mutex::new(child), is_embedded, _tracked: tracked };
        let mut this = Self { base: String::new(), data_dir, http: http(), key, process: Some(process), storage };
        let begun = Instant::now();
        // A server with wrong arguments ends and has no address.
        while this.base.is_empty() && this.child().try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < WAIT_TIMEOUT, "the server listens on no address:\n{}", this.log());
            std::thread::sleep(Duration::from_millis(5));
            this.base = this.addresses().into_iter().next().unwrap_or_default();
        }
        this
    }

    /// Returns the addresses that it listens on, with scheme and prefix, from its log.
    pub fn addresses(&self) -> Vec<String> {
        addresses(&self.log())
    }

    /// Returns a server that was not started by the harness.
    pub fn external(base: String, key: Option<&str>) -> Self {
        let storage = Arc::new(Storage { folder: None, database: StorageDatabase::Argument(String::new()) });
        Self { base, data_dir: PathBuf::new(), http: http(), key: key.map(str::to_owned), process: None, storage }
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
            assert!(begun.elapsed() < WAIT_TIMEOUT, "the server is not ready after {WAIT_TIMEOUT:?}:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    /// Returns its standard error so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.data_dir.join("server.log")).unwrap_or_default()
    }

    /// Waits until its log contains a text. The log lags behind the answers of the server.
    pub async fn wait_for_log(&self, text: &str) {
        let begun = Instant::now();
        while !self.log().contains(text) {
            assert!(begun.elapsed() < WAIT_TIMEOUT, "the log does not contain {text:?}:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Returns the id of its process.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child().id()).unwrap()
    }

    /// Sends a signal, waits for the end of the process, and returns the exit code.
    pub async fn stop(&self, signal: &str) -> Option<i32> {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
        self.wait_for_exit().await
    }

    /// Waits until the process ends, and returns the exit code.
    pub async fn wait_for_exit(&self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child().try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < WAIT_TIMEOUT, "the server does not end:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Child> {
        self.process.as_ref().unwrap().child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a request to it, with its key if it has one.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// Sends a `GET`; returns status and JSON.
    pub async fn get(&self, path: &str) -> (u16, Value) {
        status_and_json(self.request(Method::GET, path)).await
    }

    /// Sends a `POST` of JSON; returns status and JSON.
    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        status_and_json(self.request(Method::POST, path).json(body)).await
    }

    /// Sends a `POST` of JSON that must succeed.
    pub async fn answer(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// Sends a `POST` of JSON; returns the data of the server-sent events that have no name.
    pub async fn stream(&self, path: &str, body: &Value) -> Vec<String> {
        let events = self.sse(path, body).await.rest().await.into_iter();
        events.filter(|event| event.name.is_empty()).map(|event| event.data).collect()
    }

    /// Sends a `POST` of JSON; returns the name and the data of each server-sent event.
    pub async fn events(&self, path: &str, body: &Value) -> Vec<(String, Value)> {
        let events = self.sse(path, body).await.rest().await.into_iter();
        events.map(|event| (event.name.clone(), event.json())).collect()
    }

    /// Sends a `POST` of JSON; returns the stream of server-sent events.
    pub async fn sse(&self, path: &str, body: &Value) -> SseReader {
        SseReader::new(self.request(Method::POST, path).json(body).send().await.unwrap()).await
    }

    /// Waits until the run has ended and is stored; returns its summary, events and mod calls.
    pub async fn finished(&self, run_id: &str) -> Value {
        let begun = Instant::now();
        loop {
            let (status, answer) = self.get(&format!("/api/v1/runs/{run_id}")).await;
            if status == 200 && answer["run"]["status"] != "running" {
                return answer;
            }
            assert!(begun.elapsed() < WAIT_TIMEOUT, "run {run_id} is not over: {status} {answer}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Returns the addresses of the lines and JSON events "listening on" in a log. The last line may be incomplete.
fn addresses(log: &str) -> Vec<String> {
    let complete = log.rsplit_once('\n').map_or("", |(complete, _)| complete);
    let address = |line: &str| {
        let event: Option<Value> = serde_json::from_str(line).ok();
        let message = event.as_ref().map_or_else(|| line.strip_prefix("thunder: "), |event| event["message"].as_str());
        message?.strip_prefix("listening on ").map(str::to_owned)
    };
    complete.lines().filter_map(address).collect()
}
