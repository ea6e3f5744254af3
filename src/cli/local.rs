//! An engine in this process, for commands such as `thunder run` without a server.
//!
//! The commands use it like any other server, on a loopback port chosen by the system, with a random key, so that all
//! runs take the same path.

use super::client::Server;
use super::progress::Progress;
use super::startup;
use crate::api::router;
use crate::config::{Config, KeyHash, Rights, SecurityConfig};
use crate::events::{RunId, TraceItem, hex, system};
use crate::mods::{ModRegistry, source_store};
use crate::recording::Signal;
use crate::server::mods::{store_used_versions, used_files};
use crate::server::{App, Listeners, ServerState};
use crate::store::RecorderChannel;
use crate::trace::document::{Document, RequestExtras, RequestMeta, RunDetails};
use crate::ui;
use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// The destination of a local engine's recordings.
pub enum RecordTarget {
    /// The configured database.
    Database,
    /// One document per run, for the server that uses the database.
    Document,
}

/// A running local engine.
pub struct LocalEngine {
    client: Server,
    app: App,
    serving: JoinHandle<()>,
    documents: Option<mpsc::UnboundedReceiver<Document>>,
    /// The run that is being sent to a server, or whose sending was cancelled.
    unsent: Option<Document>,
}

impl LocalEngine {
    /// Starts an engine.
    pub async fn start(mut config: Config, registry: ModRegistry, record: RecordTarget) -> anyhow::Result<Self> {
        let key: [u8; 32] = system::random();
        let key = hex(&key);
        // `thunder fork` reads runs of other processes, which have other keys.
        let admin = KeyHash::new(&key).with_rights(Rights { admin: true, ..Rights::default() });
        config.server.credentials.security = SecurityConfig { keys: vec![admin], ..SecurityConfig::default() };
        config.server.listen = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
        let listeners = Listeners::bind(&config.server.listen).await?;
        let client = Server::new(format!("http://{}", listeners.addresses()[0]), Some(key.parse()?))?;
        let config = Arc::new(config);
        let app = App::new(Arc::clone(&config), Arc::new(registry), system::now);
        let serving = tokio::spawn(listeners.serve(app.clone(), router(&app, &ui::pages())));
        let progress = Progress::new(None);
        let mut local = Self { client, app: app.clone(), serving, documents: None, unsent: None };
        let started = Box::pin(local.load(&config, record, &progress)).await;
        progress.end();
        if let Err(error) = started {
            local.finish().await;
            return Err(error);
        }
        app.set_state(ServerState::Ready);
        Ok(local)
    }

    /// Returns a client for the engine.
    pub const fn client(&self) -> &Server {
        &self.client
    }

    async fn load(&mut self, config: &Config, record: RecordTarget, progress: &Arc<Progress>) -> anyhow::Result<()> {
        startup::register_mods(self.app.registry(), config, progress).await?;
        let app = &self.app;
        match record {
            RecordTarget::Database => {
                let channel = RecorderChannel::new();
                let load = startup::load_default(app, None, channel.recorder(), progress);
                let open = async {
                    let store = startup::open_store(&config.data, channel, progress).await?;
                    store.start_recorder();
                    app.set_database(store);
                    store_used_versions(app);
                    Ok(())
                };
                Box::pin(startup::open_and_load(open, load)).await
            }
            RecordTarget::Document => {
                let (sender, signals) = mpsc::channel(64);
                let (finished_documents, documents) = mpsc::unbounded_channel();
                tokio::spawn(collect(signals, finished_documents));
                self.documents = Some(documents);
                startup::load_default(&self.app, None, sender, progress).await
            }
        }
    }

    /// Returns the next finished run, if runs are recorded as documents.
    pub async fn next_document(&mut self) -> Option<Document> {
        const DOCUMENT_TIMEOUT: Duration = Duration::from_secs(5);
        let documents = self.documents.as_mut()?;
        tokio::time::timeout(DOCUMENT_TIMEOUT, documents.recv()).await.ok()?
    }

    /// Keeps a run for [`Self::stop`] until it is sent; `None` when it is.
    pub fn set_unsent(&mut self, document: Option<Document>) {
        self.unsent = document;
    }

