//! Bringing up the parts: database, model, engine, mods.

use super::progress::Progress;
use crate::config::{Config, DataConfig, EngineConfig, bundled_model};
use crate::engine::{Engine, Options};
use crate::events::Recorder;
use crate::model::Model;
use crate::mods::Registry;
use crate::mods::python::{LoadError, PythonMods};
use crate::store::{Database, Retention, Store};
use crate::trace::attention;
use anyhow::Context;
use chrono::Utc;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens the database of that configuration.
pub async fn open_store(config: &DataConfig, progress: &Progress) -> anyhow::Result<Store> {
    progress.begin("opening the database");
    let database = match &config.database_url {
        Some(url) => Database::Url { url: url.clone(), data_dir: config.dir.clone() },
        None => Database::Embedded { data_dir: config.dir.clone() },
    };
    let store = Store::open(database, |doing| progress.begin(doing)).await?;
    store.retain(Retention { days: config.keep_days, bytes: config.keep_bytes });
    Ok(store)
}

/// Loads the model and starts the engine; its signals go to `recorder`.
pub async fn start_engine(
    config: &Config,
    recorder: impl Into<Recorder>,
    progress: &Arc<Progress>,
) -> anyhow::Result<Engine> {
    let path = model_path(&config.engine, &config.data)?;
    let gpu_layers = config.engine.gpu_layers;
    let doing = format!("loading the model {}", path.file_stem().unwrap_or_default().display());
    progress.begin(&doing);
    let advancing = Arc::clone(progress);
    let model = tokio::task::spawn_blocking(move || {
        Model::load(&path, gpu_layers, move |done| advancing.advance(&doing, done))
    })
    .await
    .context("the model's loader panicked")??;
    progress.begin("making room for the context");
    let engine = &config.engine;
    let options = Options {
        ctx_size: engine.slot_context(model.card().context_train),
        parallel: engine.parallel,
        threads: engine.threads,
        batch_size: engine.batch_size,
        ubatch_size: engine.ubatch_size,
        attention: engine.attention,
        attention_coder: |values, layers, heads, row_len| attention::encode(values, layers, heads, row_len).ok(),
        clock: Utc::now,
    };
    Ok(Engine::start(Arc::new(model), options, recorder).await?)
}

fn model_path(engine: &EngineConfig, data: &DataConfig) -> anyhow::Result<PathBuf> {
    match &engine.model {
        Some(path) => Ok(path.clone()),
        None => bundled_model(&data.dir.join("cache"))
            .with_context(|| format!("cannot unpack the bundled model into {}", data.dir.join("cache").display())),
    }
}

/// Registers the mods of the configured folder. One that cannot be loaded is told, and keeps nothing else away.
pub async fn register_mods(registry: &Registry, config: &Config, progress: &Progress) -> anyhow::Result<()> {
    let Some(dir) = config.engine.mods_dir.clone() else { return Ok(()) };
    progress.begin("loading mods");
    let found = tokio::task::spawn_blocking(move || PythonMods::load_dir(dir)).await??;
    for error in found.failed {
        tracing::error!("{}", described(&error));
    }
    for factory in found.mods {
        registry.insert(factory);
    }
    Ok(())
}

/// Registers the mods of a file and returns their names, in the order of the file.
pub async fn register_file(registry: &Registry, file: &Path) -> anyhow::Result<Vec<String>> {
    let path = file.to_owned();
    let found = tokio::task::spawn_blocking(move || PythonMods::from_file(path)).await?;
    let found = found.map_err(|error| anyhow::anyhow!(described(&error)))?;
    Ok(found
        .into_iter()
        .map(|factory| {
            let name = factory.describe().name;
            registry.insert(factory);
            name
        })
        .collect())
}

fn described(error: &LoadError) -> String {
    match error.traceback() {
        Some(traceback) => format!("{error}\n{}", traceback.trim_end()),
        None => error.to_string(),
    }
}
