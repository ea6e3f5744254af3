//! The models of a server, their state, and transitions between states.
//!
//! One of them is the default for requests without a model name. All others are found by name only; names from requests
//! are never used as paths. A loaded model is a [`LoadedModel`]: an engine with its own decode thread and context, and the
//! model's metadata. All engines send their signals to one recorder.

mod draft;
mod folder;
mod load;
mod loaded;
mod names;
mod options;
mod probe;
mod sessions;
mod sleeping;
#[cfg(test)]
mod tests;
mod unload;

pub use load::{LoadFailure, LoadStep};
pub use loaded::{LoadedModel, WeakLoadedModel};
pub(crate) use names::{resolve, without_tag};
pub use sessions::{InsufficientMemory, SessionClient, Sessions};
pub use sleeping::{ModelView, SleepingModel};

use super::{ApiError, ErrorCode, ErrorKind};
use crate::config::Config;
use crate::engine::Clock;
use crate::recording::RecorderHandle;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::watch;

/// State of a model.
#[derive(Debug, Clone)]
pub enum ModelState {
    /// Known, but not in memory.
    Unloaded,
    /// Being loaded.
    Loading {
        /// Progress of reading the weights from 0 to 1; it stays 1 while the context is created.
        progress: f32,
        /// Cancels the load.
        cancelled: Arc<AtomicBool>,
    },
    /// Its load was cancelled and has not ended yet.
    CancellingLoad,
    /// Accepts requests.
    Ready(LoadedModel),
    /// Accepts no new requests; active runs may end.
    Unloading(WeakLoadedModel),
    /// Loading failed.
    Failed(LoadFailure),
}

/// A known model.
#[derive(Debug, Clone)]
pub struct ModelEntry {
    /// Name of the model in requests and responses.
    pub name: String,
    /// Additional names that requests may use.
    pub aliases: Vec<String>,
    /// Path of its GGUF file.
    pub path: PathBuf,
    /// True for the model of requests without a model name.
    pub default: bool,
    /// State of the model.
    pub state: ModelState,
    /// Counter of the last request to it; larger is later.
    last_used: u64,
    /// Data to report from the time at which the model falls asleep until it is loaded again; `None` otherwise.
    sleeping: Option<Arc<SleepingModel>>,
    /// True if the threads of the model stopped soon after the previous load.
    stopped_early: bool,
}

/// The models of a server; cheap to clone.
#[derive(Clone)]
pub struct ModelRegistry(Arc<Inner>);

struct Inner {
    models: Mutex<Models>,
    /// Locked while other models are unloaded for a model, until that model starts loading.
    admission: tokio::sync::Mutex<()>,
    /// Notified of every change of a state.
    changed: watch::Sender<()>,
    /// `None` after the server has stopped.
    recorder: Mutex<Option<RecorderHandle>>,
    sessions: Sessions,
    config: Arc<Config>,
    clock: Clock,
    /// The program that checks files in a separate process.
    probe_program: OnceLock<PathBuf>,
}

/// Result of looking up a request's model.
enum ModelLookup {
    Ready(LoadedModel),
    /// It can be loaded under this name.
    Unloaded(String),
    /// Its last load failed, and another request may load it again.
    Failed(ModelEntry),
    /// It is being loaded or unloaded.
    Changing,
}

#[derive(Default)]
struct Models {
    /// The default model first.
    entries: Vec<ModelEntry>,
    /// Number of requests so far.
    uses: u64,
}

impl ModelRegistry {
    /// Creates an empty registry. `clock` returns the time for engines.
    pub(crate) fn new(config: Arc<Config>, clock: Clock) -> Self {
        Self(Arc::new(Inner {
            models: Mutex::default(),
            admission: tokio::sync::Mutex::default(),
            changed: watch::Sender::new(()),
            recorder: Mutex::default(),
            sessions: Sessions::new(config.engine.cache.max_session_bytes),
            config,
            clock,
            probe_program: OnceLock::new(),
        }))
    }

    /// Returns all models, the default model first.
    #[must_use]
    pub fn list(&self) -> Vec<ModelEntry> {
        self.lock().entries.clone()
    }

