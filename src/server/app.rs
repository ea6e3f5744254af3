use super::experiments::ActiveExperiments;
use super::request_metrics::RequestMetrics;
use super::socket::Sockets;
use super::{ApiError, ErrorCode, LoadedModel, ModelRegistry};
use crate::config::{Config, Credentials};
use crate::engine::Engine;
use crate::events::Scope;
use crate::mods::ModRegistry;
use crate::server::limits::RateLimits;
use crate::store::{LiveHub, RunSummary, Store};
use chrono::{DateTime, Utc};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::time::timeout;

/// State shared by all handlers; cheap to clone.
///
/// The server accepts connections before models and database are ready. Handlers call [`App::store`] and
/// [`App::get_or_load`] and return their 503 until then.
#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Inner {
    database: OnceLock<Store>,
    models: ModelRegistry,
    state: watch::Sender<ServerState>,
    sockets: Sockets,
    rate_limits: RateLimits,
    requests: RequestMetrics,
    experiments: ActiveExperiments,
    registry: Arc<ModRegistry>,
    mod_changes: Mutex<()>,
    config: Arc<Config>,
    credentials: RwLock<Arc<Credentials>>,
    clock: fn() -> DateTime<Utc>,
    started_at: DateTime<Utc>,
}

/// State of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerState {
    /// Not ready yet, with the current activity, e.g. "loading the model demo (40%)".
    Loading(String),
    /// The database is ready, and so is the default model, unless the server runs without models.
    Ready,
    /// No new runs are accepted; active runs have a grace period to end.
    Stopping,
    /// Active runs are ended.
    Stopped,
}

impl App {
    /// Creates the state of a server that has loaded nothing yet. `clock` returns the current time.
    #[must_use]
    pub fn new(config: Arc<Config>, registry: Arc<ModRegistry>, clock: fn() -> DateTime<Utc>) -> Self {
        Self(Arc::new(Inner {
            database: OnceLock::new(),
            models: ModelRegistry::new(Arc::clone(&config), clock),
            state: watch::Sender::new(ServerState::Loading("starting".into())),
            sockets: Sockets::new(config.server.sockets.max_message_bytes),
            rate_limits: RateLimits::new(config.server.rates),
            requests: RequestMetrics::default(),
            experiments: ActiveExperiments::default(),
            registry,
            mod_changes: Mutex::default(),
            credentials: RwLock::new(Arc::new(config.server.credentials.clone())),
            config,
            clock,
            started_at: clock(),
        }))
    }

    /// Returns the database.
    ///
    /// # Errors
    /// 503 while the database is starting.
    pub fn store(&self) -> Result<&Store, ApiError> {
        self.0.database.get().ok_or_else(|| self.not_ready_error())
    }

    /// Returns the run with that `run_id` or, failing that, `request_id`, if the scope covers it. Waits for the rows of
    /// a run that is being recorded.
    ///
    /// # Errors
    /// 404 if no such run exists; 503 while the database is unavailable or lacks the rows.
    pub async fn find_run(&self, scope: &Scope, id: &str) -> Result<RunSummary, ApiError> {
        self.store()?.find_recorded(scope, id).await?.ok_or_else(|| ApiError::not_found("run", id))
    }

    /// Returns the live updates of active runs.
    ///
    /// # Errors
    /// 503 while the database is starting.
    pub fn live(&self) -> Result<&LiveHub, ApiError> {
        Ok(self.store()?.live())
    }

    /// Returns the model named in a request's `model` field; `None` is the default model. Text after the model's name,
    /// such as mods, is ignored. Waits while the model is being loaded at run time.
    ///
    /// # Errors
    /// 404 for an unknown model; 400 if it is not loaded; 429 if it cannot be loaded because `--models-max` models are
    /// in use; 503 if loading failed and while the server starts or stops.
    pub async fn get_or_load(&self, name: Option<&str>) -> Result<LoadedModel, ApiError> {
        self.check_ready()?;
        self.require_models_configured().await?;
        self.0.models.get_or_load(name).await
    }

    /// Returns the model of a read-only request if it is loaded; such requests never load or unload models, but wake a
    /// sleeping one.
    ///
    /// # Errors
    /// Same as [`App::get_or_load`].
    pub async fn get_or_wake(&self, name: Option<&str>) -> Result<LoadedModel, ApiError> {
        self.check_ready()?;
        self.require_models_configured().await?;
        let entry = self.0.models.entry_for_request(name)?;
        if entry.wakes_for_reads() {
            return self.0.models.get_or_load(name).await;
        }
        entry.ready().cloned().ok_or_else(|| entry.not_loaded())
    }

    /// Checks that the server was not started with `--no-model`.
    async fn require_models_configured(&self) -> Result<(), ApiError> {
        const LOOKUP_TIMEOUT: Duration = Duration::from_millis(500);
        if !self.config().server.cluster.no_model {
            return Ok(());
        }
        let servers = timeout(LOOKUP_TIMEOUT, self.store()?.other_servers()).await;
        let servers = servers.ok().and_then(Result::ok).unwrap_or_default();
        let with_model = servers.iter().filter(|server| !server.models.is_empty());
        let servers_with_models: Vec<String> = with_model
            .filter_map(|server| Some(format!("{} has {}", server.url.as_ref()?, server.models.join(", "))))
            .collect();
        let servers_with_models = if servers_with_models.is_empty() {
            "no other server announces a model".to_owned()
        } else {
            servers_with_models.join("; ")
        };
        let detail = format!("this server was started with --no-model and has no models; {servers_with_models}");
        Err(ApiError::unavailable(detail).code(ErrorCode::NoModel))
    }

