//! Loading: a GGUF becomes an engine.

use super::{Catalogue, Entry, Loaded, ModelState, Models};
use crate::config::{Config, EngineConfig, bundled_model};
use crate::engine::{Clock, Engine, Options};
use crate::events::Signal;
use crate::model::llama::ModelOptions;
use crate::model::{Error, Model};
use crate::trace::attention;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::mpsc;

/// What a load is doing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Step {
    /// Reading weights: 0 … 1.
    Weights(f32),
    /// Making the context that runs decode in.
    Context,
}

impl Catalogue {
    /// Enters the models of the configuration; from now on engines can start, and their signals go to `recorder`.
    ///
    /// # Errors
    /// The bundled model cannot be unpacked.
    pub async fn open(&self, recorder: mpsc::Sender<Signal>) -> Result<(), Error> {
        // Only start-up calls this, once; the first recorder stays.
        let _ = self.0.recorder.set(recorder);
        let path = default_path(&self.0.config).await?;
        let stem = stem(&path);
        let mut names = self.0.config.engine.alias.clone();
        if !names.contains(&stem) {
            names.push(stem);
        }
        let name = names.remove(0);
        let entry = Entry { name, aliases: names, path, default: true, state: ModelState::Unloaded, last_used: 0 };
        *self.lock() = Models { entries: vec![entry], uses: 0 };
        Ok(())
    }

    /// Loads the default model; `observe` is told how far it is.
    ///
    /// # Errors
    /// Why it cannot be loaded.
    pub async fn load_default(&self, observe: impl Fn(&str, Step) + Send + Sync + 'static) -> Result<Loaded, Error> {
        let entry = self.lock().entries.first().cloned();
        let entry = entry.ok_or_else(|| refused(Path::new("no model"), "the catalogue is not open"))?;
        self.load(entry, observe).await
    }

    async fn load(&self, entry: Entry, observe: impl Fn(&str, Step) + Send + Sync + 'static) -> Result<Loaded, Error> {
        self.set_state(&entry.name, ModelState::Loading(0.0));
        let loaded = self.start(&entry, observe).await;
        let state = match &loaded {
            Ok(loaded) => ModelState::Ready(loaded.clone()),
            Err(error) => ModelState::Failed(error.to_string()),
        };
        self.set_state(&entry.name, state);
        loaded
    }

    async fn start(
        &self,
        entry: &Entry,
        observe: impl Fn(&str, Step) + Send + Sync + 'static,
    ) -> Result<Loaded, Error> {
        let Some(recorder) = self.0.recorder.get() else {
            return Err(refused(&entry.path, "the catalogue is not open"));
        };
        let config = &self.0.config.engine;
        let observe = Arc::new(observe);
        let model = {
            let (path, name, options) = (entry.path.clone(), entry.name.clone(), model_options(config, &entry.name));
            let (catalogue, observe) = (self.clone(), Arc::clone(&observe));
            let read = move || {
                Model::load(&path, &options, move |done| {
                    observe(&name, Step::Weights(done));
                    catalogue.set_state(&name, ModelState::Loading(done));
                    true
                })
            };
            tokio::task::spawn_blocking(read).await.map_err(|_| refused(&entry.path, "the loader panicked"))??
        };
        observe(&entry.name, Step::Context);
        let options = engine_options(config, &model, self.0.clock);
        let engine = Engine::start(Arc::new(model), options, recorder.clone()).await?;
        Ok(Loaded::new(engine, entry.aliases.clone()))
    }
}

fn model_options(config: &EngineConfig, name: &str) -> ModelOptions {
    ModelOptions { name: Some(name.to_owned()), gpu_layers: config.gpu_layers }
}

fn engine_options(config: &EngineConfig, model: &Model, clock: Clock) -> Options {
    Options {
        ctx_size: config.slot_context(model.card().context_train),
        parallel: config.parallel,
        threads: config.threads,
        batch_size: config.batch_size,
        ubatch_size: config.ubatch_size,
        attention: config.attention,
        attention_coder: |values, layers, heads, row_len| attention::encode(values, layers, heads, row_len).ok(),
        clock,
    }
}

async fn default_path(config: &Config) -> Result<PathBuf, Error> {
    if let Some(path) = &config.engine.model {
        return Ok(path.clone());
    }
    let cache = config.data.dir.join("cache");
    let shown = cache.display().to_string();
    let unpacked = tokio::task::spawn_blocking(move || bundled_model(&cache)).await;
    let unpacked = unpacked.map_err(|_| refused(Path::new(&shown), "the bundled model could not be unpacked"))?;
    unpacked.map_err(|source| Error::Unpack { folder: shown, source })
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned())
}

fn refused(path: &Path, reason: &str) -> Error {
    Error::Load { path: path.display().to_string(), reason: reason.into() }
}
