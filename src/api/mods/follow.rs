//! Uploads, removals and switches as the database has them: at the start, and whenever this or another server on the
//! database changed something.

use super::import;
use super::upload::as_version;
use crate::api::{ApiError, App, Kind};
use crate::mods::{ModOrigin, ModProblem, ModRegistry, ModUpload, version_of};
use crate::store::{Error, ModState, Store};
use std::collections::BTreeMap;

/// What the database said last of each mod, by name.
///
/// Only a difference to that is a change. So a mod that was switched off here while the database was away stays off.
#[derive(Default)]
pub struct Followed(BTreeMap<String, ModState>);

impl Followed {
    /// Registers the mods that were uploaded in the past, where that is allowed, and switches off what was switched off.
    /// One that cannot be loaded any more is told, and keeps nothing else away.
    ///
    /// # Errors
    /// The database failed.
    pub async fn at_start(app: &App) -> Result<Self, Error> {
        let mut followed = Self::default();
        if let Ok(store) = app.store() {
            followed.catch_up(app, store).await?;
        }
        Ok(followed)
    }

    /// Keeps the registry in step until the server stops.
    pub async fn follow(mut self, app: App) {
        let Ok(store) = app.store().cloned() else { return };
        let mut changes = store.mod_changes();
        loop {
            tokio::select! {
                () = app.stopping() => return,
                () = changes.next() => {}
            }
            if let Err(error) = self.catch_up(&app, &store).await {
                tracing::debug!(%error, "what became of mods is not known now");
            }
        }
    }

    async fn catch_up(&mut self, app: &App, store: &Store) -> Result<(), Error> {
        let states = store.mod_states().await?;
        let gone: Vec<String> =
            self.0.keys().filter(|&name| !states.iter().any(|state| state.name == *name)).cloned().collect();
        let changed = states.into_iter().filter(|state| self.0.get(&state.name) != Some(state));
        for name in changed.map(|state| state.name).collect::<Vec<_>>().into_iter().chain(gone) {
            self.look_at(app, store, &name).await?;
        }
        Ok(())
    }

    /// Brings one mod up to date.
    async fn look_at(&mut self, app: &App, store: &Store, name: &str) -> Result<(), Error> {
        let registry = app.registry();
        let may_upload = app.config().server.allow_mod_upload;
        // The import takes time, in which all may change again: it is done before anything is decided.
        let newest = if may_upload { store.uploaded_mod(name).await? } else { None };
        let newest = newest.filter(|version| !has(registry, name, &version.hash));
        let imported = match newest {
            None => None,
            Some(version) => {
                let upload: Result<ModUpload, _> = serde_json::from_value(version.upload.clone());
                let factory = match upload {
                    Ok(upload) => import(app, upload).await,
                    Err(error) => Err(ApiError::internal(error)),
                };
                match factory {
                    // The next look finds it.
                    Err(error) if error.status() == Kind::Busy.status() => return Ok(()),
                    made => Some((version, made)),
                }
            }
        };
        let _changing = app.mods_changing().await;
        let state = store.mod_states().await?.into_iter().find(|state| state.name == name);
        let hash = state.as_ref().and_then(|state| state.hash.as_deref());
        match imported {
            Some((version, made)) if hash == Some(&*version.hash) => {
                let registered = made.map_err(|error| error.problem().detail).and_then(|factory| {
                    let version = as_version(version.hash, version.created_at, version.created_by);
                    registry.register(factory, version).map_err(|taken| taken.to_string())
                });
                let problem = registered.err().map(|message| {
                    tracing::error!(mod.name = name, "an uploaded mod is not there: {message}");
                    ModProblem { file: name.to_owned(), message, traceback: None, at: app.now() }
                });
                registry.set_problem(name, problem);
            }
            _ if hash.is_none() && origin(registry, name) == Some(ModOrigin::Uploaded) => {
                registry.remove(name);
                registry.set_problem(name, None);
                tracing::info!(mod.name = name, "the mod is removed");
            }
            _ => {}
        }
        match state {
            None => {
                self.0.remove(name);
            }
            Some(state) => {
                if self.0.get(name).is_none_or(|before| before.enabled != state.enabled) {
                    registry.enable(name, state.enabled);
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

/// Whether runs take that uploaded version.
fn has(registry: &ModRegistry, name: &str, hash: &str) -> bool {
    origin(registry, name) == Some(ModOrigin::Uploaded)
        && registry.get(name).is_some_and(|factory| version_of(&*factory) == hash)
}
