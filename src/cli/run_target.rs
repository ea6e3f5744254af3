//! The engine that a command uses, on a server or in this process, and the replays of its runs.

use super::client::{Server, ServerArgs};
use super::events::Events;
use super::export::run_path;
use super::given_flags::GivenFlags;
use super::local::{LocalEngine, RecordTarget};
use super::startup;
use crate::config::flags::{DataFlags, EngineFlags, default_flags};
use crate::config::{Config, DEFAULT_ADDRESS};
use crate::mods::ModRegistry;
use crate::trace::document::Document;
use anyhow::{Context, bail};
use reqwest::Method;
use serde_json::Value;
use std::fmt::{Display, Formatter};
use std::path::Path;
use std::time::Duration;

/// Flags that select the engine of a command.
#[derive(Debug, clap::Args)]
pub struct RunTargetArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub engine: EngineFlags,
    #[command(flatten)]
    pub data: DataFlags,
}

impl RunTargetArgs {
    /// Returns the engine and the names under which it has the mods. Uses the named server, else a running server, else an
    /// engine in this process. A mod given as a file, or a flag of the engine or the database on the command line, always
    /// selects this process.
    pub async fn open(
        &self,
        mods: &[String],
        database: DatabaseUse,
        given: &GivenFlags,
    ) -> anyhow::Result<(RunTarget, Vec<String>)> {
        if let Some(file) = mods.iter().find(|name| is_file(name) && !Path::new(name).is_file()) {
            bail!("there is no file {file}; --mod takes the name of a mod or a Python file");
        }
        let file = mods.iter().find(|name| is_file(name)).map(|file| format!("--mod {file}"));
        let local_flag = file.as_deref().or(given.engine.as_deref()).or(given.database.as_deref());
        if let Some(server) = self.server.find_unless(local_flag, given).await? {
            return Ok((RunTarget::Server(server), mods.to_vec()));
        }
        let registry = ModRegistry::with_builtin();
        let config = self.engine.mods.clone().config()?;
        let mut names = Vec::new();
        for name in mods {
            if is_file(name) {
                names.extend(startup::register_file(&registry, &config, name.as_ref()).await?);
            } else {
                names.push(name.clone());
            }
        }
        let database = if given.database.is_some() { DatabaseUse::Open } else { database };
        let data = given.data(self.data.clone());
        Ok((Box::pin(self.start(registry, data, database)).await?, names))
    }

    /// Starts an engine in this process.
    async fn start(&self, registry: ModRegistry, data: DataFlags, database: DatabaseUse) -> anyhow::Result<RunTarget> {
        // One user needs one slot, so its context can be as large as the model's.
        let mut flags = EngineFlags { parallel: Some(1), ..self.engine.clone() };
        super::hub::set_model(&mut flags).await?;
        let config = Config::new(flags, data, &default_flags())?;
        let recording_server = match database {
            DatabaseUse::LeaveToServer if config.data.database_url.is_none() => self.server.on_default_address().await,
            DatabaseUse::Open | DatabaseUse::LeaveToServer => None,
        };
        Ok(match recording_server {
            None => RunTarget::LocalDatabase(LocalEngine::start(config, registry, RecordTarget::Database).await?),
            Some(recording_server) => {
                let engine = LocalEngine::start(config, registry, RecordTarget::Document).await?;
                RunTarget::LocalForServer { engine, recording_server }
            }
        })
    }
}

/// Returns true if a mod is given as a file, not by name.
pub fn is_file(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "py") || name.contains(std::path::MAIN_SEPARATOR)
}

/// The use of the default database by an engine in this process.
#[derive(Debug, Clone, Copy)]
pub enum DatabaseUse {
    /// Opens it, also while a server runs, for commands that read recorded runs.
    Open,
    /// Leaves it to a running server, which receives the finished runs.
    LeaveToServer,
}

/// The engine that runs a command's requests.
pub enum RunTarget {
    /// A running server.
    Server(Server),
    /// An engine in this process that records in a database.
    LocalDatabase(LocalEngine),
    /// An engine in this process whose finished runs are sent to the server that uses the database.
    LocalForServer { engine: LocalEngine, recording_server: Server },
}

/// A run that has ended.
pub struct FinishedRun {
    /// Its recording.
    pub document: Document,
    /// The address of its replay, or the reason why the server that uses the database did not record it.
    pub replay: anyhow::Result<ReplayAddress>,
}

/// The address of a recorded run's replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayAddress {
    /// The address.
    pub url: String,
    /// True if no server runs yet at the address.
    needs_server: bool,
}

impl Display for ReplayAddress {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.url)?;
        if self.needs_server { f.write_str(" (while `thunder serve` runs)") } else { Ok(()) }
    }
}

impl RunTarget {
    /// Returns the server of the engine.
    pub const fn server(&self) -> &Server {
        match self {
            Self::Server(server) => server,
            Self::LocalDatabase(engine) | Self::LocalForServer { engine, .. } => engine.client(),
        }
    }

