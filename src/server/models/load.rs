//! Loading: creates an engine from a GGUF file.

use super::options::{encoder_settings, engine_options, model_options};
use super::{LoadedModel, ModelEntry, ModelRegistry, ModelState, Models, folder};
use crate::config::{Config, bundled_model};
use crate::engine::Engine;
use crate::engine::encoder::Encoder;
use crate::model::llama::WeightFile;
use crate::model::{Model, ModelError};
use crate::recording::RecorderHandle;
use crate::server::ApiError;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Time after which a request repeats a failed load of an unchanged file. The cause may have been temporary, such as too
/// little free memory.
pub(super) const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Progress of a load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LoadStep {
    /// Reading the weights, from 0 to 1.
    Weights(f32),
    /// Creating the context for decoding.
    Context,
}

/// A failed load.
#[derive(Debug, Clone)]
pub struct LoadFailure {
    /// The cause.
    pub reason: String,
    /// The file before the load; `None` if there was none.
    file: Option<WeightFile>,
    at: Instant,
}

impl LoadFailure {
    /// Creates the failure of a load of this file.
    pub(super) fn new(reason: String, file: Option<WeightFile>) -> Self {
        Self { reason, file, at: Instant::now() }
    }
}

type Observer = dyn Fn(&str, LoadStep) + Send + Sync;

impl ModelRegistry {
    /// Registers the configured models. The default one is the downloaded file, if there is one. From now on engines can
    /// start, and their signals are sent to `recorder`.
    ///
    /// # Errors
    /// The bundled model could not be unpacked.
    pub async fn open(&self, downloaded: Option<PathBuf>, recorder: RecorderHandle) -> Result<(), ModelError> {
        *self.0.recorder.lock().unwrap_or_else(PoisonError::into_inner) = Some(recorder);
        let path = match downloaded {
            Some(path) => path,
            None => configured_path(&self.0.config).await?,
        };
        // llama-server names a model after its file, including the extension. Clients may have stored this name.
        let file = path.file_name().map(|file| file.to_string_lossy().into_owned());
        let mut names = self.0.config.engine.alias.clone();
        for name in std::iter::once(folder::default_name(&path)).chain(file) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let name = names.remove(0);
        *self.lock() = Models { entries: vec![ModelEntry::new(name, names, path, true)], uses: 0 };
        self.refresh().await;
        Ok(())
    }

    /// Loads the default model and reports progress to `observe`.
    ///
    /// # Errors
    /// The cause of the failure.
    pub async fn load_default(
        &self,
        observe: impl Fn(&str, LoadStep) + Send + Sync + 'static,
    ) -> Result<(), ModelError> {
        let entry = self.lock().entries.first().cloned();
        let entry = entry.ok_or_else(|| load_error(Path::new("no model"), "the model registry is not open"))?;
        let cancelled = self.change(&entry.name, ModelEntry::begin_load).unwrap_or_default();
        self.load(&entry, &cancelled, Arc::new(observe)).await
    }

    /// Starts loading a model in the background.
    ///
    /// # Errors
    /// 404 for an unknown model; 400 if it is loaded; 503 if it is being unloaded; 429 if `--models-max` models are in
    /// use.
    pub async fn begin_load(&self, name: &str) -> Result<(), ApiError> {
        self.refresh().await;
        let entry = self.entry_by_name(name)?;
        match entry.state {
            ModelState::Ready(_) => {
                return Err(ApiError::invalid("model", format!("the model '{}' is already loaded", entry.name)));
            }
            ModelState::Loading { .. } => return Ok(()),
            ModelState::Unloading(_) | ModelState::CancellingLoad => return Err(entry.not_loaded()),
            ModelState::Unloaded | ModelState::Failed(_) => {}
        }
        self.load_in_background(&entry.name).await
    }

    /// Unloads other models if necessary and starts loading, unless another request has already started.
    pub(super) async fn load_in_background(&self, name: &str) -> Result<(), ApiError> {
        let _admitted = self.0.admission.lock().await;
        self.make_room(name).await?;
        let started = self.change(name, |entry| {
            if !matches!(entry.state, ModelState::Unloaded | ModelState::Failed(_)) {
                return None;
            }
            let cancelled = entry.begin_load();
            Some((entry.clone(), cancelled))
        });
        let Some((entry, cancelled)) = started.flatten() else { return Ok(()) };
        let registry = self.clone();
        tokio::spawn(async move {
            tracing::info!(model = entry.name, "loading model");
            match registry.load(&entry, &cancelled, Arc::new(|_, _| ())).await {
                Ok(()) => tracing::info!(model = entry.name, "model loaded"),
                Err(_) if cancelled.load(Ordering::Acquire) => {
                    tracing::info!(model = entry.name, "model load cancelled");
                }
                Err(error) => tracing::error!(model = entry.name, %error, "model load failed"),
            }
        });
        Ok(())
    }

    async fn load(
        &self,
        entry: &ModelEntry,
        cancelled: &Arc<AtomicBool>,
        observe: Arc<Observer>,
    ) -> Result<(), ModelError> {
        let file = WeightFile::new(&entry.path).ok();
        let started = self.start(entry, cancelled, observe).await;
        self.end_load(entry, cancelled, file, started).await
    }

