//! The engine that a command uses, on a server or in this process, and the replays of its runs.

use super::client::{Server, ServerArgs};
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
    /// `is_given` returns true for flags given on the command line.
    pub async fn open(
        &self,
        mods: &[String],
        is_given: impl Fn(&str) -> bool,
    ) -> anyhow::Result<(RunTarget, Vec<String>)> {
        if let Some(file) = mods.iter().find(|name| is_file(name) && !Path::new(name).is_file()) {
            bail!("there is no file {file}; --mod takes the name of a mod or a Python file");
        }
        let in_process = mods.iter().any(|name| is_file(name))
            || ["model", "hf_repo", "model_url", "data_dir", "database_url"].into_iter().any(&is_given);
        if in_process && self.server.server.is_some() {
            bail!(
                "--model, --hf-repo, --model-url, --data-dir, --database-url and mods given as files are for an engine in this process and cannot be \
                 combined with --server"
            );
        }
        if !in_process && let Some(server) = self.server.find().await? {
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
        let own_database = is_given("data_dir") || is_given("database_url");
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

    /// Returns the address of a finished run's replay, or `None` if the run was not recorded. Sends the run to the server
    /// that uses the database, if there is one.
    pub async fn record(&mut self, run_id: Option<&str>) -> anyhow::Result<Option<String>> {
        let Some(run_id) = run_id else { return Ok(None) };
        let (Some(owner), Some(local)) = (&self.owner, &mut self.local) else {
            return Ok(Some(match self.local {
                None => self.server.replay(run_id),
                Some(_) => format!("http://{DEFAULT_ADDRESS}/runs/{run_id} (while `thunder serve` runs)"),
            }));
        };
        let last_run = self.last_run.take().filter(|document| document.request.request_id == run_id);
        let document = if last_run.is_some() { last_run } else { local.document().await };
        let Some(document) = document else { return Ok(None) };
        let sources = local.publish_sources(&document);
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
        Ok(Some(owner.replay(&document.request.request_id)))
    }

    /// Returns the server with the recorded runs.
    pub fn archive(&self) -> &Server {
        self.owner.as_ref().unwrap_or(&self.server)
    }

    /// Returns the recording of a run that has finished on this engine.
    pub async fn document(&mut self, run_id: &str) -> anyhow::Result<Document> {
        if let (Some(_), Some(local)) = (&self.owner, &mut self.local) {
            let document = local.document().await.context("the run was not recorded")?;
            // For `RunTarget::record`.
            self.last_run = Some(document.clone());
            return Ok(document);
        }
        finished(&self.server, run_id).await.map(|(document, _)| document)
    }

    /// Stops the engine if it is in this process.
    pub async fn close(self) {
        if let Some(local) = self.local {
            local.finish().await;
        }
    }
}

/// Fetches a run that has finished or is about to finish, with the server's summary of it.
pub async fn finished(server: &Server, run_id: &str) -> anyhow::Result<(Document, Value)> {
    const FINISH_TIMEOUT: Duration = Duration::from_secs(30);
    let ended = tokio::time::timeout(FINISH_TIMEOUT, ended(server, run_id)).await;
    ended.unwrap_or_else(|_| bail!("run {run_id} is still running"))
}

/// Waits until a run has ended, and fetches it with the server's summary of it.
pub async fn ended(server: &Server, run_id: &str) -> anyhow::Result<(Document, Value)> {
    let path = run_path(run_id)?;
    loop {
        let bytes = server.send(server.request(Method::GET, &path)).await?.bytes().await?;
        let mut run: Value = serde_json::from_slice(&bytes).context("the server's response is not a run")?;
        if run["run"]["status"] != "running" {
            let document = Document::parse(&bytes).context("the server's response is not a run")?;
            return Ok((document, run["run"].take()));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