    /// Succeeds while the server is ready.
    ///
    /// # Errors
    /// 503 with the reason otherwise.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        if self.state() == ServerState::Ready { Ok(()) } else { Err(self.unavailable_error()) }
    }

    /// Returns the default model if it is ready.
    ///
    /// # Errors
    /// 503 if it is not ready, and when the server stops.
    pub fn default_model(&self) -> Result<LoadedModel, ApiError> {
        if matches!(self.state(), ServerState::Stopping | ServerState::Stopped) {
            return Err(self.not_ready_error());
        }
        self.0.models.default_model().ok_or_else(|| self.unavailable_error())
    }

    /// Returns the default model's engine.
    ///
    /// # Errors
    /// Same as [`App::default_model`].
    pub fn engine(&self) -> Result<Engine, ApiError> {
        Ok(self.default_model()?.engine().clone())
    }

    /// Succeeds until the server stops: a WebSocket that is opened during the start waits for the server.
    pub(crate) fn check_accepts_sockets(&self) -> Result<(), ApiError> {
        if matches!(self.state(), ServerState::Stopping | ServerState::Stopped) {
            Err(self.not_ready_error())
        } else {
            Ok(())
        }
    }

    /// Waits until the server has started or stops.
    pub(crate) async fn wait_until_started(&self) {
        self.wait(|state| !matches!(state, ServerState::Loading(_))).await;
    }

    /// Returns the rate limits.
    pub(crate) fn rate_limits(&self) -> &RateLimits {
        &self.0.rate_limits
    }

    /// Returns durations and statuses of requests.
    pub(crate) fn requests(&self) -> &RequestMetrics {
        &self.0.requests
    }

    /// Returns the experiments that this server runs.
    pub(crate) fn experiments(&self) -> &ActiveExperiments {
        &self.0.experiments
    }

    /// Returns the open WebSocket connections.
    pub(crate) fn sockets(&self) -> &Sockets {
        &self.0.sockets
    }

    /// Returns all models, loaded or not.
    #[must_use]
    pub fn models(&self) -> &ModelRegistry {
        &self.0.models
    }

    /// Returns the registry of mods.
    #[must_use]
    pub fn registry(&self) -> &Arc<ModRegistry> {
        &self.0.registry
    }

    /// Locks changes of uploaded mods, so that database and registry change together.
    pub(crate) async fn lock_mod_changes(&self) -> MutexGuard<'_, ()> {
        self.0.mod_changes.lock().await
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &Arc<Config> {
        &self.0.config
    }

    /// Returns the current access control and certificate.
    #[must_use]
    pub fn credentials(&self) -> Arc<Credentials> {
        Arc::clone(&self.0.credentials.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces access control and certificate for new requests and connections.
    pub fn set_credentials(&self, credentials: Credentials) {
        *self.0.credentials.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(credentials);
    }

    /// Returns the time from the configured clock.
    #[must_use]
    pub fn now(&self) -> DateTime<Utc> {
        (self.0.clock)()
    }

    /// Returns the server's start time.
    #[must_use]
    pub fn started_at(&self) -> DateTime<Utc> {
        self.0.started_at
    }

    /// Returns the state of the server.
    #[must_use]
    pub fn state(&self) -> ServerState {
        self.0.state.borrow().clone()
    }

    /// Sets the state of the server. Stopping is final.
    pub fn set_state(&self, state: ServerState) {
        self.0.state.send_if_modified(|current| {
            let goes_back =
                matches!(current, ServerState::Stopping | ServerState::Stopped) && state != ServerState::Stopped;
            let changes = !goes_back && *current != state;
            if changes {
                *current = state;
            }
            changes
        });
    }

    /// Waits until the server begins to stop. Streams without an end are closed then.
    pub async fn wait_until_stopping(&self) {
        self.wait(|state| matches!(state, ServerState::Stopping | ServerState::Stopped)).await;
    }

    /// Waits until the grace period is over. Runs end then.
    pub async fn wait_until_stopped(&self) {
        self.wait(|state| *state == ServerState::Stopped).await;
    }

    async fn wait(&self, reached: impl FnMut(&ServerState) -> bool) {
        // The sender is part of `self`, so waiting cannot fail.
        let _ = self.0.state.subscribe().wait_for(reached).await;
    }

    /// Sets the database. Start-up calls this once; further calls have no effect.
    pub fn set_database(&self, store: Store) {
        let _ = self.0.database.set(store);
    }

    /// Returns the error for a request that needs a model, while none is loaded or the server stops.
    fn unavailable_error(&self) -> ApiError {
        let error = self.not_ready_error();
        match self.state() {
            ServerState::Loading(_) | ServerState::Ready => error.code(ErrorCode::NoModel),
            ServerState::Stopping | ServerState::Stopped => error,
        }
    }

    fn not_ready_error(&self) -> ApiError {
        match self.state() {
            ServerState::Loading(step) => ApiError::unavailable(format!("the server is not ready yet: {step}")),
            ServerState::Ready => ApiError::unavailable("the default model is not loaded"),
            ServerState::Stopping | ServerState::Stopped => ApiError::unavailable("the server is stopping"),
        }
        .retry_after(1)
    }
}