    /// Sets the state of a model after a load. Stops its threads if the load was cancelled.
    pub(super) async fn end_load(
        &self,
        entry: &ModelEntry,
        cancelled: &AtomicBool,
        file: Option<WeightFile>,
        started: Result<LoadedModel, ModelError>,
    ) -> Result<(), ModelError> {
        let changed = self.change(&entry.name, |entry| {
            // Read under the lock, under which requests and the end of the server cancel loads.
            if cancelled.load(Ordering::Acquire) {
                return false;
            }
            // A sleeping model whose load failed stays asleep: another request loads it.
            match &started {
                Ok(loaded) => (entry.state, entry.sleeping) = (ModelState::Ready(loaded.clone()), None),
                Err(error) => entry.state = ModelState::Failed(LoadFailure::new(error.to_string(), file)),
            }
            true
        });
        if changed == Some(true) {
            return started.map(drop);
        }
        let error = match started {
            Ok(loaded) => {
                loaded.stop().await;
                load_error(&entry.path, "the load was cancelled")
            }
            Err(error) => error,
        };
        self.change(&entry.name, |entry| (entry.state, entry.sleeping) = (ModelState::Unloaded, None));
        Err(error)
    }

    async fn start(
        &self,
        entry: &ModelEntry,
        cancelled: &Arc<AtomicBool>,
        observe: Arc<Observer>,
    ) -> Result<LoadedModel, ModelError> {
        let recorder = self.0.recorder.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(recorder) = recorder else {
            return Err(load_error(&entry.path, "the model registry is not open"));
        };
        let config = &self.0.config.engine;
        let images = config.images.as_ref().filter(|_| entry.default);
        self.probe_file(&entry.path, images.map(|images| images.projector.as_path())).await?;
        // The draft model comes first, so that the layers of the main model are placed in the memory that it leaves.
        let draft_model = self.load_draft(entry, cancelled).await?;
        let model = self.read(entry, Arc::clone(cancelled), Arc::clone(&observe)).await?;
        observe(&entry.name, LoadStep::Context);
        let options = engine_options(&self.0.config, &model, draft_model, self.0.clock);
        let settings = encoder_settings(config, &model);
        let model = Arc::new(model);
        let engine = Engine::start(Arc::clone(&model), options, recorder).await?;
        match Encoder::start(model, &settings).await {
            Ok(encoder) => {
                Ok(LoadedModel::new(engine, encoder, entry.aliases.clone(), config.chat_template.as_deref()))
            }
            Err(error) => {
                engine.stop().await;
                Err(error)
            }
        }
    }

    /// Reads the weights on a blocking thread.
    async fn read(
        &self,
        entry: &ModelEntry,
        cancelled: Arc<AtomicBool>,
        observe: Arc<Observer>,
    ) -> Result<Model, ModelError> {
        let options = model_options(&self.0.config.engine, entry);
        let registry = self.clone();
        let (name, path) = (entry.name.clone(), entry.path.clone());
        let read = move || {
            let mut reported = 0.0;
            Model::load(&path, &options, move |done| {
                observe(&name, LoadStep::Weights(done));
                // llama.cpp reports progress for every tensor; one report per percent is enough.
                if done - reported >= 0.01 {
                    reported = done;
                    registry.change(&name, |entry| {
                        if let ModelState::Loading { progress, .. } = &mut entry.state {
                            *progress = done;
                        }
                    });
                }
                !cancelled.load(Ordering::Acquire)
            })
        };
        tokio::task::spawn_blocking(read).await.map_err(|_| load_error(&entry.path, "the loader panicked"))?
    }

    /// Returns true if another load may succeed although the last one failed. The load of an unchanged file is not
    /// repeated if another model would have to be unloaded for it.
    pub(super) fn may_load_again(&self, entry: &ModelEntry) -> bool {
        let ModelState::Failed(LoadFailure { file, at, .. }) = &entry.state else { return true };
        WeightFile::new(&entry.path).ok() != *file || (at.elapsed() >= RETRY_DELAY && self.has_room(&entry.name))
    }
}

impl ModelEntry {
    /// Sets the state of a load that begins. Returns the flag that cancels it.
    fn begin_load(&mut self) -> Arc<AtomicBool> {
        let cancelled = Arc::<AtomicBool>::default();
        self.state = ModelState::Loading { progress: 0.0, cancelled: Arc::clone(&cancelled) };
        cancelled
    }
}

/// Returns the configured file of the default model, or the bundled model.
async fn configured_path(config: &Config) -> Result<PathBuf, ModelError> {
    if let Some(path) = &config.engine.model {
        return Ok(path.clone());
    }
    let cache = config.data.dir.join("cache");
    let shown = cache.display().to_string();
    let unpacked = tokio::task::spawn_blocking(move || bundled_model(&cache)).await;
    let unpacked = unpacked.map_err(|_| load_error(Path::new(&shown), "the bundled model could not be unpacked"))?;
    unpacked.map_err(|source| ModelError::Unpack { folder: shown, source })
}

fn load_error(path: &Path, reason: &str) -> ModelError {
    ModelError::Load { path: path.display().to_string(), reason: reason.into() }
}
