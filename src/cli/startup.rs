//! Start of database, models and mods.

use super::progress::Progress;
use super::{mod_source, output};
use crate::config::{Config, ConfigError, DataConfig, EngineConfig, ModSandbox, ModsConfig, ServerConfig};
use crate::model::Model;
use crate::model::llama::{Device, Placement, backend, devices, missing_gpu_reason};
use crate::mods::python::sandbox::{self, SandboxPolicy};
use crate::mods::python::{LoadError, PythonMods, WorkerLimits};
use crate::mods::{ModFolder, ModRegistry};
use crate::recording::RecorderHandle;
use crate::server::{App, LoadStep};
use crate::store::{Database, RecorderChannel, Retention, Store};
use futures::future::{Either, select};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::task::spawn_blocking;

/// Opens the configured database for a command without an engine, which removes no runs by their age.
pub async fn open_database(config: &DataConfig) -> anyhow::Result<Store> {
    let progress = Progress::new(None);
    let opened = open_without_retention(config, RecorderChannel::new(), &progress).await;
    progress.end();
    opened
}

/// Opens the configured database like [`open_database`], for a command that only reads it: does not create one.
pub async fn open_existing_database(config: &DataConfig) -> anyhow::Result<Store> {
    database(config).check_exists()?;
    open_database(config).await
}

/// Returns the location of the configured database.
pub fn database(config: &DataConfig) -> Database {
    let data_dir = config.dir.clone();
    match &config.database_url {
        Some(url) => Database::Url { url: url.clone(), direct_url: config.database_direct_url.clone(), data_dir },
        None => Database::Embedded { data_dir },
    }
}

/// Opens the configured database, and removes the runs beyond the retention from now on. Its recorder stores the signals of
/// `channel`.
pub async fn open_store(
    config: &DataConfig,
    channel: RecorderChannel,
    progress: &Arc<Progress>,
) -> anyhow::Result<Store> {
    let store = open_without_retention(config, channel, progress).await?;
    store.set_retention(Retention { days: config.keep_days, bytes: config.keep_bytes });
    Ok(store)
}

async fn open_without_retention(
    config: &DataConfig,
    channel: RecorderChannel,
    progress: &Arc<Progress>,
) -> anyhow::Result<Store> {
    let progress = progress.task();
    progress.begin("opening the database");
    Ok(Store::open_with(database(config), channel, |step| progress.begin(step)).await?)
}

