//! Synchronizes the mod registry with the database: at the start, and after changes by this or another server.

use super::upload::{ImportError, import, python_for_uploads, uploaded_version};
use crate::mods::{ImportRetry, ModFactory, ModOrigin, ModProblem, ModRegistry, ModUpload, version_of};
use crate::server::{ApiError, App, ErrorKind};
use crate::store::{Error, ModState, ModVersion, Store};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Synchronization of the mod registry with the database.
///
/// Only differences from the last known states are applied, so a mod that was disabled here while the database was
/// unavailable stays disabled.
#[derive(Default)]
pub struct ModSync {
    /// The last known state of each mod in the database, by name.
    states: BTreeMap<String, ModState>,
    /// Mods that failed to load and may load later, by name.
    retries: BTreeMap<String, ImportRetry>,
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
                () = app.wait_until_stopping() => return,
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
        retry.is_due().then(|| name.clone())
    }

    /// Applies the database's state of one mod.
    async fn sync_mod(&mut self, app: &App, store: &Store, name: &str) -> Result<(), Error> {
        let registry = app.registry();
        // Import before locking, because the import takes time and the state may change again.
        let planned = self.retries.get(name).filter(|retry| !retry.is_due()).cloned();
        let imported = import_newest(app, store, name, planned.as_ref()).await?;
        if let Some(Imported { result: Err(ImportError::Server(error)), .. }) = &imported
            && error.status() == ErrorKind::Busy.status()
        {
            // The next synchronization retries it.
            return Ok(());
        }
        let _changing = app.lock_mod_changes().await;
        let state = store.mod_state(name).await?;
        let hash = state.as_ref().and_then(|state| state.hash.as_deref());
        let mut retry = planned.filter(|planned| hash.is_some_and(|hash| planned.is_for(hash)));
        match imported {
            // It may have been uploaded again, to this server, during the import.
            _ if hash.is_some_and(|hash| has_version(registry, name, hash)) => registry.set_problem(name, None),
            Some(imported) if hash == Some(&*imported.version.hash) => {
                if matches!(&imported.result, Err(ImportError::Load(error)) if error.is_transient()) {
                    retry = Some(ImportRetry::after(self.retries.get(name), imported.version.hash.clone()));
                }
                register_imported(app, imported);
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

/// An uploaded version and the result of its import.
struct Imported {
    version: ModVersion,
    result: Result<Arc<dyn ModFactory>, ImportError>,
}

/// Imports the newest uploaded version of a mod, unless runs use it, its import is planned for later, or uploads are
/// disabled.
async fn import_newest(
    app: &App,
    store: &Store,
    name: &str,
    planned: Option<&ImportRetry>,
) -> Result<Option<Imported>, Error> {
    if !app.config().server.allow_mod_upload {
        return Ok(None);
    }
    let newest = store.uploaded_mod(name).await?;
    let Some(version) = newest.filter(|version| {
        !has_version(app.registry(), name, &version.hash)
            && planned.is_none_or(|planned| !planned.is_for(&version.hash))
    }) else {
        return Ok(None);
    };
    let result = match serde_json::from_value::<ModUpload>(version.upload.clone()) {
        Ok(upload) => import(upload, version.hash.clone(), python_for_uploads(app)).await,
        Err(error) => Err(ImportError::Server(ApiError::internal(error))),
    };
    Ok(Some(Imported { version, result }))
}

/// Registers an imported version, or reports why it was not imported.
fn register_imported(app: &App, Imported { version, result }: Imported) {
    let (registry, name) = (app.registry(), version.name);
    let failure = match result {
        Ok(factory) => {
            let version = uploaded_version(version.hash, version.created_at, version.created_by);
            registry.register(factory, version).err().map(|taken| (taken.to_string(), None))
        }
        Err(ImportError::Load(error)) => Some((error.to_string(), error.traceback().map(str::to_owned))),
        Err(ImportError::Server(error)) => Some((error.problem().detail, None)),
    };
    let problem = failure.map(|(message, traceback)| {
        let shown = traceback.as_deref().map(|text| format!("\n{}", text.trim_end())).unwrap_or_default();
        tracing::error!(mod.name = name, "uploaded mod not loaded: {message}{shown}");
        ModProblem { file: name.clone(), message, traceback, at: app.now() }
    });
    registry.set_problem(&name, problem);
}

fn origin(registry: &ModRegistry, name: &str) -> Option<ModOrigin> {
    registry.info(name, None).map(|shown| shown.current.origin)
}

/// Returns true if runs use that uploaded version.
fn has_version(registry: &ModRegistry, name: &str, hash: &str) -> bool {
    origin(registry, name) == Some(ModOrigin::Uploaded)
        && registry.get(name).is_some_and(|factory| version_of(&*factory) == hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn due_retry_is_the_earliest_in_the_past() {
        let mut sync = ModSync::default();
        assert_eq!(sync.due_retry(), None);
        let later = ImportRetry::after(None, "a".to_owned());
        sync.retries.insert("later".to_owned(), later.clone());
        assert_eq!(sync.due_retry(), None);
        let mut due = later;
        due.at = Instant::now();
        sync.retries.insert("due".to_owned(), due);
        assert_eq!(sync.due_retry().as_deref(), Some("due"));
    }
}