    /// Ends the active runs and returns the unsent run, and those that [`Self::next_document`] has not returned.
    pub async fn stop(&mut self) -> Vec<Document> {
        /// Maximum wait for the end of the channel after the last run.
        const END_TIMEOUT: Duration = Duration::from_millis(500);
        // This process is the only client, and all its requests have been answered.
        self.serving.abort();
        self.app.set_state(ServerState::Stopping);
        self.app.models().stop().await;
        let mut remaining: Vec<Document> = self.unsent.take().into_iter().collect();
        if let Some(documents) = &mut self.documents {
            while let Ok(Some(document)) = tokio::time::timeout(END_TIMEOUT, documents.recv()).await {
                remaining.push(document);
            }
        }
        remaining
    }

    /// Stores the sources of a run's mod files in the data directory, where the server reads them. Returns their
    /// hashes.
    pub fn publish_sources(&self, document: &Document) -> Vec<String> {
        let publish = |(name, _): (String, String)| {
            let factory = self.app.registry().get(&name)?;
            let stored = source_store::store(&self.app.config().data.dir, factory.upload()?);
            stored
                .inspect_err(|error| tracing::debug!(mod.name = name, "cannot store the source of a mod: {error}"))
                .ok()
        };
        used_files(document).into_iter().filter_map(publish).collect()
    }

    /// Removes the sources that the server has not read. Returns true if there were any.
    pub fn remove_sources(&self, hashes: &[String]) -> bool {
        hashes.iter().filter(|hash| source_store::remove(&self.app.config().data.dir, hash)).count() > 0
    }

    /// Stops the engine, and then the database.
    pub async fn finish(mut self) {
        self.stop().await;
        self.app.set_state(ServerState::Stopped);
        if let Ok(store) = self.app.store() {
            store.clone().close().await;
        }
    }
}

#[cfg(test)]
impl LocalEngine {
    /// Creates an engine without a model, with these finished runs.
    pub fn with_documents(config: Config, finished: Vec<Document>) -> Self {
        let (sender, documents) = mpsc::unbounded_channel();
        finished.into_iter().for_each(|document| drop(sender.send(document)));
        let app = App::new(Arc::new(config), Arc::new(ModRegistry::with_builtin()), system::now);
        let client = Server::new("http://local".to_owned(), None).unwrap();
        Self { client, app, serving: tokio::spawn(async {}), documents: Some(documents), unsent: None }
    }
}

/// Collects the signals of each run into a document. Documents do not contain attention.
async fn collect(mut signals: mpsc::Receiver<Signal>, finished_documents: mpsc::UnboundedSender<Document>) {
    let mut runs: HashMap<RunId, Document> = HashMap::new();
    while let Some(signal) = signals.recv().await {
        match signal {
            Signal::Started(start) => {
                let request = RequestMeta {
                    request_id: start.request_id.clone(),
                    created_at: Some(start.created_at),
                    completed_at: None,
                    model: Some(start.model.clone()),
                    user_api_key: None,
                    max_tokens: start.max_tokens,
                    temperature: start.temperature,
                    mod_text: (!start.mods.is_empty()).then(|| start.mods.join(", ")),
                    surface: None,
                    extras: RequestExtras {
                        user_prompt: Some(start.prompt_preview.clone()),
                        thunder_run: Some(RunDetails {
                            seed: start.seed,
                            metadata: Some(start.metadata.0.iter().cloned().collect()),
                            ..RunDetails::default()
                        }),
                        ..RequestExtras::default()
                    },
                };
                let document = Document {
                    request,
                    events: Vec::new(),
                    mod_calls: Vec::new(),
                    mod_logs: Vec::new(),
                    actions: Vec::new(),
                };
                runs.insert(start.run_id, document);
            }
            Signal::Items(run, items) => {
                if let Some(document) = runs.get_mut(&run) {
                    items.iter().cloned().for_each(|item| push(document, item));
                }
            }
            Signal::Ended(run, end) => {
                if let Some(mut document) = runs.remove(&run) {
                    document.request.completed_at = Some(end.completed_at);
                    document.request.extras.thunder_run.get_or_insert_default().set_end(&end);
                    // Fails only if the program is about to end.
                    let _ = finished_documents.send(document);
                }
            }
        }
    }
}

fn push(document: &mut Document, item: TraceItem) {
    match item {
        TraceItem::Event(event) => document.events.push(event),
        TraceItem::ModCall(call) => document.mod_calls.push(call),
        TraceItem::ModLog(log) => document.mod_logs.push(log),
        TraceItem::Action(action) => document.actions.push(action),
        TraceItem::Attention(_) => {}
    }
}
