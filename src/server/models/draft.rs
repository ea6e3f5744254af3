//! Loading of the draft model, which belongs to the default model.

use super::options::{cache_type, draft_options};
use super::{ModelEntry, ModelRegistry};
use crate::engine::DraftModel;
use crate::model::{Model, ModelError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

impl ModelRegistry {
    /// Loads the draft model of a model. Returns `None` if it has none.
    ///
    /// # Errors
    /// [`ModelError::Draft`]: the file cannot be loaded.
    pub(super) async fn load_draft(
        &self,
        entry: &ModelEntry,
        cancelled: &Arc<AtomicBool>,
    ) -> Result<Option<DraftModel>, ModelError> {
        let config = &self.0.config.engine;
        let Some(draft) = config.speculation.draft_model.as_ref().filter(|_| entry.default) else { return Ok(None) };
        let unusable = |reason: String| ModelError::Draft { path: draft.path.display().to_string(), reason };
        self.probe_file(&draft.path, None).await.map_err(|error| unusable(error.to_string()))?;
        let options = draft_options(config, entry, draft);
        let (path, cancelled) = (draft.path.clone(), Arc::clone(cancelled));
        let read = move || Model::load(&path, &options, move |_| !cancelled.load(Ordering::Acquire));
        let model = tokio::task::spawn_blocking(read).await.map_err(|_| unusable("the loader panicked".into()))?;
        Ok(Some(DraftModel {
            model: Arc::new(model.map_err(|error| unusable(error.to_string()))?),
            threads: draft.threads,
            threads_batch: draft.threads_batch,
            cache_type_k: cache_type(draft.cache_type_k),
            cache_type_v: cache_type(draft.cache_type_v),
        }))
    }
}
