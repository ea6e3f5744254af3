//! Versions of mods that are not the present ones: those of files are kept when runs use them, and all of them can be run
//! again.

use super::upload::import_as;
use crate::api::{ApiError, App};
use crate::mods::python::PythonMods;
use crate::mods::python::sandbox::SandboxPolicy;
use crate::mods::{ModOrigin, ModRef, ModUpload, ModUse, SelectedMod, source_store};
use crate::store::ModVersion;
use crate::trace::document::Document;
use serde_json::json;
use std::time::Duration;

/// Mods of one run whose sources are looked for in the data directory.
const MOST_HANDED: usize = 16;
/// Pause before the database is tried again.
const PAUSE: Duration = Duration::from_secs(2);

/// Keeps the versions of files that runs use, from now on until the server stops.
pub fn keep_used(app: &App) {
    let (app, mut uses) = (app.clone(), app.registry().subscribe_uses());
    tokio::spawn(async move {
        loop {
            let used = tokio::select! {
                () = app.stopped() => return,
                used = uses.recv() => used,
            };
            let Some(used) = used else { return };
            while let Err(error) = keep(&app, &used).await {
                tracing::debug!(mod.name = used.name, "a version of a mod is not kept yet: {}", error.problem().detail);
                tokio::select! {
                    () = app.stopped() => return,
                    () = tokio::time::sleep(PAUSE) => {}
                }
            }
        }
    });
}

/// The versions of files that a run says it has used, by name and hash.
#[must_use]
pub fn used_files(document: &Document) -> Vec<(String, String)> {
    let first = document.events.first().and_then(|event| event.measured.as_ref());
    let parameters = first.and_then(|measured| measured.prompt.as_ref()?.parameters.as_ref());
    let mods = parameters.and_then(|parameters| parameters["mods"].as_array()).into_iter().flatten();
    let files = mods.filter(|used| used["origin"] == ModOrigin::File.as_str());
    files.filter_map(|used| Some((used["name"].as_str()?.to_owned(), used["version"].as_str()?.to_owned()))).collect()
}

/// Keeps those of them whose sources lie in the data directory, where the program has put them that ran them.
pub(in crate::api) async fn keep_handed(app: &App, files: Vec<(String, String)>) -> Result<(), ApiError> {
    for (name, hash) in files.iter().take(MOST_HANDED) {
        let (data_dir, wanted) = (app.config().data.dir.clone(), hash.clone());
        let look = move || source_store::load(&data_dir, &wanted);
        let Some(source) = tokio::task::spawn_blocking(look).await.map_err(ApiError::internal)? else { continue };
        let version = ModVersion {
            name: name.clone(),
            hash: hash.clone(),
            upload: json!({ "name": name, "language": "python", "source": source }),
            created_at: app.now(),
            created_by: None,
            from_file: true,
        };
        app.store()?.keep_used_mod(&version, app.now().date_naive()).await?;
    }
    // No more than were looked for: a document may name any number.
    for (_, hash) in files.iter().take(MOST_HANDED) {
        let _ = source_store::remove(&app.config().data.dir, hash);
    }
    Ok(())
}

async fn keep(app: &App, used: &ModUse) -> Result<(), ApiError> {
    let version = ModVersion {
        name: used.name.clone(),
        hash: used.version.hash.clone(),
        upload: json!({ "name": used.name, "language": "python", "source": used.source }),
        created_at: used.version.registered_at.unwrap_or_else(|| app.now()),
        created_by: used.version.registered_by.clone(),
        from_file: true,
    };
    Ok(app.store()?.keep_used_mod(&version, used.day).await?)
}

/// The version of a mod that is kept under that hash, where there is one that may be run.
pub(in crate::api) async fn stored(app: &App, name: &str, hash: &str) -> Result<Option<ModVersion>, ApiError> {
    let versions = app.store()?.mod_versions(name).await?;
    let may_run = |version: &ModVersion| version.from_file || app.config().server.allow_mod_upload;
    Ok(versions.into_iter().find(|version| version.hash == hash).filter(may_run))
}

/// The version, for a run. What comes out of the database runs in the sandbox, also where it was a file once.
pub(in crate::api) async fn used(app: &App, version: ModVersion, mod_ref: ModRef) -> Result<SelectedMod, ApiError> {
    let upload: ModUpload = serde_json::from_value(version.upload.clone()).map_err(ApiError::internal)?;
    if version.from_file {
        app.store()?.keep_used_mod(&version, app.now().date_naive()).await?;
    }
    let python = app.registry().python();
    let policy = if python.policy == SandboxPolicy::Off { SandboxPolicy::Off } else { SandboxPolicy::All };
    let origin = if version.from_file { ModOrigin::File } else { ModOrigin::Uploaded };
    let factory = import_as(upload, PythonMods { origin, policy, ..python }).await?;
    Ok(SelectedMod { mod_ref, factory })
}
