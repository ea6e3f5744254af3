//! The models of a server: which there are, which are loaded, and how one becomes the other.
//!
//! One of them is the default, which requests mean that name none. Every other is found by name only; nothing that
//! comes over the network is ever taken for a path. A loaded model is a [`Loaded`]: an engine with its own decode
//! thread and context, and what belongs to its weights. All engines send their signals to one recorder.

mod asleep;
mod encoding;
mod folder;
mod load;
mod loaded;
mod names;
mod sessions;
mod trial;
mod unload;

pub use asleep::{Asleep, Observed};
pub use load::Step;
pub use loaded::Loaded;
pub(in crate::api) use names::meant;
pub use sessions::{NoRoom, Sessions};

use super::ApiError;
use crate::config::Config;
use crate::engine::Clock;
use crate::events::Recorder;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::watch;

/// How far a model is.
#[derive(Debug, Clone)]
pub enum ModelState {
    /// Known, and not in memory.
    Unloaded,
    /// Its weights are being read: 0 … 1, and 1 while the context is being made.
    Loading(f32),
    /// It takes requests.
    Ready(Loaded),
    /// It takes no more requests; those that run may end.
    Unloading,
    /// It could not be loaded.
    Failed(String),
}

/// A model that the server knows.
#[derive(Debug, Clone)]
pub struct Entry {
    /// What requests and answers call it.
    pub name: String,
    /// Names that requests may use besides.
    pub aliases: Vec<String>,
    /// Its GGUF.
    pub path: PathBuf,
    /// Whether requests mean it that name no model.
    pub default: bool,
    /// How far it is.
    pub state: ModelState,
    /// Counts up with each request to any model; the higher, the later.
    last_used: u64,
    /// Facts reported while it sleeps; `None` unless it does.
    asleep: Option<Arc<Asleep>>,
    /// Tells the load that is going on to give up.
    given_up: Arc<AtomicBool>,
}

/// The models of a server; cheap to clone.
#[derive(Clone)]
pub struct Catalogue(Arc<Inner>);

struct Inner {
    models: Mutex<Models>,
    /// Held from making room to the load that takes it.
    admission: tokio::sync::Mutex<()>,
    /// Told of every change of a state.
    changed: watch::Sender<()>,
    /// Gone when the server has stopped.
    recorder: Mutex<Option<Recorder>>,
    sessions: Sessions,
    config: Arc<Config>,
    clock: Clock,
    /// The program that tries files.
    trial: OnceLock<PathBuf>,
}

/// What a request finds.
enum Look {
    Ready(Loaded),
    /// It can be loaded under this name.
    Unloaded(String),
    /// It is on its way in or out.
    Changing,
}

#[derive(Default)]
struct Models {
    /// The default first.
    entries: Vec<Entry>,
    uses: u64,
}

impl Catalogue {
    /// A catalogue that knows no model yet. `clock` tells engines the time.
    pub(super) fn new(config: Arc<Config>, clock: Clock) -> Self {
        Self(Arc::new(Inner {
            models: Mutex::default(),
            admission: tokio::sync::Mutex::default(),
            changed: watch::Sender::new(()),
            recorder: Mutex::default(),
            sessions: Sessions::new(config.engine.cache.max_session_bytes),
            config,
            clock,
            trial: OnceLock::new(),
        }))
    }

    /// Every model, the default first.
    #[must_use]
    pub fn list(&self) -> Vec<Entry> {
        self.lock().entries.clone()
    }

    /// The model of that name or alias.
    ///
    /// # Errors
    /// 404 when there is none.
    pub fn named(&self, name: &str) -> Result<Entry, ApiError> {
        let models = self.lock();
        let found = models.entries.iter().find(|entry| entry.names().any(|own| own == name));
        found.cloned().ok_or_else(|| models.unknown(name))
    }

    /// The model that a request names as for [`Catalogue::loaded`], whether it is loaded or not.
    ///
    /// # Errors
    /// 404 when there is no such model.
    pub fn meant(&self, asked: Option<&str>) -> Result<Entry, ApiError> {
        let models = self.lock();
        let index = models.find(asked, self.0.config.server.any_model_name)?;
        Ok(models.entries[index].clone())
    }

    /// States of slots that clients keep here.
    #[must_use]
    pub fn sessions(&self) -> &Sessions {
        &self.0.sessions
    }

    /// The default model, when it is ready.
    #[must_use]
    pub fn default_model(&self) -> Option<Loaded> {
        self.lock().entries.first().and_then(Entry::ready).cloned()
    }

