//! An engine in this process, for `thunder run` without a server.
//!
//! It is reached as every other server is, on a loopback port that the system chooses, with a key that nobody else
//! knows; so there is one way from a prompt to a run.

use super::client::Server;
use super::progress::Progress;
use super::startup;
use crate::api::{App, Listeners, State};
use crate::config::{Config, KeyHash, Security};
use crate::events::{Item, Signal};
use crate::mods::Registry;
use crate::trace::document::{Document, RequestMeta};
use chrono::Utc;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Where a local engine records.
pub enum Record {
    /// Into the configured database.
    Database,
    /// Into a document, for a server that has the database.
    Document,
}

/// A running local engine.
pub struct Local {
    app: App,
    serving: JoinHandle<()>,
    collecting: Option<JoinHandle<Option<Document>>>,
}

impl Local {
    /// Starts an engine and returns it with the way to reach it.
    pub async fn start(mut config: Config, registry: Registry, record: Record) -> anyhow::Result<(Self, Server)> {
        let key: [u8; 32] = rand::random();
        let key = key.map(|byte| format!("{byte:02x}")).concat();
        config.server.security = Security { keys: vec![KeyHash::of(&key)], ..Security::default() };
        config.server.listen = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
        let listeners = Listeners::bind(&config.server.listen).await?;
        let address = listeners.addresses()[0];
        let config = Arc::new(config);
        let app = App::new(Arc::clone(&config), Arc::new(registry), Utc::now);
        let serving = tokio::spawn(listeners.serve(app.clone()));
        let progress = Arc::new(Progress::new(None));
        let mut local = Self { app: app.clone(), serving, collecting: None };
        let started = local.fill(&config, record, &progress).await;
        progress.end();
        if let Err(error) = started {
            local.finish().await;
            return Err(error);
        }
        app.set_state(State::Ready);
        Ok((local, Server::new(format!("http://{address}"), Some(key.parse()?))))
    }

    async fn fill(&mut self, config: &Config, record: Record, progress: &Arc<Progress>) -> anyhow::Result<()> {
        let recorder = match record {
            Record::Database => {
                let store = startup::open_store(&config.data, progress).await?;
                let (recorder, live) = store.recorder();
                self.app.set_database(store, live);
                recorder
            }
            Record::Document => {
                let (sender, signals) = mpsc::channel(64);
                self.collecting = Some(tokio::spawn(collect(signals)));
                sender.into()
            }
        };
        startup::register_mods(self.app.registry(), config, progress).await?;
        startup::load_default(&self.app, recorder, progress).await
    }

    /// Stops the engine and the database; the document, where one was recorded.
    pub async fn finish(self) -> Option<Document> {
        self.app.set_state(State::Stopping);
        self.app.models().stop().await;
        self.app.set_state(State::Stopped);
        self.serving.abort();
        if let Ok(store) = self.app.store() {
            store.clone().close().await;
        }
        match self.collecting {
            Some(collecting) => tokio::time::timeout(std::time::Duration::from_secs(5), collecting).await.ok()?.ok()?,
            None => None,
        }
    }
}

/// Puts the signals of one run together; attention does not travel in a document.
async fn collect(mut signals: mpsc::Receiver<Signal>) -> Option<Document> {
    let mut document: Option<Document> = None;
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
                };
                document = Some(Document {
                    request,
                    events: Vec::new(),
                    mod_calls: Vec::new(),
                    mod_logs: Vec::new(),
                    actions: Vec::new(),
                });
            }
            Signal::Items(_, items) => {
                if let Some(document) = &mut document {
                    items.iter().cloned().for_each(|item| push(document, item));
                }
            }
            Signal::Ended(_, end) => {
                if let Some(document) = &mut document {
                    document.request.completed_at = Some(end.completed_at);
                }
                return document;
            }
        }
    }
    document
}

fn push(document: &mut Document, item: Item) {
    match item {
        Item::Event(event) => document.events.push(event),
        Item::ModCall(call) => document.mod_calls.push(call),
        Item::ModLog(log) => document.mod_logs.push(log),
        Item::Action(action) => document.actions.push(action),
        Item::Attention(_) => {}
    }
}
