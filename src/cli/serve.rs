use super::hub;
use super::logging;
use super::progress::Progress;
use super::signals::{self, EndSignals};
use super::startup;
use crate::api::{router, sleep_when_idle};
use crate::config::flags::{DataFlags, EngineFlags, LogFlags, ServerFlags};
use crate::config::hub::HubFlags;
use crate::config::{Config, Credentials};
use crate::events::system;
use crate::mods::{FolderWatch, ModRegistry};
use crate::server::mods::{ModSync, store_used_versions};
use crate::server::{App, Listeners, ServerState, announce, load_login_secret};
use crate::store::RecorderChannel;
use crate::ui;
use sd_notify::NotifyState;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;

/// Serve the dashboard and all APIs; default: the bundled model on 127.0.0.1:6767
#[derive(Debug, clap::Args)]
#[command(
    after_help = "These flags of llama-server work, too: its sampling flags (--xtc-probability, --dry-multiplier, \
                        --mirostat, --samplers, --logit-bias, --reverse-prompt, …), --embd-normalize, --spm-infill, \
                        --log-colors and --verbosity. Its other flags are accepted without effect, which the log mentions where \
                        it matters, or rejected with an alternative. Its variables LLAMA_ARG_… apply where the corresponding \
                        variable THUNDER_… is not set."
)]
pub struct Args {
    #[command(flatten)]
    engine: EngineFlags,
    /// List of the GPUs that --device accepts, without starting the server
    #[arg(long, help_heading = "GPUs")]
    list_devices: bool,
    #[command(flatten)]
    data: DataFlags,
    #[command(flatten)]
    server: ServerFlags,
}

impl Args {
    /// Returns the log settings of llama-server's flags.
    pub fn log(&self) -> &LogFlags {
        &self.server.log
    }
}

/// Serves until a signal stops it. Connections are accepted immediately and receive 503 until everything is loaded.
pub async fn serve(args: Args, mut signals: EndSignals) -> anyhow::Result<ExitCode> {
    if args.list_devices {
        startup::list_devices()?;
        return Ok(ExitCode::SUCCESS);
    }
    for note in args.engine.ineffective_flag_notes() {
        tracing::warn!("{note}");
    }
    let mut reload_signal = signals.take_reload_signal();
    let hub_flags = args.engine.hub.clone();
    hub::check(&hub_flags)?;
    let config = Arc::new(Config::new(args.engine, args.data, &args.server)?);
    startup::check_request_defaults(&config.server, None).await?;
    let listeners = Listeners::bind(&config.server.listen).await?;
    let addresses = listeners.addresses();
    let scheme = if config.server.credentials.tls.is_some() { "https" } else { "http" };
    for address in &addresses {
        logging::report(format_args!("listening on {scheme}://{address}{}", config.server.prefix));
    }
    let app = App::new(Arc::clone(&config), Arc::new(ModRegistry::with_builtin()), system::now);
    let server = tokio::spawn(listeners.serve(app.clone(), router(&app, &ui::pages())));
    let progress = Progress::new(Some(app.clone()));
    let started = {
        let mut start = pin!(signals.run_until_signal(Box::pin(start(&app, &hub_flags, &progress))));
        loop {
            tokio::select! {
                started = &mut start => break started,
                () = signals::next(reload_signal.as_mut()) => reload(&app, &args.server),
            }
        }
    };
    progress.end();
    if let Ok(Ok(_)) = &started {
        app.set_state(ServerState::Ready);
        let server = &app.config().server;
        if server.cluster.no_model {
            logging::report("no model is loaded (--no-model)");
        } else {
            let loaded = app.get_or_load(None).await;
            let placement = loaded.map(|loaded| loaded.model().placement().clone()).unwrap_or_default();
            logging::report(startup::devices_line(&app.config().engine, &placement));
        }
        announce(&app, server.cluster.url(&addresses, scheme, &server.prefix));
        for address in addresses {
            logging::report(format_args!("ready, dashboard and APIs are on {scheme}://{address}{}", server.prefix));
        }
        notify_systemd(&[NotifyState::Ready]);
        loop {
            tokio::select! {
                _ = signals.next() => break,
                () = signals::next(reload_signal.as_mut()) => reload(&app, &args.server),
            }
        }
    }
    notify_systemd(&[NotifyState::Stopping]);
    if !matches!(started, Ok(Err(_))) {
        logging::report("stopping; a second signal stops immediately");
    }
    app.set_state(ServerState::Stopping);
    let stopped = signals.run_until_signal(async {
        if let Err(error) = server.await {
            tracing::error!(%error, "the server ended with an error");
        }
        close(&app).await;
    });
    Box::pin(stopped).await?;
    let _watched = started??;
    Ok(ExitCode::SUCCESS)
}

