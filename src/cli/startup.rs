//! Bringing up the parts: database, models, mods.

use super::progress::Progress;
use crate::api::{App, Step};
use crate::config::flags::GpuLayers;
use crate::config::{Config, DataConfig, EngineConfig, ModSandbox, ModsConfig};
use crate::events::Recorder;
use crate::model::llama::{Device, devices};
use crate::mods::python::sandbox::{self, Policy};
use crate::mods::python::{Limits, LoadError, PythonMods, read_source};
use crate::mods::{Folder, Registry, SourceText};
use crate::store::{Database, Retention, Store};
use anyhow::Context;
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
    if let Some(wrong) = no_gpu(&app.config().engine) {
        tracing::warn!("{wrong}");
    }
    app.models().open(recorder.into()).await?;
    let shown = Arc::clone(progress);
    let observe = move |name: &str, step: Step| match step {
        Step::Weights(done) => shown.advance(&format!("loading the model {name}"), done),
        Step::Context => shown.begin("making room for the context"),
    };
    app.models().load_default(observe).await?;
    Ok(())
}

/// What runs are computed on, as a line.
pub fn devices_line(config: &EngineConfig) -> String {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let named = |device: &Device| match device.memory_bytes {
        0 => device.description.clone(),
        total => format!("{} ({:.1} of {:.1} GiB free)", device.description, gib(device.free_bytes), gib(total)),
    };
    let (gpus, others): (Vec<Device>, Vec<Device>) = devices().into_iter().partition(|device| device.gpu);
    let shown: Vec<String> = gpus.iter().chain(&others).map(named).collect();
    let threads = match (config.threads, config.threads_batch) {
        (1, 1) => "1 thread".to_owned(),
        (one, other) if one == other => format!("{one} threads"),
        (one, other) => format!("{one} threads, {other} for prompts"),
    };
    format!("computing on {}; {threads}", shown.join(" and "))
}

/// What is wrong with asking for a GPU, where there is none.
pub fn no_gpu(config: &EngineConfig) -> Option<String> {
    let asked = match config.gpu_layers {
        GpuLayers::Auto | GpuLayers::Count(0) => return None,
        GpuLayers::All => "all".to_owned(),
        GpuLayers::Count(count) => count.to_string(),
    };
    if devices().iter().any(|device| device.gpu) {
        return None;
    }
    let why = if cfg!(any(feature = "cuda", feature = "vulkan", feature = "metal")) {
        "no GPU was found"
    } else {
        "this build has no GPU support; cargo build --release --features cuda (or vulkan, or metal) makes one that has"
    };
    Some(format!("--gpu-layers {asked} has no effect: {why}"))
}

/// How Python mods are run.
pub fn python_mods(config: &ModsConfig) -> PythonMods {
    let defaults = PythonMods::default();
    PythonMods {
        limits: Limits {
            call: config.timeout,
            idle: config.idle,
            workers: config.workers,
            address_space_bytes: config.memory_bytes,
            ..defaults.limits
        },
        policy: match config.sandbox {
            ModSandbox::Uploaded => Policy::Uploaded,
            ModSandbox::All => Policy::All,
            ModSandbox::Off => Policy::Off,
        },
        launcher: std::env::current_exe().ok().map(|program| sandbox::install(program).clone()),
        ..defaults
    }
}

/// Finds out what this system can keep mods in, and says it.
pub async fn tell_sandbox(registry: &Registry) {
    let mods = registry.python();
    let Some(launcher) = mods.launcher.clone() else {
        return tracing::warn!("there is no sandbox for mods: this program does not know where it is");
    };
    let tried = tokio::task::spawn_blocking(move || launcher.support().map(str::to_owned).map_err(str::to_owned)).await;
    match (mods.policy, tried) {
        (Policy::Off, _) => {
            tracing::warn!("--mod-sandbox off: mods that clients upload run with the rights of the server");
        }
        (_, Ok(Ok(found))) => tracing::info!("mods that clients upload run in a sandbox: {found}"),
        (_, Ok(Err(reason))) => {
            tracing::warn!("there is no sandbox for mods, so that those that need one are refused: {reason}");
        }
        (_, Err(error)) => tracing::error!(%error, "trying the sandbox failed"),
    }
}

/// Registers the mods of the configured folder, and returns it for who wants to watch it. One that cannot be loaded is
/// told, and keeps nothing else away.
pub async fn register_mods(
    registry: &Arc<Registry>,
    config: &Config,
    progress: &Progress,
) -> anyhow::Result<Option<Folder>> {
    registry.run_python(python_mods(&config.engine.mods));
    let Some(dir) = config.engine.mods.dir.clone() else { return Ok(None) };
    progress.begin("loading mods");
    let mut folder = Folder::new(dir, registry.python());
    let registry = Arc::clone(registry);
    let look = move || folder.sync(&registry).map(|()| folder);
    Ok(Some(tokio::task::spawn_blocking(look).await??))
}

/// Registers the mods of a file and returns their names, in the order of the file.
pub async fn register_file(registry: &Registry, config: &ModsConfig, file: &Path) -> anyhow::Result<Vec<String>> {
    registry.run_python(python_mods(config));
    let source = SourceText::Text(read_source(file).with_context(|| format!("cannot read {}", file.display()))?);
    let (python, name) = (registry.python(), file.file_name().unwrap_or_default().to_string_lossy().into_owned());
    let found = tokio::task::spawn_blocking(move || source.mods(&name, None, &python)).await?;
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

/// The error with Python's traceback, where there is one.
pub fn described(error: &LoadError) -> String {
    match error.traceback() {
        Some(traceback) => format!("{error}\n{}", traceback.trim_end()),
        None => error.to_string(),
    }
}
