use super::ApiError;
use crate::config::Config;
use crate::engine::Engine;
use crate::model::chat::Template;
use crate::mods::Registry;
use crate::store::{Live, Store};
use chrono::{DateTime, Utc};
use std::sync::{Arc, OnceLock};
use tokio::sync::watch;

/// What every handler can reach; cheap to clone.
///
/// Serving begins before the model and the database are there, so both are slots that are filled once. A handler
/// asks with [`App::store`] and [`App::engine`], and passes the 503 on while a slot is empty.
#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Inner {
    database: OnceLock<(Store, Live)>,
    engine: OnceLock<(Engine, Result<Template, String>)>,
    state: watch::Sender<State>,
    registry: Arc<Registry>,
    config: Arc<Config>,
    clock: fn() -> DateTime<Utc>,
    started_at: DateTime<Utc>,
}

/// How far the server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Not ready yet; what it is doing, e.g. "loading the model, 40 %".
    Loading(String),
    /// Model and database are there.
    Ready,
    /// It takes no more runs; those that are going on have a little time to end.
    Stopping,
    /// Whatever still goes on is cut off.
    Stopped,
}

impl App {
    /// A server that has loaded nothing yet. `clock` tells the time.
    #[must_use]
    pub fn new(config: Arc<Config>, registry: Arc<Registry>, clock: fn() -> DateTime<Utc>) -> Self {
        Self(Arc::new(Inner {
            database: OnceLock::new(),
            engine: OnceLock::new(),
            state: watch::Sender::new(State::Loading("starting".into())),
            registry,
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
        if matches!(self.state(), State::Stopping | State::Stopped) {
            return Err(self.not_ready());
        }
        self.0.engine.get().map(|(engine, _)| engine).ok_or_else(|| self.not_ready())
    }

    /// The engine, if it runs, also while the server stops.
    #[must_use]
    pub fn running_engine(&self) -> Option<&Engine> {
        self.0.engine.get().map(|(engine, _)| engine)
    }

    /// The model's chat template.
    ///
    /// # Errors
    /// 503 while the model is being loaded; 400 when the model's template cannot be read.
    pub fn template(&self) -> Result<&Template, ApiError> {
        let (_, template) = self.0.engine.get().ok_or_else(|| self.not_ready())?;
        template.as_ref().map_err(|reason| ApiError::bad_request(format!("{reason}; use /v1/completions")))
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

    /// Fills the engine's slot; a second call changes nothing.
    pub fn set_engine(&self, engine: Engine) {
        let template = template_of(&engine);
        if let Err(reason) = &template {
            tracing::warn!(%reason, "chat is not available with this model");
        }
        let _ = self.0.engine.set((engine, template));
    }

    fn not_ready(&self) -> ApiError {
        match self.state() {
            State::Loading(doing) => ApiError::unavailable(format!("the server is not ready yet: {doing}")),
            State::Ready => ApiError::unavailable("the server is not ready yet"),
            State::Stopping | State::Stopped => ApiError::unavailable("the server is stopping"),
        }
        .retry_after(1)
    }
}

fn template_of(engine: &Engine) -> Result<Template, String> {
    let model = engine.model();
    let (vocabulary, source) = (model.vocabulary(), model.card().chat_template.as_deref());
    let text = |token: Option<_>| token.map(|token| vocabulary.decode(&[token])).unwrap_or_default();
    let special = vocabulary.special();
    Template::new(source, &text(special.bos), &text(special.eos)).map_err(|error| error.to_string())
}
