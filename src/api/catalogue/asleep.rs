//! Sleeping models: unloaded while idle, with the facts that are reported about them meanwhile.

use super::{Catalogue, Entry, Loaded, ModelState};
use crate::api::ApiError;
use crate::engine::EngineStatus;
use serde_json::Value;
use std::sync::Arc;

/// Facts about a sleeping model that are reported without loading it.
#[derive(Debug)]
pub struct Asleep {
    /// The body of `GET /props`.
    pub props: Value,
    /// The counters of its engine and of its encoder.
    pub work: [Arc<EngineStatus>; 2],
}

/// A model as a route finds it that does not wake it.
#[derive(Debug)]
pub enum Observed {
    /// It is in memory.
    Awake(Loaded),
    /// It sleeps.
    Asleep(Arc<Asleep>),
}

impl Catalogue {
    /// Returns the model that a request names, without loading it or keeping it awake.
    ///
    /// # Errors
    /// 404 when there is no such model; 400 when it is not loaded and does not sleep.
    pub fn observed(&self, asked: Option<&str>) -> Result<Observed, ApiError> {
        let entry = self.meant(asked)?;
        entry.observed().ok_or_else(|| entry.not_loaded())
    }

    /// Returns the models in memory that no run needs, each with a number that changes when it is used.
    pub(in crate::api) fn idle(&self) -> Vec<(String, u64)> {
        let models = self.lock();
        let idle = models.entries.iter().filter(|entry| entry.ready().is_some_and(Loaded::is_idle));
        idle.map(|entry| (entry.name.clone(), entry.last_used)).collect()
    }

    /// Begins to unload a model that was not used since [`Catalogue::idle`] told `used` of it; the next request loads it again.
    pub(in crate::api) fn begin_sleep(&self, name: &str, used: u64, asleep: Asleep) {
        let taken = self.change(name, |entry| {
            let loaded = entry.ready().filter(|loaded| entry.last_used == used && !loaded.is_busy())?.clone();
            entry.state = ModelState::Unloading;
            entry.asleep = Some(Arc::new(asleep));
            Some(loaded)
        });
        if let Some(loaded) = taken.flatten() {
            tracing::info!(model = name, "idle, sleeping until the next request");
            let (catalogue, name) = (self.clone(), name.to_owned());
            tokio::spawn(async move { catalogue.unload(name, loaded).await });
        }
    }
}

impl Entry {
    fn observed(&self) -> Option<Observed> {
        match (&self.state, &self.asleep) {
            (ModelState::Ready(loaded), _) => Some(Observed::Awake(loaded.clone())),
            (_, Some(asleep)) => Some(Observed::Asleep(Arc::clone(asleep))),
            _ => None,
        }
    }

    /// Returns true if the model is unloaded, or about to be, until the next request.
    #[must_use]
    pub const fn is_asleep(&self) -> bool {
        self.asleep.is_some() && matches!(self.state, ModelState::Unloaded | ModelState::Unloading)
    }
}
