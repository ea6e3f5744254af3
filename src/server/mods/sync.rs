//! Synchronizes the mod registry with the database: at the start, and after changes by this or another server.

use super::upload::{import, uploaded_version};
use crate::mods::{ModOrigin, ModProblem, ModRegistry, ModUpload, version_of};
use crate::server::{ApiError, App, ErrorKind};
use crate::store::{Error, ModState, Store};
use std::collections::BTreeMap;

/// The last known state of each mod in the database, by name.
///
/// Only differences from that state are applied, so a mod that was disabled here while the database was unavailable
/// stays disabled.
#[derive(Default)]
pub struct ModSync(BTreeMap<String, ModState>);

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
            self.0.keys().filter(|&name| !states.iter().any(|state| state.name == *name)).cloned().collect();
        let changed = states.into_iter().filter(|state| self.0.get(&state.name) != Some(state));
        for name in changed.map(|state| state.name).collect::<Vec<_>>().into_iter().chain(gone) {
            self.sync_mod(app, store, &name).await?;
        }
        Ok(())
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
                let factory = match upload {
                    Ok(upload) => import(app, upload).await,
                    Err(error) => Err(ApiError::internal(error)),
                };
                match factory {
                    // The next synchronization retries it.
                    Err(error) if error.status() == ErrorKind::Busy.status() => return Ok(()),
                    result => Some((version, result)),
                }
            }
        };
        let _changing = app.lock_mod_changes().await;
        let state = store.mod_states().await?.into_iter().find(|state| state.name == name);
        let hash = state.as_ref().and_then(|state| state.hash.as_deref());
        match imported {
            Some((version, result)) if hash == Some(&*version.hash) => {
                let registered = result.map_err(|error| error.problem().detail).and_then(|factory| {
                    let version = uploaded_version(version.hash, version.created_at, version.created_by);
                    registry.register(factory, version).map_err(|taken| taken.to_string())
                });
                let problem = registered.err().map(|message| {
                    tracing::error!(mod.name = name, "uploaded mod not loaded: {message}");
                    ModProblem { file: name.to_owned(), message, traceback: None, at: app.now() }
                });
                registry.set_problem(name, problem);
            }
            _ if hash.is_none() && origin(registry, name) == Some(ModOrigin::Uploaded) => {
                registry.remove(name);
                registry.set_problem(name, None);
                tracing::info!(mod.name = name, "mod removed");
            }
            _ => {}
        }
        match state {
            None => {
                // A mod that is not in the database is enabled.
                if self.0.remove(name).is_some_and(|before| !before.enabled) {
                    registry.set_enabled(name, true);
                }
            }
            Some(state) => {
                let is_changed = self.0.get(name).is_none_or(|before| before.enabled != state.enabled);
                // The registry keeps the state of a name without a mod, for a mod of that name that is registered later.
                if is_changed || registry.get(name).is_none() {
                    registry.set_enabled(name, state.enabled);
                }
                self.0.insert(state.name.clone(), state);
            }
        }
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
