//! The engine that a command uses, on a server or in this process, and the replays of its runs.

use super::client::{Server, ServerArgs, find_given};
use super::events::Events;
use super::export::run_path;
use super::local::{LocalEngine, RecordTarget};
use super::startup;
use crate::config::flags::{DataFlags, EngineFlags, ServerFlags};
use crate::config::{Config, DEFAULT_ADDRESS, ModsConfig};
use crate::mods::ModRegistry;
use crate::trace::document::Document;
use anyhow::{Context, bail};
use reqwest::Method;
use serde_json::Value;
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
    /// engine in this process. A mod given as a file, or a flag for the model or the database, always selects this process.
    /// With `reads_runs`, the engine reads recorded runs, and so opens its database even if that is the default one and a
    /// server runs. `is_given` returns true for flags given on the command line.
    pub async fn open(
        &self,
        mods: &[String],
        reads_runs: bool,
        is_given: impl Fn(&str) -> bool,
    ) -> anyhow::Result<(RunTarget, Vec<String>)> {
        const LOCAL_FLAGS: [&str; 5] = ["model", "hf_repo", "model_url", "data_dir", "database_url"];
        if let Some(file) = mods.iter().find(|name| is_file(name) && !Path::new(name).is_file()) {
            bail!("there is no file {file}; --mod takes the name of a mod or a Python file");
        }
        let file = mods.iter().find(|name| is_file(name)).map(|file| format!("--mod {file}"));
        let local_flag = file.or_else(|| find_given(&LOCAL_FLAGS, &is_given));
        if let Some(server) = self.server.find_unless(local_flag, &is_given).await? {
            return Ok((RunTarget::on(server), mods.to_vec()));
        }
        let registry = ModRegistry::with_builtin();
        let config = ModsConfig::try_from(self.engine.mods.clone())?;
        let mut names = Vec::new();
        for name in mods {
            if is_file(name) {
                names.extend(startup::register_file(&registry, &config, name.as_ref()).await?);
            } else {
                names.push(name.clone());
            }
        }
        let own_database = reads_runs || is_given("data_dir") || is_given("database_url");
        let started =
            RunTarget::in_process(self.engine.clone(), self.data.clone(), &self.server, registry, own_database);
        let target = Box::pin(started).await?;
        Ok((target, names))
    }
}

/// Returns true if a mod is given as a file, not by name.
pub fn is_file(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "py") || name.contains(std::path::MAIN_SEPARATOR)
}

/// The engine that runs a command's requests.
pub struct RunTarget {
    server: Server,
    local: Option<LocalEngine>,
    /// The server that uses the database of a local engine.
    owner: Option<Server>,
    /// The last run of a local engine without a database.
    last_run: Option<Document>,
}

impl RunTarget {
    /// Returns the target of a running server.
    fn on(server: Server) -> Self {
        Self { server, local: None, owner: None, last_run: None }
    }

    /// Starts an engine in this process. Runs are recorded in its database. If that is the default database and a running
    /// server uses it, runs are sent to that server, unless `own_database` is set.
    async fn in_process(
        mut engine: EngineFlags,
        data: DataFlags,
        server: &ServerArgs,
        registry: ModRegistry,
        own_database: bool,
    ) -> anyhow::Result<Self> {
        // One user needs one slot, so its context can be as large as the model's.
        engine.parallel = Some(1);
        super::hub::set_model(&mut engine).await?;
        let config = Config::new(engine, data, &ServerFlags::default())?;
        let owner =
            if own_database || config.data.database_url.is_some() { None } else { server.on_default_address().await };
        let record = if owner.is_some() { RecordTarget::Document } else { RecordTarget::Database };
        let (local, server) = Box::pin(LocalEngine::start(config, registry, record)).await?;
        Ok(Self { server, local: Some(local), owner, last_run: None })
    }

    /// Returns the server of the engine.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Returns true if captured attention can be recorded. Attention cannot be sent to another server.
    pub fn can_record_attention(&self) -> bool {
        self.owner.is_none()
    }

    /// Returns the address of a recorded run's replay.
    pub fn replay(&self, run_id: &str) -> String {
        match self.local {
            Some(_) if self.owner.is_none() => {
                format!("http://{DEFAULT_ADDRESS}/runs/{run_id} (while `thunder serve` runs)")
            }
            _ => self.archive().replay(run_id),
        }
    }

    /// Returns the address of an ended run's replay, or `None` if the run was not recorded. Sends the run to the server
    /// that uses the database, if there is one.
    pub async fn record(&mut self, run_id: Option<&str>) -> anyhow::Result<Option<String>> {
        let Some(run_id) = run_id else { return Ok(None) };
        if let (Some(owner), Some(local)) = (&self.owner, &mut self.local) {
            let last_run = self.last_run.take().filter(|document| document.request.request_id == run_id);
            let document = if last_run.is_some() { last_run } else { ended_run(owner, local, run_id).await? };
            let Some(document) = document else { return Ok(None) };
            send(owner, local, &document).await?;
        }
        Ok(Some(self.replay(run_id)))
    }

    /// Returns the server with the recorded runs.
    pub fn archive(&self) -> &Server {
        self.owner.as_ref().unwrap_or(&self.server)
    }

