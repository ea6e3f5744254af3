//! Bringing up the parts: database, models, mods.

use super::progress::Progress;
use crate::api::{App, Step};
use crate::config::{Config, DataConfig};
use crate::events::Recorder;
use crate::mods::Registry;
use crate::mods::python::{LoadError, PythonMods};
use crate::store::{Database, Retention, Store};
use std::path::Path;
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

/// Loads the default model and starts its engine; the signals of every engine go to `recorder`.
pub async fn load_default(app: &App, recorder: impl Into<Recorder>, progress: &Arc<Progress>) -> anyhow::Result<()> {
    app.models().open(recorder.into()).await?;
    let shown = Arc::clone(progress);
    let observe = move |name: &str, step: Step| match step {
        Step::Weights(done) => shown.advance(&format!("loading the model {name}"), done),
        Step::Context => shown.begin("making room for the context"),
    };
    app.models().load_default(observe).await?;
    Ok(())
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
