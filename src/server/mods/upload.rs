//! Validates and registers uploads.

use super::run_with_permits;
use crate::mods::python::LoadError;
use crate::mods::{self, ModFactory, ModOrigin, ModUpload, RegisteredVersion};
use crate::server::{ApiError, App, ErrorCode, ErrorKind};
use crate::store::ModVersion;
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::sync::Arc;
use tokio::sync::Semaphore;
use utoipa::ToSchema;

/// Permits for concurrent imports, each of which runs a process.
static IMPORT_PERMITS: Semaphore = Semaphore::const_new(2);
/// Maximum uploads that are imported or wait for it.
const MAX_WAITING_UPLOADS: usize = 8;
/// Maximum uploaded mods.
const MAX_UPLOADED_MODS: usize = 500;

/// Result of an upload.
#[derive(Debug, Serialize, ToSchema)]
pub struct RegisterModResponse {
    /// Name by which runs refer to the mod.
    pub name: String,
    /// True if it replaced an earlier version.
    replaced: bool,
    /// True if the same version was uploaded again.
    unchanged: bool,
    /// The mod's description.
    description: String,
    /// Hash of the version: SHA-256 of the source, and of module and entrypoint if the upload names them.
    hash: String,
    /// True if runs can use it; a new version of a disabled mod is disabled too.
    enabled: bool,
}

/// Registers an upload by a caller with upload rights.
///
/// # Errors
/// The upload is invalid, its name is taken, or Python failed to import it.
pub async fn register_upload(
    app: &App,
    by: Option<String>,
    upload: ModUpload,
) -> Result<RegisterModResponse, ApiError> {
    let name = validate_upload(app, &upload)?;
    let store = app.store()?;
    let factory = import(upload.clone(), upload.hash(), python_for_uploads(app)).await?;
    let described = factory.describe();
    let version = ModVersion {
        name: name.clone(),
        hash: mods::version_of(&*factory),
        upload: serde_json::to_value(&upload).map_err(ApiError::internal)?,
        created_at: app.now(),
        created_by: by.clone(),
        from_file: false,
    };
    let changing = app.lock_mod_changes().await;
    // A mod of that name may have been registered during the import.
    check_name(app, &name)?;
    store.save_mod(&version).await?;
    let hash = version.hash.clone();
    let unchanged = app.registry().info(&name, None).is_some_and(|shown| shown.current.hash == hash);
    let current = uploaded_version(version.hash, version.created_at, by);
    let replaced = app.registry().register(factory, current).map_err(|error| name_conflict(&error))?;
    drop(changing);
    app.registry().set_problem(&name, None);
    tracing::info!(mod.name = name, mod.version = hash, by = version.created_by, "mod uploaded");
    let enabled = app.registry().info(&name, None).is_some_and(|shown| shown.enabled);
    Ok(RegisterModResponse { name, replaced, unchanged, description: described.description, hash, enabled })
}

/// Validates an upload without running it, and returns its name.
pub(crate) fn validate_upload(app: &App, upload: &ModUpload) -> Result<String, ApiError> {
    upload.check().map_err(|wrong| ApiError::invalid(wrong.field, wrong.message))?;
    let name = upload.name().map_err(|wrong| ApiError::invalid(wrong.field, wrong.message))?.to_owned();
    check_name(app, &name)?;
    Ok(name)
}

/// Checks that an upload may have the name, and that a new mod is within the limit.
fn check_name(app: &App, name: &str) -> Result<(), ApiError> {
    app.registry().check_name(name, ModOrigin::Uploaded, None).map_err(|error| name_conflict(&error))?;
    let uploaded =
        app.registry().list_info(None).iter().filter(|shown| shown.current.origin == ModOrigin::Uploaded).count();
    if uploaded >= MAX_UPLOADED_MODS && app.registry().get(name).is_none() {
        let detail = format!("the limit of {MAX_UPLOADED_MODS} uploaded mods is reached; remove one first");
        return Err(ApiError::new(ErrorKind::NoRoom, detail));
    }
    Ok(())
}

fn name_conflict(error: &mods::NameTaken) -> ApiError {
    ApiError::conflict(error.to_string()).at("name")
}

pub(crate) fn uploaded_version(hash: String, at: DateTime<Utc>, by: Option<String>) -> RegisteredVersion {
    RegisteredVersion { hash, origin: ModOrigin::Uploaded, registered_at: Some(at), registered_by: by }
}

/// Returns the settings with which uploads run.
pub(crate) fn python_for_uploads(app: &App) -> mods::python::PythonMods {
    mods::python::PythonMods { origin: ModOrigin::Uploaded, ..app.registry().python() }
}

/// The reason why a source was not imported.
pub(crate) enum ImportError {
    /// The server did not run the import.
    Server(ApiError),
    /// Python did not load the source.
    Load(LoadError),
}

impl From<ImportError> for ApiError {
    fn from(error: ImportError) -> Self {
        match error {
            ImportError::Server(error) => error,
            ImportError::Load(error @ LoadError::Failed { .. }) => {
                let detail = match error.traceback() {
                    Some(traceback) => format!("{error}\n{}", traceback.trim_end()),
                    None => error.to_string(),
                };
                Self::invalid("source", detail).code(ErrorCode::ModFailed)
            }
            // The server lacks a requirement of Python mods.
            ImportError::Load(error) => Self::unavailable(error.to_string()),
        }
    }
}

/// Imports a version of a mod in a worker. `hash` is that of [`ModUpload::load`].
pub(crate) async fn import(
    upload: ModUpload,
    hash: String,
    python: mods::python::PythonMods,
) -> Result<Arc<dyn ModFactory>, ImportError> {
    static WAITING: Semaphore = Semaphore::const_new(MAX_WAITING_UPLOADS);
    let busy = || {
        let busy = ApiError::new(ErrorKind::Busy, "too many mods are being checked; try again later");
        ImportError::Server(busy.retry_after(1))
    };
    let waiting = WAITING.try_acquire().map_err(|_| busy())?;
    let importing = IMPORT_PERMITS.acquire().await.map_err(|_| busy())?;
    let loaded = run_with_permits((waiting, importing), move || upload.load(hash, &python)).await;
    loaded.map_err(ImportError::Server)?.map_err(ImportError::Load)
}