    /// The model that a request names, with or without mods behind the name; `None` is the default. One that is not
    /// loaded is loaded when the configuration says so; waits until it is.
    ///
    /// # Errors
    /// 404 when there is no such model; 400 when it is not loaded; 503 when it could not be loaded, or is on its way out;
    /// 429 when it has no room beside models that are in use.
    pub async fn loaded(&self, asked: Option<&str>) -> Result<Loaded, ApiError> {
        let mut changed = self.changes();
        let mut looked = self.0.config.server.models.dir.is_none();
        loop {
            changed.mark_unchanged();
            match self.look(asked) {
                Ok(Look::Ready(loaded)) => return Ok(loaded),
                Ok(Look::Unloaded(name)) => self.begin_load(&name).await?,
                // The sender lives as long as this catalogue, so waiting cannot fail.
                Ok(Look::Changing) => drop(changed.changed().await),
                // Perhaps its file came after the folder was looked at.
                Err(error) if error.kind() == super::ErrorKind::NotFound && !looked => {
                    looked = true;
                    self.refresh().await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn look(&self, asked: Option<&str>) -> Result<Look, ApiError> {
        let mut models = self.lock();
        let index = models.find(asked, self.0.config.server.any_model_name)?;
        models.uses += 1;
        let now = models.uses;
        let entry = &mut models.entries[index];
        entry.last_used = now;
        let autoload = self.0.config.server.models.autoload || entry.is_asleep();
        match &entry.state {
            ModelState::Ready(loaded) => Ok(Look::Ready(loaded.clone())),
            ModelState::Unloaded if autoload => Ok(Look::Unloaded(entry.name.clone())),
            ModelState::Loading(_) => Ok(Look::Changing),
            ModelState::Unloading if autoload => Ok(Look::Changing),
            _ => Err(entry.not_loaded()),
        }
    }

    /// Returns when a model's state has changed; compare [`Catalogue::list`] before and after.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.0.changed.subscribe()
    }

    /// Ends every run of every model and waits for the decode threads; what was recorded is with the recorder then.
    pub async fn stop(&self) {
        self.0.recorder.lock().unwrap_or_else(PoisonError::into_inner).take();
        let running: Vec<Loaded> = {
            let models = self.lock();
            models.entries.iter().for_each(|entry| entry.given_up.store(true, Ordering::Release));
            models.entries.iter().filter_map(|entry| entry.ready().cloned()).collect()
        };
        futures::future::join_all(running.iter().map(Loaded::stop)).await;
    }

    fn lock(&self) -> MutexGuard<'_, Models> {
        self.0.models.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a model under the lock, and tells everybody who waits; what `change` returns is dropped outside.
    fn change<T>(&self, name: &str, change: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        let changed = self.lock().entries.iter_mut().find(|entry| entry.name == name).map(change);
        self.0.changed.send_replace(());
        changed
    }
}

impl Models {
    fn find(&self, asked: Option<&str>, any_name: bool) -> Result<usize, ApiError> {
        let asked = asked.filter(|asked| !asked.is_empty());
        let found = match asked {
            None => (!self.entries.is_empty()).then_some(0),
            Some(asked) => {
                let names = self.entries.iter().flat_map(Entry::names);
                match meant(asked, names) {
                    Some((name, _)) => self.entries.iter().position(|entry| entry.names().any(|own| own == name)),
                    None => any_name.then_some(0),
                }
            }
        };
        found.ok_or_else(|| self.unknown(asked.unwrap_or_default()))
    }

    fn unknown(&self, asked: &str) -> ApiError {
        if self.entries.is_empty() {
            let detail = format!("there is no model '{asked}': this server was started with --no-model");
            return ApiError::new(super::ErrorKind::NotFound, detail).at("model").code("model_not_found");
        }
        let known: Vec<&str> = self.entries.iter().map(|entry| entry.name.as_str()).collect();
        let detail = format!(
            "there is no model '{asked}'; known are {}; without \"model\" a request goes to {}",
            known.join(", "),
            known.first().unwrap_or(&"none")
        );
        ApiError::new(super::ErrorKind::NotFound, detail).at("model").code("model_not_found")
    }
}

impl Entry {
    /// The model, when it is ready.
    #[must_use]
    pub fn ready(&self) -> Option<&Loaded> {
        match &self.state {
            ModelState::Ready(loaded) => Some(loaded),
            _ => None,
        }
    }

    fn names(&self) -> impl Iterator<Item = &str> + Clone {
        std::iter::once(self.name.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// A model that nobody has asked for yet.
    fn new(name: String, aliases: Vec<String>, path: PathBuf, default: bool) -> Self {
        Self {
            name,
            aliases,
            path,
            default,
            state: ModelState::Unloaded,
            last_used: 0,
            asleep: None,
            given_up: Arc::default(),
        }
    }

    pub(in crate::api) fn not_loaded(&self) -> ApiError {
        let name = &self.name;
        match &self.state {
            ModelState::Failed(reason) => {
                ApiError::unavailable(format!("the model '{name}' could not be loaded: {reason}")).at("model")
            }
            ModelState::Loading(_) => {
                ApiError::unavailable(format!("the model '{name}' is being loaded")).at("model").retry_after(1)
            }
            ModelState::Unloading => {
                ApiError::unavailable(format!("the model '{name}' is being unloaded")).at("model").retry_after(1)
            }
            _ => ApiError::invalid("model", format!("the model '{name}' is not loaded; POST /models/load loads it"))
                .code("model_not_loaded"),
        }
    }
}
