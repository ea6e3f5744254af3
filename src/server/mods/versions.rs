//! Versions of mods. The version of a file mod is stored when a run uses it. All stored versions can be run
//! again.

use super::upload::import;
use super::{find_mod, unknown_mod};
use crate::events::Scope;
use crate::mods::python::PythonMods;
use crate::mods::python::sandbox::SandboxPolicy;
use crate::mods::{ModOrigin, ModRef, ModUpload, ModUse, RegisteredVersion, SelectedMod, source_store};
use crate::server::{ApiError, App};
use crate::store::ModVersion;
use crate::trace::document::Document;
use serde::Serialize;
use std::time::Duration;
use utoipa::ToSchema;

/// Maximum mods per run whose sources are searched in the data directory.
const MAX_LOCAL_SOURCES: usize = 16;
/// Delay before the database is tried again.
const RETRY_DELAY: Duration = Duration::from_secs(2);

/// The versions of a mod.
#[derive(Debug, Serialize, ToSchema)]
pub struct VersionList {
    /// Name of the mod.
    pub name: String,
    /// Hash of the version that runs use, or would use if it could be loaded; `null` for a deleted mod.
    pub current: Option<String>,
    /// Newest first.
    #[schema(value_type = Vec<Object>)]
    pub versions: Vec<RegisteredVersion>,
}

/// Returns the versions of a mod.
///
/// # Errors
/// 404 if no such mod ever existed; an error if the database failed.
pub async fn versions_of(app: &App, name: String, scope: &Scope) -> Result<VersionList, ApiError> {
    let shown = find_mod(app, &name, scope).await?;
    let current = shown.as_ref().map(|shown| shown.current.hash.clone());
    let mut versions: Vec<RegisteredVersion> = Vec::new();
    if let Some(mut shown) = shown {
        versions.append(&mut shown.earlier);
        versions.push(shown.current);
    }
    for stored in app.store()?.mod_versions(&name).await? {
        if versions.iter().all(|known| known.hash != stored.hash) {
            versions.push(RegisteredVersion {
                hash: stored.hash,
                origin: if stored.from_file { ModOrigin::File } else { ModOrigin::Uploaded },
                registered_at: Some(stored.created_at),
                registered_by: stored.created_by,
            });
        }
    }
    if versions.is_empty() {
        return Err(unknown_mod(app, &name));
    }
    // The current version comes first, even if it was registered earlier.
    versions.sort_by_key(|version| std::cmp::Reverse((current.as_ref() == Some(&version.hash), version.registered_at)));
    Ok(VersionList { name, current, versions })
}

/// Stores the versions of file mods that runs use, until the server stops.
pub fn store_used_versions(app: &App) {
    let (app, mut uses) = (app.clone(), app.registry().subscribe_uses());
    tokio::spawn(async move {
        loop {
            let used = tokio::select! {
                () = app.wait_until_stopped() => return,
                used = uses.recv() => used,
            };
            let Some(used) = used else { return };
            while let Err(error) = store_used(&app, &used).await {
                tracing::debug!(mod.name = used.name, "mod version not stored yet: {}", error.log_detail());
                tokio::select! {
                    () = app.wait_until_stopped() => return,
                    () = tokio::time::sleep(RETRY_DELAY) => {}
                }
            }
        }
    });
}

/// Returns name and hash of the file mods that a recorded run used.
#[must_use]
pub fn used_files(document: &Document) -> Vec<(String, String)> {
    let first = document.events.first().and_then(|event| event.measured.as_ref());
    let parameters = first.and_then(|measured| measured.prompt.as_ref()?.parameters.as_ref());
    let mods = parameters.and_then(|parameters| parameters["mods"].as_array()).into_iter().flatten();
    let files = mods.filter(|used| used["origin"] == ModOrigin::File.as_str());
    files.filter_map(|used| Some((used["name"].as_str()?.to_owned(), used["version"].as_str()?.to_owned()))).collect()
}

/// Stores the versions whose sources are in the data directory, where the program that ran them saved them.
pub(crate) async fn store_local_sources(app: &App, files: Vec<(String, String)>) -> Result<(), ApiError> {
    for (name, hash) in files.iter().take(MAX_LOCAL_SOURCES) {
        let (data_dir, wanted) = (app.config().data.dir.clone(), hash.clone());
        let look = move || source_store::load(&data_dir, &wanted);
        let Some(found) = tokio::task::spawn_blocking(look).await.map_err(ApiError::internal)? else { continue };
        let upload = ModUpload { name: Some(name.clone()), ..found };
        let version = ModVersion {
            name: name.clone(),
            hash: hash.clone(),
            upload: serde_json::to_value(upload).map_err(ApiError::internal)?,
            created_at: app.now(),
            created_by: None,
            from_file: true,
        };
        app.store()?.save_used_mod(&version, app.now().date_naive()).await?;
    }
    // A document can name any number of mods, so only the searched ones are removed.
    for (_, hash) in files.iter().take(MAX_LOCAL_SOURCES) {
        let _ = source_store::remove(&app.config().data.dir, hash);
    }
    Ok(())
}

async fn store_used(app: &App, used: &ModUse) -> Result<(), ApiError> {
    let version = ModVersion {
        name: used.name.clone(),
        hash: used.version.hash.clone(),
        upload: serde_json::to_value(&used.upload).map_err(ApiError::internal)?,
        created_at: used.version.registered_at.unwrap_or_else(|| app.now()),
        created_by: used.version.registered_by.clone(),
        from_file: true,
    };
    Ok(app.store()?.save_used_mod(&version, used.day).await?)
}

/// Returns the stored version of a mod with that hash, if the server may run it.
pub(crate) async fn find_version(app: &App, name: &str, hash: &str) -> Result<Option<ModVersion>, ApiError> {
    let version = app.store()?.mod_version(name, hash).await?;
    Ok(version.filter(|version| version.from_file || app.config().server.allow_mod_upload))
}

/// Loads a stored version for a run. It runs in the sandbox even if it came from a file, unless the sandbox is off.
pub(crate) async fn load_version(app: &App, version: ModVersion, mod_ref: ModRef) -> Result<SelectedMod, ApiError> {
    let upload: ModUpload = serde_json::from_value(version.upload.clone()).map_err(ApiError::internal)?;
    if version.from_file {
        app.store()?.save_used_mod(&version, app.now().date_naive()).await?;
    }
    let python = app.registry().python();
    let policy = if python.policy == SandboxPolicy::Off { SandboxPolicy::Off } else { SandboxPolicy::All };
    let origin = if version.from_file { ModOrigin::File } else { ModOrigin::Uploaded };
    let factory = import(upload, version.hash, PythonMods { origin, policy, ..python }).await?;
    Ok(SelectedMod { factory: app.registry().with_status(&mod_ref.name, factory), mod_ref })
}