    /// Returns the server with the recorded runs.
    pub const fn archive(&self) -> &Server {
        match self {
            Self::LocalForServer { recording_server, .. } => recording_server,
            Self::Server(_) | Self::LocalDatabase(_) => self.server(),
        }
    }

    /// Returns true if captured attention can be recorded. Attention cannot be sent to another server.
    pub const fn can_record_attention(&self) -> bool {
        !matches!(self, Self::LocalForServer { .. })
    }

    /// Returns the address of a recorded run's replay.
    pub fn replay(&self, run_id: &str) -> ReplayAddress {
        let needs_server = matches!(self, Self::LocalDatabase(_));
        let url = if needs_server {
            format!("http://{DEFAULT_ADDRESS}/runs/{run_id}")
        } else {
            self.archive().replay(run_id)
        };
        ReplayAddress { url, needs_server }
    }

    /// Returns the address of an ended run's replay, or `None` if the run was not recorded. Sends the run to the server
    /// that uses the database, if there is one.
    pub async fn record(&mut self, run_id: Option<&str>) -> anyhow::Result<Option<ReplayAddress>> {
        let Some(run_id) = run_id else { return Ok(None) };
        if let Self::LocalForServer { engine, recording_server } = self {
            let Some(document) = next_run(engine, recording_server, run_id).await? else { return Ok(None) };
            send(engine, recording_server, &document).await?;
        }
        Ok(Some(self.replay(run_id)))
    }

    /// Returns a run that has ended on this engine. Sends it to the server that uses the database, if there is one.
    pub async fn finish(&mut self, run_id: &str) -> anyhow::Result<FinishedRun> {
        let (document, sent) = if let Self::LocalForServer { engine, recording_server } = self {
            let document = next_run(engine, recording_server, run_id).await?.context("the run was not recorded")?;
            let sent = send(engine, recording_server, &document).await;
            (document, sent)
        } else {
            (fetch_finished(self.server(), run_id).await?.0, Ok(()))
        };
        Ok(FinishedRun { document, replay: sent.map(|()| self.replay(run_id)) })
    }

    /// Stops the engine if it is in this process.
    pub async fn close(self) {
        match self {
            Self::Server(_) => {}
            Self::LocalDatabase(engine) => engine.finish().await,
            Self::LocalForServer { mut engine, recording_server } => {
                for document in engine.stop().await {
                    if let Err(error) = send(&engine, &recording_server, &document).await {
                        tracing::warn!("{error:#}");
                    }
                }
                engine.finish().await;
            }
        }
    }
}

/// Returns a run of a local engine that has ended. Sends the runs that ended before, whose answers were stopped or failed.
async fn next_run(
    engine: &mut LocalEngine,
    recording_server: &Server,
    run_id: &str,
) -> anyhow::Result<Option<Document>> {
    while let Some(document) = engine.next_document().await {
        if document.request.request_id == run_id {
            return Ok(Some(document));
        }
        send(engine, recording_server, &document).await?;
    }
    Ok(None)
}

/// Sends a run of a local engine to the server that uses the database.
async fn send(engine: &LocalEngine, recording_server: &Server, document: &Document) -> anyhow::Result<()> {
    let sources = engine.publish_sources(document);
    let request = recording_server.request(Method::POST, "/ingest").header("content-type", "application/json");
    let request = request.header("x-thunder-surface", "cli");
    let sent = recording_server.send(request.body(document.write())).await;
    let has_unread_sources = engine.remove_sources(&sources);
    let base = recording_server.base();
    sent.with_context(|| format!("the run has finished, but the server at {base} did not record it"))?;
    if has_unread_sources {
        tracing::warn!(
            "the server at {base} uses another data directory and lacks the source of the mods: `thunder replay --verify` \
             needs them as --mod"
        );
    }
    Ok(())
}

/// Fetches a run that has finished or is about to finish, with the server's summary of it.
pub async fn fetch_finished(server: &Server, run_id: &str) -> anyhow::Result<(Document, Value)> {
    const FINISH_TIMEOUT: Duration = Duration::from_secs(30);
    let ended = tokio::time::timeout(FINISH_TIMEOUT, wait_until_ended(server, run_id)).await;
    let summary = ended.unwrap_or_else(|_| bail!("run {run_id} has not ended, or its end is not stored yet"))?;
    let bytes = server.send(server.request(Method::GET, &run_path(run_id)?)).await?.bytes().await?;
    Ok((Document::parse(&bytes).context("the server's response is not a run")?, summary))
}

