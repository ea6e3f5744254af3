//! Synchronizes the mod registry with the database: at the start, and after changes by this or another server.

use super::upload::{python_for_uploads, try_import, uploaded_version};
use crate::mods::{ModOrigin, ModProblem, ModRegistry, ModUpload, version_of};
use crate::server::{ApiError, App, ErrorKind};
use crate::store::{Error, ModState, Store};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Delay after the first failed import of a mod that may load later; doubles up to [`MAX_RETRY_DELAY`].
const MIN_RETRY_DELAY: Duration = Duration::from_secs(30);
/// Maximum of that delay.
const MAX_RETRY_DELAY: Duration = Duration::from_hours(1);

/// Synchronization of the mod registry with the database.
///
/// Only differences from the last known states are applied, so a mod that was disabled here while the database was
/// unavailable stays disabled.
#[derive(Default)]
pub struct ModSync {
    /// The last known state of each mod in the database, by name.
    states: BTreeMap<String, ModState>,
    /// Mods that failed to load and may load later, by name.
    retries: BTreeMap<String, Retry>,
}

/// Next import of a mod that failed to load.
struct Retry {
    /// The version that failed to load.
    hash: String,
    at: Instant,
    delay: Duration,
}

impl Retry {
    /// Plans the next import of a version after a failed one; `earlier` is the last planned import of the mod.
    fn after(earlier: Option<&Self>, hash: String) -> Self {
        let earlier = earlier.filter(|retry| retry.hash == hash);
        let delay = earlier.map_or(MIN_RETRY_DELAY, |retry| (retry.delay * 2).min(MAX_RETRY_DELAY));
        Self { hash, at: Instant::now() + delay, delay }
    }
}

impl ModSync {
    /// Registers the uploaded mods, if uploads are allowed, and disables the mods that are disabled in the database. A mod
    /// that fails to load is logged and does not affect the others.
    ///
    /// # Errors
    /// The database failed.
    pub async fn load(app: &App) -> Result<Self, Error> {
        let mut sync = Self::default();
        if let Ok(store) = app.store() {
            sync.sync_all(app, store).await?;
        }
        Ok(sync)
    }

    /// Applies changes until the server stops.
    pub async fn run(mut self, app: App) {
        let Ok(store) = app.store().cloned() else { return };
        let mut changes = store.mod_changes();
        loop {
            tokio::select! {
                () = app.stopping() => return,
                () = changes.next() => {}
            }
            if let Err(error) = self.sync_all(&app, &store).await {
                tracing::debug!(%error, "mod synchronization failed");
            }
        }
    }

    async fn sync_all(&mut self, app: &App, store: &Store) -> Result<(), Error> {
        let states = store.mod_states().await?;
        let gone: Vec<String> =
            self.states.keys().filter(|&name| !states.iter().any(|state| state.name == *name)).cloned().collect();
        let changed = states.into_iter().filter(|state| self.states.get(&state.name) != Some(state));
        for name in changed.map(|state| state.name).collect::<Vec<_>>().into_iter().chain(gone) {
            self.sync_mod(app, store, &name).await?;
        }
        if let Some(name) = self.due_retry() {
            self.sync_mod(app, store, &name).await?;
        }
        Ok(())
    }

    /// Returns the mod whose next import is due. There is only one in a synchronization, because an import takes time
    /// and changes by other servers wait for it.
    fn due_retry(&self) -> Option<String> {
        let (name, retry) = self.retries.iter().min_by_key(|(_, retry)| retry.at)?;
        (retry.at <= Instant::now()).then(|| name.clone())
    }