/// Opens the log file again, and reloads API keys and certificate. Active requests and streams continue.
fn reload(app: &App, flags: &ServerFlags) {
    logging::reopen_file();
    // Host names are not resolved again: a slow name server would block, and the listeners keep their addresses.
    let config = &app.config().server;
    match Credentials::read(flags, &config.listen, &config.cluster) {
        // Without a key, every client would have all rights.
        Ok(credentials) if credentials.security.keys.is_empty() && !app.credentials().security.keys.is_empty() => {
            tracing::error!(
                "cannot reload API keys and certificate: the new configuration contains no API key; the previous ones stay \
                 valid; add a key, or restart the server to serve everyone"
            );
        }
        Ok(credentials) => {
            let keys = credentials.security.keys.len();
            app.set_credentials(credentials);
            tracing::info!(keys, "API keys and certificate reloaded");
        }
        Err(error) => tracing::error!(%error, "cannot reload API keys and certificate; the previous ones stay valid"),
    }
}

/// Reports the state to systemd, if it started the program as a service of type notify.
fn notify_systemd(state: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "cannot report the state to systemd");
    }
}

/// Starts store, mods and model at the same time, and downloads the model that the flags name. The mods directory is watched
/// until the returned value is dropped.
async fn start(app: &App, hub_flags: &HubFlags, progress: &Arc<Progress>) -> anyhow::Result<Option<FolderWatch>> {
    let no_model = app.config().server.cluster.no_model;
    if !no_model {
        match std::env::current_exe() {
            Ok(program) => app.models().set_probe_program(program),
            Err(error) => tracing::warn!(%error, "cannot probe model files in a separate process"),
        }
    }
    let channel = RecorderChannel::new();
    let recorder = channel.recorder();
    let load = async {
        if no_model {
            return Ok(());
        }
        let downloaded = hub::model_file(hub_flags, progress).await?;
        Box::pin(startup::load_default(app, downloaded, recorder, progress)).await
    };
    let watch = Box::pin(startup::open_and_load(start_store(app, channel, progress), load)).await?;
    if !no_model {
        sleep_when_idle(app);
    }
    Ok(watch)
}

/// Opens the store, and registers the mods of the configured folder and of the store.
async fn start_store(
    app: &App,
    channel: RecorderChannel,
    progress: &Arc<Progress>,
) -> anyhow::Result<Option<FolderWatch>> {
    let config = app.config();
    let store = async {
        let store = startup::open_store(&config.data, channel, progress).await?;
        store.start_recorder();
        // At once, so that the store is closed if the start fails or is cancelled.
        app.set_database(store.clone());
        anyhow::Ok(store)
    };
    let folder = startup::register_mods(app.registry(), config, progress);
    let (store, folder, ()) = tokio::join!(store, folder, startup::log_sandbox(&config.engine.mods));
    let (store, folder) = (store?, folder?);
    load_login_secret(&store).await?;
    tokio::spawn(ModSync::load(app).await?.run(app.clone()));
    store_used_versions(app);
    Ok(folder.and_then(|folder| match folder.watch(Arc::clone(app.registry())) {
        Ok(watch) => Some(watch),
        Err(error) => {
            tracing::warn!(%error, "cannot watch the mods directory; changes apply at the next start");
            None
        }
    }))
}

/// Stops the runs, then the recorder, then the database, since each depends on the next one.
async fn close(app: &App) {
    app.models().stop().await;
    if let Ok(store) = app.store() {
        store.clone().close().await;
    }
}
