//! The engine that a command uses, on a server or in this process, and the replays of its runs.

#[cfg(test)]
mod tests;

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
    /// engine in this process. A mod given as a file or folder, or a flag of the engine or the database on the command line, always
    /// selects this process.
    pub async fn open(
        &self,
        mods: &[String],
        database: DatabaseUse,
        given: &GivenFlags,
    ) -> anyhow::Result<(RunTarget, Vec<String>)> {
        if let Some(path) = mods.iter().find(|name| is_path(name) && !Path::new(name).exists()) {
            bail!(
                "there is no file or folder {path}; --mod takes the name of a mod, a Python file or a package folder"
            );
        }
        let file = mods.iter().find(|name| is_path(name)).map(|file| format!("--mod {file}"));
        let local_flag = file.as_deref().or(given.engine.as_deref()).or(given.database.as_deref());
        if let Some(server) = self.server.find_unless(local_flag, given).await? {
            return Ok((RunTarget::Server(server), mods.to_vec()));
        }
        let registry = ModRegistry::with_builtin();
        let config = self.engine.mods.clone().config()?;
        let mut names = Vec::new();
        for name in mods {
            if is_path(name) {
                names.extend(startup::register_file(&registry, &config, name.as_ref()).await?);
            } else {
                names.push(name.clone());
            }
        }
        let data = given.data(self.data.clone());
        Ok((Box::pin(self.start(registry, data, database, local_flag, given)).await?, names))
    }

    /// Starts an engine in this process, which `local_flag` selects, if any.
    async fn start(
        &self,
        registry: ModRegistry,
        data: DataFlags,
        database: DatabaseUse,
        local_flag: Option<&str>,
        given: &GivenFlags,
    ) -> anyhow::Result<RunTarget> {
        // One user needs one slot, so its context can be as large as the model's.
        let mut flags = EngineFlags { parallel: Some(1), ..self.engine.clone() };
        super::hub::set_model(&mut flags).await?;
        let config = Config::new(flags, data, &default_flags())?;
        let is_selected = given.database.is_some() || config.data.database_url.is_some();
        let recording_server =
            if is_selected || database == DatabaseUse::Open { None } else { self.server.on_default_address().await };
        if recording_server.is_none() && database != DatabaseUse::LeaveToServer {
            startup::database(&config.data).check_exists()?;
        }
        if let (Some(flag), Some(unused)) = (local_flag, &self.server.server) {
            let place = match (&recording_server, &config.data.database_url) {
                (Some(server), _) => format!("by the server at {}", server.base()),
                (None, Some(_)) => "in the configured database".to_owned(),
                (None, None) => format!("in the data directory {}", config.data.dir.display()),
            };
            eprintln!(
                "thunder: {flag} selects this process instead of the server at {unused}; the runs are recorded {place}"
            );
        }
        Ok(match recording_server {
            None => {
                let engine = LocalEngine::start(config, registry, RecordTarget::Database).await?;
                RunTarget::LocalDatabase { engine, serve_flags: given.serve_flags.clone() }
            }
            Some(recording_server) => {
                let engine = LocalEngine::start(config, registry, RecordTarget::Document).await?;
                RunTarget::LocalForServer { engine, recording_server }
            }
        })
    }
}

/// Returns true if a mod is given as a file or as a folder like `./pack`, not by name.
pub fn is_path(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "py") || name.contains(std::path::MAIN_SEPARATOR)
}

/// The use of the default database by an engine in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatabaseUse {
    /// Reads a recorded run from it, also while a server runs.
    Open,
    /// Leaves it to a running server, which receives the finished runs.
    LeaveToServer,
    /// Reads a recorded run from it, or leaves it to a running server, which has the run and receives the finished ones.
    ReadOrLeaveToServer,
}

/// The engine that runs a command's requests.
pub enum RunTarget {
    /// A running server.
    Server(Server),
    /// An engine in this process that records in a database, for which `thunder serve` needs `serve_flags`.
    LocalDatabase { engine: LocalEngine, serve_flags: String },
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
    /// The command of the server that shows the replay at the address; `None` if the server runs.
    serve_command: Option<String>,
}

impl Display for ReplayAddress {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.url)?;
        match &self.serve_command {
            Some(command) => write!(f, " (while `{command}` runs)"),
            None => Ok(()),
        }
    }
}

impl RunTarget {
    /// Returns the server of the engine.
    pub const fn server(&self) -> &Server {
        match self {
            Self::Server(server) => server,
            Self::LocalDatabase { engine, .. } | Self::LocalForServer { engine, .. } => engine.client(),
        }
    }

    /// Returns the server with the recorded runs.
    pub const fn archive(&self) -> &Server {
        match self {
            Self::LocalForServer { recording_server, .. } => recording_server,
            Self::Server(_) | Self::LocalDatabase { .. } => self.server(),
        }
    }

    /// Returns true if captured attention can be recorded. Attention cannot be sent to another server.
    pub const fn can_record_attention(&self) -> bool {
        !matches!(self, Self::LocalForServer { .. })
    }

    /// Returns the address of a recorded run's replay.
    pub fn replay(&self, run_id: &str) -> ReplayAddress {
        match self {
            Self::LocalDatabase { serve_flags, .. } => ReplayAddress {
                url: format!("http://{DEFAULT_ADDRESS}/runs/{run_id}"),
                serve_command: Some(format!("thunder serve{serve_flags}")),
            },
            _ => ReplayAddress { url: self.archive().replay(run_id), serve_command: None },
        }
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

    /// Stops the engine if it is in this process, and sends the runs that are not sent yet. Returns false if the server
    /// did not record one of them.
    pub async fn close(self) -> bool {
        let mut are_recorded = true;
        match self {
            Self::Server(_) => {}
            Self::LocalDatabase { engine, .. } => engine.finish().await,
            Self::LocalForServer { mut engine, recording_server } => {
                for document in engine.stop().await {
                    if let Err(error) = send(&mut engine, &recording_server, &document).await {
                        tracing::warn!("{error:#}");
                        are_recorded = false;
                    }
                }
                engine.finish().await;
            }
        }
        are_recorded
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

/// Sends a run of a local engine to the server that uses the database. If a signal cancels this, the engine returns the
/// run when it stops.
async fn send(engine: &mut LocalEngine, recording_server: &Server, document: &Document) -> anyhow::Result<()> {
    engine.set_unsent(Some(document.clone()));
    let sources = engine.publish_sources(document);
    let request = recording_server.request(Method::POST, "/ingest").header("content-type", "application/json");
    let request = request.header("x-thunder-surface", "cli");
    let sent = recording_server.send(request.body(document.write())).await;
    engine.set_unsent(None);
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
