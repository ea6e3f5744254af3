//! Unloading: on request, and before another model is loaded.

use super::{Loaded, ModelEntry, ModelRegistry, ModelState};
use crate::server::{ApiError, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Interval between checks for active runs.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum wait for unfinished responses that still use the memory of an unloaded model.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

impl ModelRegistry {
    /// Starts unloading a model: no new runs are accepted, and the model is dropped when active runs have ended or the
    /// grace period is over. Cancels a load in progress.
    ///
    /// # Errors
    /// 404 for an unknown model; 400 if it is not loaded.
    pub fn begin_unload(&self, name: &str) -> Result<(), ApiError> {
        let entry = self.named(name)?;
        let taken = self.change(&entry.name, |entry| match &entry.state {
            ModelState::Ready(loaded) => {
                let loaded = loaded.clone();
                entry.state = ModelState::Unloading;
                Ok(Some(loaded))
            }
            ModelState::Loading(_) => {
                entry.load_cancelled.store(true, Ordering::Release);
                Ok(None)
            }
            ModelState::Failed(_) => {
                entry.state = ModelState::Unloaded;
                entry.sleeping = None;
                Ok(None)
            }
            ModelState::Unloading => Ok(None),
            ModelState::Unloaded if entry.sleeping.take().is_some() => Ok(None),
            ModelState::Unloaded => Err(entry.not_loaded()),
        });
        if let Some(loaded) = taken.transpose()?.flatten() {
            let registry = self.clone();
            tokio::spawn(async move { registry.unload(entry.name, loaded).await });
        }
        Ok(())
    }

    pub(super) async fn unload(&self, name: String, loaded: Loaded) {
        let began = Instant::now();
        let grace = self.0.config.server.shutdown_grace;
        while loaded.is_busy() && began.elapsed() < grace {
            sleep(CHECK_INTERVAL).await;
        }
        if loaded.is_busy() {
            tracing::warn!(
                model = name,
                grace_s = grace.as_secs(),
                "ending active runs because their model is being unloaded"
            );
        }
        loaded.stop().await;
        let memory = Arc::downgrade(loaded.model());
        drop(loaded);
        let release = async {
            while memory.strong_count() > 0 {
                sleep(CHECK_INTERVAL).await;
            }
        };
        if timeout(RELEASE_TIMEOUT, release).await.is_err() {
            tracing::warn!(
                model = name,
                "responses still use the unloaded model; its memory is freed after the last one"
            );
        }
        self.change(&name, |entry| entry.state = ModelState::Unloaded);
        tracing::info!(model = name, "model unloaded");
    }

    /// Returns true if the model can be loaded without unloading another one.
    pub(super) fn has_room(&self, name: &str) -> bool {
        let models = self.lock();
        let others = models.entries.iter().filter(|entry| entry.name != name && entry.occupies_memory()).count();
        self.0.config.server.models.max_loaded.is_none_or(|max| others < max)
    }

    /// Unloads the least recently used models without active runs until one more may be loaded. If all are in use, waits
    /// for one to become idle, for up to `--shutdown-grace`.
    pub(super) async fn make_room(&self, name: &str) -> Result<(), ApiError> {
        let Some(max_loaded) = self.0.config.server.models.max_loaded else { return Ok(()) };
        let began = Instant::now();
        let mut changed = self.changes();
        loop {
            changed.mark_unchanged();
            let (others, unloading, idle) = {
                let models = self.lock();
                let others: Vec<&ModelEntry> =
                    models.entries.iter().filter(|entry| entry.name != name && entry.occupies_memory()).collect();
                let idle = others.iter().filter(|entry| entry.ready().is_some_and(|loaded| !loaded.is_busy()));
                // The default model is unloaded last, because requests without a name would load it again.
                let idle = idle.min_by_key(|entry| (entry.default, entry.last_used)).map(|entry| entry.name.clone());
                let unloading = others.iter().any(|entry| matches!(entry.state, ModelState::Unloading));
                (others.len(), unloading, idle)
            };
            if others < max_loaded {
                return Ok(());
            }
            match idle {
                _ if unloading => {}
                Some(idle) => {
                    tracing::info!(model = idle, "unloading model to load another one");
                    // Another task may have unloaded it meanwhile.
                    let _ = self.begin_unload(&idle);
                }
                None if began.elapsed() >= self.0.config.server.shutdown_grace => {
                    let detail = format!(
                        "all {max_loaded} models allowed by --models-max are loaded and in use; try again later"
                    );
                    return Err(ApiError::new(ErrorKind::Busy, detail).at("model").retry_after(5));
                }
                None => {}
            }
            let _ = timeout(CHECK_INTERVAL * 10, changed.changed()).await;
        }
    }
}

impl ModelEntry {
    fn occupies_memory(&self) -> bool {
        matches!(self.state, ModelState::Ready(_) | ModelState::Loading(_) | ModelState::Unloading)
    }
}
