use super::ApiError;
use crate::config::Config;
use crate::engine::Engine;
use crate::mods::Registry;
use crate::store::{Live, Store};
use chrono::{DateTime, Utc};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Instant;

/// What every handler can reach; cheap to clone.
///
/// Serving begins before the model and the database are there, so both are slots that are filled once. A handler
/// asks with [`App::store`] and [`App::engine`], and passes the 503 on while a slot is empty.
#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Inner {
    database: OnceLock<(Store, Live)>,
    engine: OnceLock<Engine>,
    state: RwLock<State>,
    registry: Arc<Registry>,
    config: Arc<Config>,
    clock: fn() -> DateTime<Utc>,
    started: Instant,
}

/// How far the server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Not ready yet; what it is doing, e.g. "loading the model, 40 %".
    Loading(String),
    /// Model and database are there.
    Ready,
    /// It is on its way out and takes no more runs.
    Stopping,
}

impl App {
    /// A server that has loaded nothing yet. `clock` tells the time.
    #[must_use]
    pub fn new(config: Arc<Config>, registry: Arc<Registry>, clock: fn() -> DateTime<Utc>) -> Self {
        Self(Arc::new(Inner {
            database: OnceLock::new(),
            engine: OnceLock::new(),
            state: RwLock::new(State::Loading("starting".into())),
            registry,
            config,
            clock,
            started: Instant::now(),
        }))
    }

    /// The database.
    ///
    /// # Errors
    /// 503 while it is being started.
    pub fn store(&self) -> Result<&Store, ApiError> {
        self.0.database.get().map(|(store, _)| store).ok_or_else(|| self.not_ready())
    }

    /// Runs that are going on.
    ///
    /// # Errors
    /// 503 while the database is being started.
    pub fn live(&self) -> Result<&Live, ApiError> {
        self.0.database.get().map(|(_, live)| live).ok_or_else(|| self.not_ready())
    }

    /// The engine.
    ///
    /// # Errors
    /// 503 while the model is being loaded, and when the server stops.
    pub fn engine(&self) -> Result<&Engine, ApiError> {
        if self.state() == State::Stopping {
            return Err(self.not_ready());
        }
        self.0.engine.get().ok_or_else(|| self.not_ready())
    }

    /// The mods that runs can name.
    #[must_use]
    pub fn registry(&self) -> &Arc<Registry> {
        &self.0.registry
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
    pub fn started(&self) -> Instant {
        self.0.started
    }

    /// How far the server is.
    #[must_use]
    pub fn state(&self) -> State {
        self.0.state.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says how far the server is.
    pub fn set_state(&self, state: State) {
        *self.0.state.write().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Fills the database's slot; a second call changes nothing.
    pub fn set_database(&self, store: Store, live: Live) {
        // Only start-up calls this, once; a second database would be ignored, which is what the documentation says.
        let _ = self.0.database.set((store, live));
    }

    /// Fills the engine's slot; a second call changes nothing.
    pub fn set_engine(&self, engine: Engine) {
        let _ = self.0.engine.set(engine);
    }

    fn not_ready(&self) -> ApiError {
        match self.state() {
            State::Loading(doing) => ApiError::unavailable(format!("the server is not ready yet: {doing}")),
            State::Ready => ApiError::unavailable("the server is not ready yet"),
            State::Stopping => ApiError::unavailable("the server is stopping"),
        }
        .retry_after(1)
    }
}