/// Opens the database and loads the model at the same time. An error of the database ends the load at once, and is
/// returned before one of the model: opening the database is never interrupted between two migrations.
pub async fn open_and_load<T>(
    open: impl Future<Output = anyhow::Result<T>>,
    load: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<T> {
    let (open, load) = (std::pin::pin!(open), std::pin::pin!(load));
    match select(open, load).await {
        Either::Left((opened, load)) => {
            let opened = opened?;
            load.await?;
            Ok(opened)
        }
        Either::Right((loaded, open)) => {
            let opened = open.await?;
            loaded?;
            Ok(opened)
        }
    }
}

/// Checks the default fields of requests that the flags set, and logs the ignored values. With a model, tokens and grammars
/// are checked, too.
pub async fn check_request_defaults(config: &ServerConfig, model: Option<Arc<Model>>) -> anyhow::Result<()> {
    let defaults = config.request_defaults.clone();
    let check = move || crate::api::check_request_defaults(&defaults, model.as_deref());
    let error = match spawn_blocking(check).await? {
        Ok(notes) => {
            notes.iter().for_each(|note| tracing::warn!("{note}"));
            return Ok(());
        }
        Err(error) => error,
    };
    let problem = error.problem();
    let flags = &config.request_default_flags;
    // The fields below `response_format` have no flag of their own.
    let flag = problem.pointer.map_or("a flag", |field| flags.get(&field).copied().unwrap_or("--parameter"));
    Err(ConfigError::RequestDefault { flag, reason: problem.detail }.into())
}

/// Loads the default model, a downloaded file or else the configured one, and starts its engine. The signals of every engine
/// go to `recorder`.
pub async fn load_default(
    app: &App,
    downloaded: Option<PathBuf>,
    recorder: impl Into<RecorderHandle>,
    progress: &Arc<Progress>,
) -> anyhow::Result<()> {
    if let Some(warning) = gpu_flag_warning(&app.config().engine) {
        tracing::warn!("{warning}");
    }
    app.models().open(downloaded, recorder.into()).await?;
    let shown = progress.task();
    let observe = move |name: &str, step: LoadStep| match step {
        LoadStep::Weights(done) => shown.advance(&format!("loading the model {name}"), done),
        LoadStep::Context => shown.begin("allocating the context"),
    };
    app.models().load_default(observe).await?;
    let model = app.models().default_model().map(|loaded| Arc::clone(loaded.model()));
    check_request_defaults(&app.config().server, model).await
}

/// Describes the devices of a model's layers and threads in one line.
pub fn devices_line(config: &EngineConfig, placement: &Placement) -> String {
    let (gpus, others): (Vec<Device>, Vec<Device>) = devices().into_iter().partition(|device| device.gpu);
    let (used, unused): (Vec<&Device>, Vec<&Device>) =
        gpus.iter().partition(|gpu| placement.devices.contains(&gpu.name));
    let listed =
        |devices: &[&Device]| devices.iter().map(|device| describe_device(device)).collect::<Vec<_>>().join(" and ");
    let layers = match placement.gpu_layers {
        0 => "with none of the layers".to_owned(),
        all if all == placement.layers => format!("with all {all} layers"),
        some => format!("with {some} of {} layers", placement.layers),
    };
    let others = listed(&others.iter().collect::<Vec<_>>());
    let threads = match (config.threads, config.threads_batch) {
        (1, 1) => "1 thread".to_owned(),
        (one, other) if one == other => format!("{one} threads"),
        (one, other) => format!("{one} threads, {other} for prompts"),
    };
    let on = if used.is_empty() { others } else { format!("{}, {layers}, and {others}", listed(&used)) };
    let idle = if unused.is_empty() { String::new() } else { format!("; not on {}", listed(&unused)) };
    format!("computing on {on}; {threads}{idle}")
}

/// Describes a device and its memory.
pub fn describe_device(device: &Device) -> String {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let name = device.gpu.then(|| device.name.clone());
    let total = Some(device.memory_bytes).filter(|&bytes| bytes > 0);
    let memory = total.map(|total| format!("{:.1} of {:.1} GiB free", gib(device.free_bytes), gib(total)));
    let details: Vec<String> = name.into_iter().chain(memory).collect();
    if details.is_empty() {
        device.description.clone()
    } else {
        format!("{} ({})", device.description, details.join(", "))
    }
}

/// Returns a warning about GPU flags that have no effect, because no GPU is used.
pub fn gpu_flag_warning(config: &EngineConfig) -> Option<String> {
    let reason = match &config.gpu.devices {
        Some(named) if named.is_empty() => "--device none",
        _ if devices().iter().any(|device| device.gpu) => return None,
        _ => missing_gpu_reason(),
    };
    let flags = config.gpu.gpu_flags();
    let (last, before) = flags.split_last()?;
    Some(match before {
        [] => format!("{last} has no effect: {reason}"),
        _ => format!("{} and {last} have no effect: {reason}", before.join(", ")),
    })
}

/// Prints the GPUs with their names for `--device`.
pub fn list_devices() -> anyhow::Result<()> {
    // Messages of llama.cpp go to the log.
    backend()?;
    output::print_line("Available devices:")?;
    let gpus: Vec<Device> = devices().into_iter().filter(|device| device.gpu).collect();
    for Device { name, description, memory_bytes, free_bytes, .. } in &gpus {
        let (total, free) = (memory_bytes >> 20, free_bytes >> 20);
        output::print_line(format_args!("  {name}: {description} ({total} MiB, {free} MiB free)"))?;
    }
    if gpus.is_empty() {
        output::print_line("  (none)")?;
        eprintln!("thunder: {}", missing_gpu_reason());
    }
    Ok(())
}

/// Returns the configuration of Python mods.
pub fn python_mods(config: &ModsConfig) -> PythonMods {
    let defaults = PythonMods::default();
    PythonMods {
        limits: WorkerLimits {
            call: config.timeout,
            idle: config.idle,
            workers: config.workers,
            address_space_bytes: config.memory_bytes,
            ..defaults.limits
        },
        policy: match config.sandbox {
            ModSandbox::Uploaded => SandboxPolicy::Uploaded,
            ModSandbox::All => SandboxPolicy::All,
            ModSandbox::Off => SandboxPolicy::Off,
        },
        launcher: std::env::current_exe().ok().map(|program| sandbox::install(program).clone()),
        ..defaults
    }
}

/// Detects the sandbox of this system for mods and logs it.
pub async fn log_sandbox(config: &ModsConfig) {
    let mods = python_mods(config);
    let Some(launcher) = mods.launcher.clone() else {
        return tracing::warn!("no sandbox for mods: the path of this program is unknown");
    };
    let support =
        tokio::task::spawn_blocking(move || launcher.support().map(str::to_owned).map_err(str::to_owned)).await;
    match (mods.policy, support) {
        (SandboxPolicy::Off, _) => {
            tracing::warn!("--mod-sandbox off: mods that clients upload run with the rights of the server");
        }
        (_, Ok(Ok(found))) => tracing::info!("mods that clients upload run in a sandbox: {found}"),
        (_, Ok(Err(reason))) => {
            tracing::warn!("no sandbox for mods, so mods that need one are rejected: {reason}");
        }
        (_, Err(error)) => tracing::error!(%error, "cannot test the sandbox"),
    }
}

/// Registers the mods of the configured folder and returns the folder. A mod that cannot be loaded is logged and does not
/// affect the others.
pub async fn register_mods(
    registry: &Arc<ModRegistry>,
    config: &Config,
    progress: &Arc<Progress>,
) -> anyhow::Result<Option<ModFolder>> {
    registry.set_python(python_mods(&config.engine.mods));
    let Some(dir) = config.engine.mods.dir.clone() else { return Ok(None) };
    let progress = progress.task();
    progress.begin("loading mods");
    let mut folder = ModFolder::new(dir, registry.python());
    let registry = Arc::clone(registry);
    let sync = move || folder.sync(&registry).map(|()| folder);
    Ok(Some(tokio::task::spawn_blocking(sync).await??))
}

/// Registers the mods of a file or of a package. Returns their names in the order of the source.
pub async fn register_file(registry: &ModRegistry, config: &ModsConfig, file: &Path) -> anyhow::Result<Vec<String>> {
    registry.set_python(python_mods(config));
    let found = mod_source::load(file, None, registry.python()).await?;
    let found = found.map_err(|error| anyhow::anyhow!(describe_error(&error)))?;
    Ok(found
        .into_iter()
        .map(|factory| {
            let name = factory.describe().name;
            registry.insert(factory);
            name
        })
        .collect())
}

/// Returns the error with Python's traceback, if there is one.
pub fn describe_error(error: &LoadError) -> String {
    match error.traceback() {
        Some(traceback) => format!("{error}\n{}", traceback.trim_end()),
        None => error.to_string(),
    }
}