/// Waits until a run has ended, and returns the server's summary of it.
pub async fn wait_until_ended(server: &Server, run_id: &str) -> anyhow::Result<Value> {
    // No run has this event, so the stream has only the end.
    let path = format!("{}/events?from={}", run_path(run_id)?, i32::MAX);
    let request = server.request(Method::GET, &path).header("accept", "text/event-stream");
    let mut events = Events::new(server.send(request).await?);
    events.next().await?.with_context(|| format!("the server sent no end of run {run_id}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::document::RequestMeta;
    use axum::Router;
    use axum::extract::Query;
    use axum::http::HeaderMap;
    use axum::routing::{get, post};
    use clap::Parser;
    use std::sync::{Arc, Mutex};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        target: RunTargetArgs,
    }

    fn document(id: &str) -> Document {
        let request = RequestMeta { request_id: id.to_owned(), ..RequestMeta::default() };
        Document { request, events: Vec::new(), mod_calls: Vec::new(), mod_logs: Vec::new(), actions: Vec::new() }
    }

    fn local_engine(runs: &[&str]) -> LocalEngine {
        let folder = std::env::temp_dir().join(format!("thunder-run-target-{}", std::process::id()));
        let line = Line::parse_from(["thunder", "--data-dir", folder.to_str().unwrap()]);
        let config = Config::new(line.target.engine, line.target.data, &default_flags()).unwrap();
        LocalEngine::with_documents(config, runs.iter().map(|id| document(id)).collect())
    }

    /// Starts a server that only records; returns its client and the list of the recorded runs.
    async fn recording_server() -> (Server, Arc<Mutex<Vec<String>>>) {
        let recorded = Arc::<Mutex<Vec<String>>>::default();
        let list = Arc::clone(&recorded);
        let ingest = move |body: String| async move {
            let document: Value = serde_json::from_str(&body).unwrap();
            list.lock().unwrap().push(document["request"]["request_id"].as_str().unwrap().to_owned());
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, Router::new().route("/ingest", post(ingest))).await });
        (Server::new(format!("http://{address}"), None).unwrap(), recorded)
    }

    #[tokio::test]
    async fn stopped_and_failed_runs_are_recorded_without_replacing_the_next_one() {
        let (server, recorded) = recording_server().await;
        let engine = local_engine(&["stopped", "first", "failed", "second", "last"]);
        let mut target = RunTarget::LocalForServer { engine, recording_server: server.clone() };
        let replay = |id| Some(ReplayAddress { url: server.replay(id), needs_server: false });
        assert_eq!(target.record(None).await.unwrap(), None);
        assert_eq!(target.record(Some("first")).await.unwrap(), replay("first"));
        assert_eq!(*recorded.lock().unwrap(), ["stopped", "first"]);
        let second = target.finish("second").await.unwrap();
        assert_eq!((second.document.request.request_id.as_str(), second.replay.ok()), ("second", replay("second")));
        target.close().await;
        assert_eq!(*recorded.lock().unwrap(), ["stopped", "first", "failed", "second", "last"]);
    }

    #[tokio::test]
    async fn end_of_a_run_is_read_without_its_events() {
        let events = |headers: HeaderMap, Query(query): Query<Value>| async move {
            assert_eq!(
                (&headers["accept"], query["from"].as_str()),
                (&"text/event-stream".parse().unwrap(), Some("2147483647"))
            );
            "event: end\ndata: {\"status\":\"done\"}\n\n"
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Server::new(format!("http://{}", listener.local_addr().unwrap()), None).unwrap();
        let router = Router::new().route("/api/v1/runs/x/events", get(events));
        tokio::spawn(async move { axum::serve(listener, router).await });
        assert_eq!(wait_until_ended(&server, "x").await.unwrap()["status"], "done");
        assert!(wait_until_ended(&server, "unknown").await.is_err());
    }

    #[tokio::test]
    async fn replay_address_is_that_of_the_server_with_the_run() {
        let server = Server::new("http://server".to_owned(), None).unwrap();
        let replay = |target: RunTarget| target.replay("id").to_string();
        assert_eq!(replay(RunTarget::Server(server.clone())), "http://server/runs/id");
        let engine = local_engine(&[]);
        let for_server = RunTarget::LocalForServer { engine, recording_server: server };
        assert_eq!(replay(for_server), "http://server/runs/id");
        let expected = format!("http://{DEFAULT_ADDRESS}/runs/id (while `thunder serve` runs)");
        assert_eq!(replay(RunTarget::LocalDatabase(local_engine(&[]))), expected);
    }

    #[tokio::test]
    async fn local_flag_of_the_command_line_excludes_only_a_server_of_the_command_line() {
        let mut line = Line::parse_from(["thunder"]);
        line.target.server.server = Some("http://127.0.0.1:1".to_owned());
        let find = async |local_flag: Option<&str>, server: bool| {
            line.target.server.find_unless(local_flag, &GivenFlags { server, ..GivenFlags::default() }).await
        };
        assert!(find(None, false).await.unwrap_err().to_string().contains("no server answers"));
        assert!(find(None, true).await.unwrap_err().to_string().contains("no server answers"));
        assert!(find(Some("--data-dir"), false).await.unwrap().is_none());
        let error = find(Some("--data-dir"), true).await.unwrap_err().to_string();
        assert_eq!(error, "--data-dir is for this process and cannot be combined with --server; remove one of them");
    }
}