    /// Returns the recording of a run that has finished on this engine.
    pub async fn document(&mut self, run_id: &str) -> anyhow::Result<Document> {
        if let (Some(owner), Some(local)) = (&self.owner, &mut self.local) {
            let document = ended_run(owner, local, run_id).await?.context("the run was not recorded")?;
            // For `RunTarget::record`.
            self.last_run = Some(document.clone());
            return Ok(document);
        }
        finished(&self.server, run_id).await.map(|(document, _)| document)
    }

    /// Stops the engine if it is in this process.
    pub async fn close(self) {
        let Some(mut local) = self.local else { return };
        if let Some(owner) = &self.owner {
            for document in local.stop().await {
                if let Err(error) = send(owner, &local, &document).await {
                    tracing::warn!("{error:#}");
                }
            }
        }
        local.finish().await;
    }
}

/// Returns a run of a local engine that has ended. Sends the runs that ended before, whose answers were stopped or failed.
async fn ended_run(owner: &Server, local: &mut LocalEngine, run_id: &str) -> anyhow::Result<Option<Document>> {
    while let Some(document) = local.document().await {
        if document.request.request_id == run_id {
            return Ok(Some(document));
        }
        send(owner, local, &document).await?;
    }
    Ok(None)
}

/// Sends a run of a local engine to the server that uses the database.
async fn send(owner: &Server, local: &LocalEngine, document: &Document) -> anyhow::Result<()> {
    let sources = local.publish_sources(document);
    let request = owner.request(Method::POST, "/ingest").header("content-type", "application/json");
    let request = request.header("x-thunder-surface", "cli");
    let sent = owner.send(request.body(document.write())).await;
    let has_unread_sources = local.remove_sources(&sources);
    sent.with_context(|| format!("the run has finished, but the server at {} did not record it", owner.base()))?;
    if has_unread_sources {
        tracing::warn!(
            "the server at {} uses another data directory and lacks the source of the mods: `thunder replay --verify` \
             needs them as --mod",
            owner.base()
        );
    }
    Ok(())
}

/// Fetches a run that has finished or is about to finish, with the server's summary of it.
pub async fn finished(server: &Server, run_id: &str) -> anyhow::Result<(Document, Value)> {
    const FINISH_TIMEOUT: Duration = Duration::from_secs(30);
    let ended = tokio::time::timeout(FINISH_TIMEOUT, ended(server, run_id)).await;
    let summary = ended.unwrap_or_else(|_| bail!("run {run_id} has not ended, or its end is not stored yet"))?;
    let bytes = server.send(server.request(Method::GET, &run_path(run_id)?)).await?.bytes().await?;
    Ok((Document::parse(&bytes).context("the server's response is not a run")?, summary))
}

/// Waits until a run has ended, and returns the server's summary of it.
pub async fn ended(server: &Server, run_id: &str) -> anyhow::Result<Value> {
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
        let config = Config::new(line.target.engine, line.target.data, &ServerFlags::default()).unwrap();
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
        let (owner, recorded) = recording_server().await;
        let local = local_engine(&["stopped", "first", "failed", "second", "last"]);
        let mut target =
            RunTarget { server: owner.clone(), local: Some(local), owner: Some(owner.clone()), last_run: None };
        assert_eq!(target.record(None).await.unwrap(), None);
        assert_eq!(target.record(Some("first")).await.unwrap(), Some(owner.replay("first")));
        assert_eq!(*recorded.lock().unwrap(), ["stopped", "first"]);
        assert_eq!(target.document("second").await.unwrap().request.request_id, "second");
        assert_eq!(target.record(Some("second")).await.unwrap(), Some(owner.replay("second")));
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
        assert_eq!(ended(&server, "x").await.unwrap()["status"], "done");
        assert!(ended(&server, "unknown").await.is_err());
    }

    #[tokio::test]
    async fn replay_address_is_that_of_the_server_with_the_run() {
        let server = Server::new("http://server".to_owned(), None).unwrap();
        let replay = |local, owner| RunTarget { server: server.clone(), local, owner, last_run: None }.replay("id");
        assert_eq!(replay(None, None), "http://server/runs/id");
        let owner = Server::new("http://owner".to_owned(), None).unwrap();
        assert_eq!(replay(Some(local_engine(&[])), Some(owner)), "http://owner/runs/id");
        let expected = format!("http://{DEFAULT_ADDRESS}/runs/id (while `thunder serve` runs)");
        assert_eq!(replay(Some(local_engine(&[])), None), expected);
    }

    #[tokio::test]
    async fn local_flag_of_the_command_line_excludes_only_a_server_of_the_command_line() {
        let mut line = Line::parse_from(["thunder"]);
        line.target.server.server = Some("http://127.0.0.1:1".to_owned());
        let find = async |given: &[&str]| {
            let is_given = |id: &str| given.contains(&id);
            line.target.server.find_unless(find_given(&["model", "data_dir"], is_given), is_given).await
        };
        assert!(find(&[]).await.unwrap_err().to_string().contains("no server answers"));
        assert!(find(&["server"]).await.unwrap_err().to_string().contains("no server answers"));
        assert!(find(&["data_dir"]).await.unwrap().is_none());
        let error = find(&["server", "data_dir"]).await.unwrap_err().to_string();
        assert_eq!(error, "--data-dir is for this process and cannot be combined with --server; remove one of them");
    }
}