    /// Applies the database's state of one mod.
    async fn sync_mod(&mut self, app: &App, store: &Store, name: &str) -> Result<(), Error> {
        let registry = app.registry();
        let may_upload = app.config().server.allow_mod_upload;
        // Import before locking, because the import takes time and the state may change again.
        let newest = if may_upload { store.uploaded_mod(name).await? } else { None };
        let newest = newest.filter(|version| !has_version(registry, name, &version.hash));
        let imported = match newest {
            None => None,
            Some(version) => {
                let upload: Result<ModUpload, _> = serde_json::from_value(version.upload.clone());
                let result = match upload {
                    Ok(upload) => try_import(upload, python_for_uploads(app)).await,
                    Err(error) => Err(ApiError::internal(error)),
                };
                match result {
                    // The next synchronization retries it.
                    Err(error) if error.status() == ErrorKind::Busy.status() => return Ok(()),
                    result => Some((version, result)),
                }
            }
        };
        let _changing = app.lock_mod_changes().await;
        let state = store.mod_states().await?.into_iter().find(|state| state.name == name);
        let hash = state.as_ref().and_then(|state| state.hash.as_deref());
        let mut retry = None;
        match imported {
            // It may have been uploaded again, to this server, during the import.
            _ if hash.is_some_and(|hash| has_version(registry, name, hash)) => registry.set_problem(name, None),
            Some((version, result)) if hash == Some(&*version.hash) => {
                if matches!(&result, Ok(Err(error)) if error.is_transient()) {
                    retry = Some(Retry::after(self.retries.get(name), version.hash.clone()));
                }
                let failure = match result {
                    Ok(Ok(factory)) => {
                        let version = uploaded_version(version.hash, version.created_at, version.created_by);
                        registry.register(factory, version).err().map(|taken| (taken.to_string(), None))
                    }
                    Ok(Err(error)) => Some((error.to_string(), error.traceback().map(str::to_owned))),
                    Err(error) => Some((error.problem().detail, None)),
                };
                let problem = failure.map(|(message, traceback)| {
                    let shown = traceback.as_deref().map(|text| format!("\n{}", text.trim_end())).unwrap_or_default();
                    tracing::error!(mod.name = name, "uploaded mod not loaded: {message}{shown}");
                    ModProblem { file: name.to_owned(), message, traceback, at: app.now() }
                });
                registry.set_problem(name, problem);
            }
            // The next synchronization imports the version that was uploaded during this import.
            Some(_) if hash.is_some() => return Ok(()),
            _ if hash.is_none() && origin(registry, name).is_none_or(|origin| origin == ModOrigin::Uploaded) => {
                registry.set_problem(name, None);
                if registry.remove(name) {
                    tracing::info!(mod.name = name, "mod removed");
                }
            }
            _ => {}
        }
        match state {
            None => {
                // A mod that is not in the database is enabled.
                if self.states.remove(name).is_some_and(|before| !before.enabled) {
                    registry.set_enabled(name, true);
                }
            }
            Some(state) => {
                let is_changed = self.states.get(name).is_none_or(|before| before.enabled != state.enabled);
                // The registry keeps the state of a name without a mod, for a mod of that name that is registered later.
                if is_changed || registry.get(name).is_none() {
                    registry.set_enabled(name, state.enabled);
                }
                self.states.insert(state.name.clone(), state);
            }
        }
        match retry {
            Some(retry) => self.retries.insert(name.to_owned(), retry),
            None => self.retries.remove(name),
        };
        Ok(())
    }
}

fn origin(registry: &ModRegistry, name: &str) -> Option<ModOrigin> {
    registry.info(name).map(|shown| shown.current.origin)
}

/// Returns true if runs use that uploaded version.
fn has_version(registry: &ModRegistry, name: &str, hash: &str) -> bool {
    origin(registry, name) == Some(ModOrigin::Uploaded)
        && registry.get(name).is_some_and(|factory| version_of(&*factory) == hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_of_retries_doubles_for_the_same_version() {
        let mut retry = Retry::after(None, "a".to_owned());
        assert_eq!(retry.delay, MIN_RETRY_DELAY);
        for factor in [2, 4] {
            retry = Retry::after(Some(&retry), "a".to_owned());
            assert_eq!(retry.delay, MIN_RETRY_DELAY * factor);
        }
        assert_eq!(Retry::after(Some(&retry), "b".to_owned()).delay, MIN_RETRY_DELAY);
        retry.delay = MAX_RETRY_DELAY;
        assert_eq!(Retry::after(Some(&retry), "a".to_owned()).delay, MAX_RETRY_DELAY);
    }

    #[test]
    fn due_retry_is_the_earliest_in_the_past() {
        let mut sync = ModSync::default();
        assert_eq!(sync.due_retry(), None);
        let now = Instant::now();
        let delay = MIN_RETRY_DELAY;
        sync.retries.insert("later".to_owned(), Retry { hash: "a".to_owned(), at: now + MAX_RETRY_DELAY, delay });
        assert_eq!(sync.due_retry(), None);
        sync.retries.insert("due".to_owned(), Retry { hash: "a".to_owned(), at: now, delay });
        assert_eq!(sync.due_retry().as_deref(), Some("due"));
    }
}
