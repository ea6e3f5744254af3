use super::rates::Rates;
use super::socket::Sockets;
use super::stream::Streams;
use super::{ApiError, Catalogue, Loaded};
use crate::config::Config;
use crate::engine::Engine;
use crate::mods::ModRegistry;
use crate::store::{Live, RunSummary, Store};
use chrono::{DateTime, Utc};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::time::timeout;

/// What every handler can reach; cheap to clone.
///
/// Serving begins before the models and the database are there. A handler asks with [`App::store`] and
/// [`App::loaded`], and passes the 503 on while they are not.
#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Inner {
    database: OnceLock<(Store, Live)>,
    models: Catalogue,
    state: watch::Sender<State>,
    sockets: Sockets,
    streams: Streams,
    rates: Rates,
    registry: Arc<ModRegistry>,
    mods_changing: Mutex<()>,
    config: Arc<Config>,
    clock: fn() -> DateTime<Utc>,
    started_at: DateTime<Utc>,
}

/// How far the server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Not ready yet; what it is doing, e.g. "loading the model, 40 %".
    Loading(String),
    /// The default model and the database are there.
    Ready,
    /// It takes no more runs; those that are going on have a little time to end.
    Stopping,
    /// Whatever still goes on is cut off.
    Stopped,
}

impl App {
    /// A server that has loaded nothing yet. `clock` tells the time.
    #[must_use]
    pub fn new(config: Arc<Config>, registry: Arc<ModRegistry>, clock: fn() -> DateTime<Utc>) -> Self {
        Self(Arc::new(Inner {
            database: OnceLock::new(),
            models: Catalogue::new(Arc::clone(&config), clock),
            state: watch::Sender::new(State::Loading("starting".into())),
            sockets: Sockets::new(config.server.sockets.max_message_bytes),
            streams: Streams::default(),
            rates: Rates::new(config.server.rates),
            registry,
            mods_changing: Mutex::default(),
            config,
            clock,
            started_at: clock(),
        }))
    }

    /// The database.
    ///
    /// # Errors
    /// 503 while it is being started.
    pub fn store(&self) -> Result<&Store, ApiError> {
        self.0.database.get().map(|(store, _)| store).ok_or_else(|| self.not_ready())
    }

    /// Returns the run with that `run_id`, else with that `request_id`. Waits for the rows of a run that is being recorded.
    ///
    /// # Errors
    /// 404 when there is no such run; 503 while the database is away or has not got its rows.
    pub async fn find_run(&self, id: &str) -> Result<RunSummary, ApiError> {
        self.store()?.find_recorded(id).await?.ok_or_else(|| ApiError::not_found("run", id))
    }

    /// Runs that are going on.
    ///
    /// # Errors
    /// 503 while the database is being started.
    pub fn live(&self) -> Result<&Live, ApiError> {
        self.0.database.get().map(|(_, live)| live).ok_or_else(|| self.not_ready())
    }

    /// The model that a request names in its `model` field, with or without mods behind the name; without a name the
    /// default. Waits while that model is being loaded at run time.
    ///
    /// # Errors
    /// 404 when there is no such model; 400 when it is not loaded; 503 when it could not be loaded, and while the server
    /// starts or stops.
    pub async fn loaded(&self, name: Option<&str>) -> Result<Loaded, ApiError> {
        self.ready()?;
        self.has_models().await?;
        self.0.models.loaded(name).await
    }

    /// The model that a request names as for [`App::loaded`], if it is loaded: for requests that only look, which load and
    /// unload nothing. One that sleeps is woken.
    ///
    /// # Errors
    /// The errors of [`App::loaded`].
    pub async fn loaded_now(&self, name: Option<&str>) -> Result<Loaded, ApiError> {
        self.ready()?;
        self.has_models().await?;
        let entry = self.0.models.meant(name)?;
        if entry.is_asleep() {
            return self.0.models.loaded(name).await;
        }
        entry.ready().cloned().ok_or_else(|| entry.not_loaded())
    }

    /// Returns normally unless the server was started without models.
    async fn has_models(&self) -> Result<(), ApiError> {
        const LOOKUP_TIMEOUT: Duration = Duration::from_millis(500);
        if !self.config().server.cluster.no_model {
            return Ok(());
        }
        let servers = timeout(LOOKUP_TIMEOUT, self.store()?.other_servers()).await;
        let servers = servers.ok().and_then(Result::ok).unwrap_or_default();
        let with_model = servers.iter().filter(|server| !server.models.is_empty());
        let places: Vec<String> = with_model
            .filter_map(|server| Some(format!("{} has {}", server.url.as_ref()?, server.models.join(", "))))
            .collect();
        let places =
            if places.is_empty() { "no server with a model is announced".to_owned() } else { places.join("; ") };
        let detail = format!("this server was started with --no-model and generates nothing; {places}");
        Err(ApiError::unavailable(detail).code("no_model"))
    }