    /// Returns the model with that name or alias.
    ///
    /// # Errors
    /// 404 for an unknown model.
    pub fn entry_by_name(&self, name: &str) -> Result<ModelEntry, ApiError> {
        let models = self.lock();
        let found = models.entries.iter().find(|entry| entry.names().any(|own| own == name));
        found.cloned().ok_or_else(|| models.unknown(name))
    }

    /// Returns the model named by a request, as in [`ModelRegistry::get_or_load`], loaded or not.
    ///
    /// # Errors
    /// 404 for an unknown model.
    pub fn entry_for_request(&self, requested: Option<&str>) -> Result<ModelEntry, ApiError> {
        let models = self.lock();
        let index = models.find(requested, self.0.config.server.any_model_name)?;
        Ok(models.entries[index].clone())
    }

    /// Returns the stored sessions.
    #[must_use]
    pub fn sessions(&self) -> &Sessions {
        &self.0.sessions
    }

    /// Returns the default model if it is ready.
    #[must_use]
    pub fn default_model(&self) -> Option<LoadedModel> {
        self.lock().entries.first().and_then(ModelEntry::ready).cloned()
    }

    /// Returns the model that `requested` names; `None` is the default model. Text after the model's name, such as
    /// mods, is ignored. Loads the model if the configuration allows that, and waits for it. A failed load is repeated if
    /// the file has changed or some time has passed.
    ///
    /// # Errors
    /// 404 for an unknown model; 400 if it is not loaded; 503 if loading failed or it is being unloaded; 429 if
    /// `--models-max` models are in use.
    pub async fn get_or_load(&self, requested: Option<&str>) -> Result<LoadedModel, ApiError> {
        let mut changed = self.changes();
        let mut rescanned = self.0.config.server.models.dir.is_none();
        let mut requested_load = false;
        loop {
            changed.mark_unchanged();
            match self.look_up(requested) {
                Ok(ModelLookup::Ready(loaded)) => return Ok(loaded),
                Ok(ModelLookup::Unloaded(name)) => {
                    requested_load = true;
                    self.load_in_background(&name).await?;
                }
                Ok(ModelLookup::Failed(entry)) => {
                    if requested_load || !self.may_load_again(&entry) {
                        return Err(entry.not_loaded());
                    }
                    requested_load = true;
                    self.load_in_background(&entry.name).await?;
                }
                // The sender is part of `self`, so waiting cannot fail.
                Ok(ModelLookup::Changing) => drop(changed.changed().await),
                // The file may have been added after the last scan.
                Err(error) if error.kind() == ErrorKind::NotFound && !rescanned => {
                    rescanned = true;
                    self.refresh().await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn look_up(&self, requested: Option<&str>) -> Result<ModelLookup, ApiError> {
        let mut models = self.lock();
        let index = models.find(requested, self.0.config.server.any_model_name)?;
        models.uses += 1;
        let now = models.uses;
        let entry = &mut models.entries[index];
        entry.last_used = now;
        let autoload = self.0.config.server.models.autoload || entry.is_sleeping();
        // The health check reports a default model that has stopped, so that the server is restarted.
        if !entry.default && entry.ready().is_some_and(|loaded| !loaded.is_running()) {
            self.unload_stopped(entry);
        }
        match &entry.state {
            ModelState::Ready(loaded) => Ok(ModelLookup::Ready(loaded.clone())),
            ModelState::Unloaded if autoload => Ok(ModelLookup::Unloaded(entry.name.clone())),
            ModelState::Failed(_) if autoload => Ok(ModelLookup::Failed(entry.clone())),
            ModelState::Loading { .. } => Ok(ModelLookup::Changing),
            ModelState::Unloading(_) | ModelState::CancellingLoad if autoload => Ok(ModelLookup::Changing),
            _ => Err(entry.not_loaded()),
        }
    }

    /// Returns a receiver that is notified of changes; compare [`ModelRegistry::list`] before and after.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.0.changed.subscribe()
    }

    /// Announces [`ModelRegistry::stop`] to the engines, before the server closes the connections of active runs.
    pub fn announce_stop(&self) {
        self.lock().entries.iter().filter_map(ModelEntry::in_memory).for_each(|loaded| loaded.engine().announce_stop());
    }

    /// Ends all runs of all models and waits for the decode threads. After that, the recorder has received all data of
    /// the runs.
    pub async fn stop(&self) {
        self.0.recorder.lock().unwrap_or_else(PoisonError::into_inner).take();
        let running: Vec<LoadedModel> = {
            let models = self.lock();
            for entry in &models.entries {
                if let ModelState::Loading { cancelled, .. } = &entry.state {
                    cancelled.store(true, Ordering::Release);
                }
            }
            models.entries.iter().filter_map(ModelEntry::in_memory).collect()
        };
        futures::future::join_all(running.iter().map(LoadedModel::stop)).await;
    }

    fn lock(&self) -> MutexGuard<'_, Models> {
        self.0.models.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a model under the lock and notifies waiting tasks. The result of `change` is dropped outside of the
    /// lock.
    fn change<T>(&self, name: &str, change: impl FnOnce(&mut ModelEntry) -> T) -> Option<T> {
        let changed = self.lock().entries.iter_mut().find(|entry| entry.name == name).map(change);
        self.0.changed.send_replace(());
        changed
    }
}

impl Models {
    fn find(&self, requested: Option<&str>, any_name: bool) -> Result<usize, ApiError> {
        let requested = requested.filter(|requested| !requested.is_empty());
        let found = match requested {
            None => (!self.entries.is_empty()).then_some(0),
            Some(requested) => {
                let names = self.entries.iter().flat_map(ModelEntry::names);
                match resolve(requested, names) {
                    Some((name, _)) => self.entries.iter().position(|entry| entry.names().any(|own| own == name)),
                    None => any_name.then_some(0),
                }
            }
        };
        found.ok_or_else(|| self.unknown(requested.unwrap_or_default()))
    }

    fn unknown(&self, requested: &str) -> ApiError {
        if self.entries.is_empty() {
            let detail = format!("unknown model '{requested}': this server was started with --no-model");
            return ApiError::new(ErrorKind::NotFound, detail).at("model").code(ErrorCode::ModelNotFound);
        }
        let known: Vec<&str> = self.entries.iter().map(|entry| entry.name.as_str()).collect();
        let detail = format!(
            "unknown model '{requested}'; known models: {}; without \"model\" a request uses {}",
            known.join(", "),
            known.first().unwrap_or(&"none")
        );
        ApiError::new(ErrorKind::NotFound, detail).at("model").code(ErrorCode::ModelNotFound)
    }
}

impl ModelEntry {
    /// Returns the model if it is ready.
    #[must_use]
    pub fn ready(&self) -> Option<&LoadedModel> {
        match &self.state {
            ModelState::Ready(loaded) => Some(loaded),
            _ => None,
        }
    }

    /// Returns the model if it is ready, or if it is being unloaded and its runs may be active.
    #[must_use]
    pub fn in_memory(&self) -> Option<LoadedModel> {
        match &self.state {
            ModelState::Ready(loaded) => Some(loaded.clone()),
            ModelState::Unloading(loaded) => loaded.upgrade(),
            _ => None,
        }
    }

    /// Returns all names that requests may use.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        std::iter::once(self.name.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// Creates the entry of a model that is not loaded.
    fn new(name: String, aliases: Vec<String>, path: PathBuf, default: bool) -> Self {
        Self {
            name,
            aliases,
            path,
            default,
            state: ModelState::Unloaded,
            last_used: 0,
            sleeping: None,
            stopped_early: false,
        }
    }

    pub(crate) fn not_loaded(&self) -> ApiError {
        let name = &self.name;
        match &self.state {
            ModelState::Failed(LoadFailure { reason, .. }) => {
                ApiError::unavailable(format!("the model '{name}' could not be loaded: {reason}")).at("model")
            }
            ModelState::Loading { .. } => {
                ApiError::unavailable(format!("the model '{name}' is being loaded")).at("model").retry_after(1)
            }
            ModelState::Unloading(_) | ModelState::CancellingLoad => {
                ApiError::unavailable(format!("the model '{name}' is being unloaded")).at("model").retry_after(1)
            }
            _ => {
                ApiError::invalid("model", format!("the model '{name}' is not loaded; load it with POST /models/load"))
                    .code(ErrorCode::ModelNotLoaded)
            }
        }
    }
}
