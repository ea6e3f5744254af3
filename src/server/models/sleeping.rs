//! Sleeping models: unloaded while idle, with the data to report until they are loaded again.

use super::{LoadedModel, ModelEntry, ModelRegistry, ModelState};
use crate::engine::EngineStatus;
use crate::server::ApiError;
use serde_json::value::RawValue;
use std::sync::Arc;

/// Data of a sleeping model that is reported without loading it.
#[derive(Debug)]
pub struct SleepingModel {
    /// The body of `GET /props`.
    pub props: Box<RawValue>,
    /// The source of its chat template, if it has one.
    pub chat_template: Option<String>,
    /// True if it takes images.
    pub vision: bool,
    /// The statuses of its engine and of its encoder.
    pub statuses: [Arc<EngineStatus>; 2],
}

/// The view of a model for routes that do not wake it.
#[derive(Debug)]
pub enum ModelView {
    /// The model is in memory.
    Loaded(LoadedModel),
    /// The model is sleeping.
    Sleeping(Arc<SleepingModel>),
}

impl ModelRegistry {
    /// Returns the model named by a request, without loading it or keeping it awake.
    ///
    /// # Errors
    /// 404 for an unknown model; 400 or 503 if it is neither loaded nor sleeping.
    pub fn view(&self, requested: Option<&str>) -> Result<ModelView, ApiError> {
        let entry = self.entry_for_request(requested)?;
        entry.view().ok_or_else(|| entry.not_loaded())
    }

    /// Returns the loaded models that no run uses, each with a counter that changes on use.
    pub(crate) fn idle(&self) -> Vec<(String, u64)> {
        let models = self.lock();
        let idle = models.entries.iter().filter(|entry| entry.ready().is_some_and(LoadedModel::is_idle));
        idle.map(|entry| (entry.name.clone(), entry.last_used)).collect()
    }

    /// Starts unloading a model that has not been used since [`ModelRegistry::idle`] returned `used` for it; the next
    /// request loads it again.
    pub(crate) fn begin_sleep(&self, name: &str, used: u64, sleeping: SleepingModel) {
        if self.unload_idle(name, used, Some(sleeping)) {
            tracing::info!(model = name, "model is idle, sleeping until the next request");
        }
    }
}

impl ModelEntry {
    fn view(&self) -> Option<ModelView> {
        match (&self.state, &self.sleeping) {
            (ModelState::Ready(loaded), _) => Some(ModelView::Loaded(loaded.clone())),
            (_, Some(sleeping)) => Some(ModelView::Sleeping(Arc::clone(sleeping))),
            _ => None,
        }
    }

    /// Returns true if the model is unloaded, or about to be, until the next request.
    #[must_use]
    pub const fn is_sleeping(&self) -> bool {
        self.sleeping.is_some()
            && matches!(self.state, ModelState::Unloaded | ModelState::Unloading(_) | ModelState::Failed(_))
    }

    /// Returns true if a read-only request waits until the model is awake, which it starts if necessary. It does not repeat
    /// a failed load.
    #[must_use]
    pub const fn wakes_for_reads(&self) -> bool {
        self.sleeping.is_some() && !matches!(self.state, ModelState::Failed(_))
    }
}