    /// Nothing, once the server has started and until it stops.
    ///
    /// # Errors
    /// 503 otherwise, with the reason.
    pub fn ready(&self) -> Result<(), ApiError> {
        if self.state() == State::Ready { Ok(()) } else { Err(self.not_ready()) }
    }

    /// The default model, when it is ready.
    ///
    /// # Errors
    /// 503 while it is not, and when the server stops.
    pub fn default_model(&self) -> Result<Loaded, ApiError> {
        if matches!(self.state(), State::Stopping | State::Stopped) {
            return Err(self.not_ready());
        }
        self.0.models.default_model().ok_or_else(|| self.not_ready())
    }

    /// The default model's engine.
    ///
    /// # Errors
    /// As [`App::default_model`].
    pub fn engine(&self) -> Result<Engine, ApiError> {
        Ok(self.default_model()?.engine().clone())
    }

    /// Nothing, until the server stops: a WebSocket may also be opened while it starts, to wait for it.
    pub(in crate::api) fn open_for_sockets(&self) -> Result<(), ApiError> {
        if matches!(self.state(), State::Stopping | State::Stopped) { Err(self.not_ready()) } else { Ok(()) }
    }

    /// Returns when the server has started, and when it stops before.
    pub(in crate::api) async fn started(&self) {
        self.wait(|state| !matches!(state, State::Loading(_))).await;
    }

    /// The runs of the streaming protocol.
    pub(in crate::api) fn streams(&self) -> &Streams {
        &self.0.streams
    }

    /// How many runs were begun lately.
    pub(in crate::api) fn rates(&self) -> &Rates {
        &self.0.rates
    }

    /// The WebSocket connections that are open.
    pub(in crate::api) fn sockets(&self) -> &Sockets {
        &self.0.sockets
    }

    /// Every model, loaded or not.
    #[must_use]
    pub fn models(&self) -> &Catalogue {
        &self.0.models
    }

    /// The mods that runs can name.
    #[must_use]
    pub fn registry(&self) -> &Arc<ModRegistry> {
        &self.0.registry
    }

    /// The right to change which mods are uploaded, in the database and in the registry as one.
    pub(in crate::api) async fn mods_changing(&self) -> MutexGuard<'_, ()> {
        self.0.mods_changing.lock().await
    }

    /// How the server was started.
    #[must_use]
    pub fn config(&self) -> &Arc<Config> {
        &self.0.config
    }

    /// The time, from the clock the app was made with.
    #[must_use]
    pub fn now(&self) -> DateTime<Utc> {
        (self.0.clock)()
    }

    /// When the server was started.
    #[must_use]
    pub fn started_at(&self) -> DateTime<Utc> {
        self.0.started_at
    }

    /// How far the server is.
    #[must_use]
    pub fn state(&self) -> State {
        self.0.state.borrow().clone()
    }

    /// Says how far the server is. There is no way back from stopping.
    pub fn set_state(&self, state: State) {
        self.0.state.send_if_modified(|now| {
            let backwards = matches!(now, State::Stopping | State::Stopped) && state != State::Stopped;
            let changes = !backwards && *now != state;
            if changes {
                *now = state;
            }
            changes
        });
    }

    /// Returns when the server begins to stop. Streams that never end by themselves end then.
    pub async fn stopping(&self) {
        self.wait(|state| matches!(state, State::Stopping | State::Stopped)).await;
    }

    /// Returns when the time to end is over. Runs end then.
    pub async fn stopped(&self) {
        self.wait(|state| *state == State::Stopped).await;
    }

    async fn wait(&self, reached: impl FnMut(&State) -> bool) {
        // The sender lives as long as this app, so waiting cannot fail.
        let _ = self.0.state.subscribe().wait_for(reached).await;
    }

    /// Fills the database's slot; a second call changes nothing.
    pub fn set_database(&self, store: Store, live: Live) {
        // Only start-up calls this, once; a second database would be ignored, which is what the documentation says.
        let _ = self.0.database.set((store, live));
    }

    fn not_ready(&self) -> ApiError {
        match self.state() {
            State::Loading(doing) => ApiError::unavailable(format!("the server is not ready yet: {doing}")),
            State::Ready => ApiError::unavailable("the default model is not loaded"),
            State::Stopping | State::Stopped => ApiError::unavailable("the server is stopping"),
        }
        .retry_after(1)
    }
}
