//! Unloading: on request, and before another model is loaded.

use super::load::RETRY_DELAY;
use super::{LoadFailure, LoadedModel, ModelEntry, ModelRegistry, ModelState, SleepingModel};
use crate::model::llama::WeightFile;
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
        let entry = self.entry_by_name(name)?;
        let changed = self.change(&entry.name, |entry| {
            let was_sleeping = entry.sleeping.take().is_some();
            entry.stopped_early = false;
            match &entry.state {
                ModelState::Ready(_) => self.spawn_unload(entry, None),
                ModelState::Loading { cancelled, .. } => {
                    cancelled.store(true, Ordering::Release);
                    entry.state = ModelState::CancellingLoad;
                }
                ModelState::Failed(_) => entry.state = ModelState::Unloaded,
                ModelState::Unloaded if !was_sleeping => return Err(entry.not_loaded()),
                ModelState::Unloaded | ModelState::CancellingLoad | ModelState::Unloading(_) => {}
            }
            Ok(())
        });
        changed.unwrap_or(Ok(()))
    }

    /// Starts unloading a model that no run uses and that has not been used since its counter `used`. It sleeps if
    /// `sleeping` is set. Returns false if it is in use.
    pub(super) fn unload_idle(&self, name: &str, used: u64, sleeping: Option<SleepingModel>) -> bool {
        let changed = self.change(name, |entry| {
            let is_unused = entry.last_used == used && entry.ready().is_some_and(|loaded| !loaded.is_busy());
            if is_unused {
                entry.stopped_early = false;
                self.spawn_unload(entry, None);
                entry.sleeping = sleeping.map(Arc::new);
            }
            is_unused
        });
        changed.unwrap_or_default()
    }

    /// Starts unloading a model whose threads have stopped. If this was found soon after each of the last two loads, the
    /// model counts as one that cannot be loaded, so that not every request loads it.
    pub(super) fn unload_stopped(&self, entry: &mut ModelEntry) {
        tracing::error!(model = entry.name, "the decode thread of the model has stopped, unloading it");
        let is_early = entry.ready().is_some_and(|loaded| loaded.age() < RETRY_DELAY);
        let failure = (is_early && entry.stopped_early)
            .then_some("its decode thread stopped soon after each of the last two loads; the log has the cause");
        entry.stopped_early = is_early;
        self.spawn_unload(entry, failure);
    }

    /// Starts unloading a model if it is ready. With a `failure`, it counts afterwards as one that cannot be loaded.
    fn spawn_unload(&self, entry: &mut ModelEntry, failure: Option<&'static str>) {
        let Some(loaded) = entry.ready().cloned() else { return };
        entry.state = ModelState::Unloading(loaded.downgrade());
        let (registry, name) = (self.clone(), entry.name.clone());
        tokio::spawn(async move { registry.unload(name, loaded, failure).await });
    }

    async fn unload(&self, name: String, loaded: LoadedModel, failure: Option<&'static str>) {
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
        self.change(&name, |entry| {
            entry.state = failure.map_or(ModelState::Unloaded, |reason| {
                ModelState::Failed(LoadFailure::new(reason.to_owned(), WeightFile::new(&entry.path).ok()))
            });
        });
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
                let idle = idle.min_by_key(|entry| (entry.default, entry.last_used));
                let idle = idle.map(|entry| (entry.name.clone(), entry.last_used));
                let unloading = others
                    .iter()
                    .any(|entry| matches!(entry.state, ModelState::Unloading(_) | ModelState::CancellingLoad));
                (others.len(), unloading, idle)
            };
            if others < max_loaded {
                return Ok(());
            }
            match idle {
                _ if unloading => {}
                Some((idle, used)) => {
                    // A request may have begun to use it, or another task may have unloaded it.
                    let is_unloading = self.unload_idle(&idle, used, None);
                    if is_unloading {
                        tracing::info!(model = idle, "unloading model to load another one");
                    }
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
        !matches!(self.state, ModelState::Unloaded | ModelState::Failed(_))
    }
}
