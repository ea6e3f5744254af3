//! Where runs take place: on a server, or in this process; and where their replays are then.

use super::client::{Server, ServerArgs};
use super::export::run_path;
use super::local::{Local, Record};
use super::startup;
use crate::config::flags::{DataFlags, EngineFlags, ServerFlags};
use crate::config::{Config, DEFAULT_ADDRESS, ModsConfig};
use crate::mods::ModRegistry;
use crate::trace::document::Document;
use anyhow::{Context, bail};
use reqwest::Method;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

/// What says where the runs of a command take place.
#[derive(Debug, clap::Args)]
pub struct PlaceArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub engine: EngineFlags,
    #[command(flatten)]
    pub data: DataFlags,
}

impl PlaceArgs {
    /// The place, and the names that the mods have there: on the server that was named or runs, else in this process; in any
    /// case in this process where a mod is a file, or a flag says which model or database. `said` tells whether a flag stood
    /// on the command line.
    pub async fn open(&self, mods: &[String], said: impl Fn(&str) -> bool) -> anyhow::Result<(Place, Vec<String>)> {
        if let Some(file) = mods.iter().find(|name| is_file(name) && !Path::new(name).is_file()) {
            bail!("there is no file {file}; --mod takes the name of a mod or a Python file");
        }
        let here =
            mods.iter().any(|name| is_file(name)) || ["model", "data_dir", "database_url"].into_iter().any(&said);
        if here && self.server.server.is_some() {
            bail!(
                "--model, --data-dir, --database-url and mods given as files are for an engine in this process and cannot be \
                 combined with --server"
            );
        }
        if !here && let Some(server) = self.server.find().await? {
            return Ok((Place::on(server), mods.to_vec()));
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
        let own_database = said("data_dir") || said("database_url");
        let place = Place::here(self.engine.clone(), self.data.clone(), &self.server, registry, own_database).await?;
        Ok((place, names))
    }
}

/// Whether a mod is given as a file and not by its name.
pub fn is_file(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "py") || name.contains(std::path::MAIN_SEPARATOR)
}

/// Where runs take place.
pub struct Place {
    server: Server,
    local: Option<Local>,
    /// A server that has the database which a local engine would use.
    owner: Option<Server>,
}

impl Place {
    /// A server that runs already.
    fn on(server: Server) -> Self {
        Self { server, local: None, owner: None }
    }

    /// An engine in this process. Runs are recorded in its database, or, when that is the default one and belongs to a
    /// running server, handed to that server; with `own_database` no server is asked.
    async fn here(
        mut engine: EngineFlags,
        data: DataFlags,
        server: &ServerArgs,
        registry: ModRegistry,
        own_database: bool,
    ) -> anyhow::Result<Self> {
        // One slot is enough for one person, and its context can be as large as the model's.
        engine.parallel = Some(1);
        let config = Config::new(engine, data, &ServerFlags::default())?;
        let owner = if own_database || config.data.database_url.is_some() { None } else { server.default().await };
        let record = if owner.is_some() { Record::Document } else { Record::Database };
        let (local, server) = Local::start(config, registry, record).await?;
        Ok(Self { server, local: Some(local), owner })
    }

    /// The way to the engine.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Whether attention that is captured here can be recorded: it does not travel to another server.
    pub fn keeps_attention(&self) -> bool {
        self.owner.is_none()
    }

    /// A run has ended: where its replay is, if it was recorded.
    pub async fn recorded(&mut self, run_id: Option<&str>) -> anyhow::Result<Option<String>> {
        let Some(run_id) = run_id else { return Ok(None) };
        let (Some(owner), Some(local)) = (&self.owner, &mut self.local) else {
            return Ok(Some(match self.local {
                None => self.server.replay(run_id),
                Some(_) => format!("http://{DEFAULT_ADDRESS}/runs/{run_id} (while `thunder serve` runs)"),
            }));
        };
        let Some(document) = local.document().await else { return Ok(None) };
        let sources = local.hand_sources(&document);
        let request = owner.request(Method::POST, "/ingest").header("content-type", "application/json");
        let request = request.header("x-thunder-surface", "cli");
        let sent = owner.send(request.body(document.write())).await;
        let left = local.take_back_sources(&sources);
        sent.with_context(|| format!("the run is done, but the server at {} did not record it", owner.base()))?;
        if left {
            tracing::warn!(
                "the server at {} keeps its data elsewhere and has not got the source of the mods: `thunder replay --verify` \
                 needs them as --mod",
                owner.base()
            );
        }
        Ok(Some(owner.replay(&document.request.request_id)))
    }

    /// The server that has the recorded runs.
    pub fn archive(&self) -> &Server {
        self.owner.as_ref().unwrap_or(&self.server)
    }

    /// A run that has ended here, as it was recorded.
    pub async fn document(&mut self, run_id: &str) -> anyhow::Result<Document> {
        if let (Some(_), Some(local)) = (&self.owner, &mut self.local) {
            return local.document().await.context("the run was not recorded");
        }
        finished(&self.server, run_id).await.map(|(document, _)| document)
    }

    /// Stops the engine, where it is in this process.
    pub async fn close(self) {
        if let Some(local) = self.local {
            local.finish().await;
        }
    }
}

/// A run that is over, or about to be, from the server that has it; with what the server says about it.
pub async fn finished(server: &Server, run_id: &str) -> anyhow::Result<(Document, Value)> {
    const PATIENCE: Duration = Duration::from_secs(30);
    let (path, began) = (run_path(server, run_id)?, Instant::now());
    loop {
        let bytes = server.send(server.request(Method::GET, &path)).await?.bytes().await?;
        let mut shown: Value = serde_json::from_slice(&bytes).context("the server's answer is not a run")?;
        if shown["run"]["status"] != "running" {
            let document = Document::parse(&bytes).context("the server's answer is not a run")?;
            return Ok((document, shown["run"].take()));
        }
        if began.elapsed() > PATIENCE {
            bail!("run {run_id} is still running");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
