//! Bringing up the parts: database, model, engine, mods.

use super::progress::Progress;
use crate::config::{Config, DataConfig, EngineConfig, bundled_model};
use crate::engine::{Engine, Options};
use crate::events::Signal;
use crate::model::Model;
use crate::mods::Registry;
use crate::store::{Database, Store};
use crate::trace::attention;
use anyhow::Context;
use chrono::Utc;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Opens the database of that configuration.
pub async fn open_store(config: &DataConfig, progress: &Progress) -> anyhow::Result<Store> {
    progress.begin("opening the database");
    let database = match &config.database_url {
        Some(url) => Database::Url { url: url.clone(), data_dir: config.dir.clone() },
        None => Database::Embedded { data_dir: config.dir.clone() },
    };
    Ok(Store::open(database, |doing| progress.begin(doing)).await?)
}

/// Loads the model and starts the engine; its signals go to `recorder`.
pub async fn start_engine(
    config: &Config,
    recorder: mpsc::Sender<Signal>,
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

/// Registers the mods of the configured folder.
pub async fn register_mods(_registry: &Registry, _config: &Config, _progress: &Progress) -> anyhow::Result<()> {
    Ok(())
}

/// Registers the mod of a file and returns its name.
pub async fn register_file(_registry: &Registry, _file: &Path, _config: &Config) -> anyhow::Result<String> {
    anyhow::bail!("pending")
}
