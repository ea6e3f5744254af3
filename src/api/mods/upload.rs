use super::uploader;
use crate::api::extract::Json;
use crate::api::{ApiError, App, Caller, Kind, Problem};
use crate::mods::python::LoadError;
use crate::mods::{self, ModFactory, ModOrigin, ModUpload, RegisteredVersion};
use crate::store::ModVersion;
use axum::Extension;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::sync::Arc;
use tokio::sync::Semaphore;
use utoipa::ToSchema;

/// Uploads that are imported at once; each takes a process.
static CHECKS: Semaphore = Semaphore::const_new(2);
/// Uploads that may wait for their turn.
const MOST_WAITING: usize = 8;
/// Mods that clients may have uploaded.
const MOST_MODS: usize = 500;

/// What became of an upload.
#[derive(Debug, Serialize, ToSchema)]
pub struct Registered {
    /// What runs call it.
    pub name: String,
    /// Whether it takes the place of an earlier version.
    replaced: bool,
    /// Whether that is the same version, sent again.
    unchanged: bool,
    /// One sentence.
    description: String,
    /// SHA-256 of the source.
    hash: String,
    /// Whether runs can name it: a new version of a mod that is switched off is off, too.
    enabled: bool,
}

/// Registers a mod, or a new version of one: `{name, description?, language: "python", module?, entrypoint, source}`, where
/// `source` is a text, or an object from path to text. It is imported in a sandbox before it is taken.
#[utoipa::path(post, path = "/v1/mods", tag = "mods", request_body(content = Object, content_type = "application/json"),
    responses((status = 200, body = Registered),
              (status = 400, body = Problem, description = "A field is wrong, or Python's error with its traceback"),
              (status = 403, body = Problem, description = "Uploading is off, or the key may not"),
              (status = 409, body = Problem, description = "The name is a built-in mod's or a file's"),
              (status = 413, body = Problem), (status = 429, body = Problem)))]
pub async fn register(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    body: Result<Json<ModUpload>, ApiError>,
) -> Result<axum::Json<Registered>, ApiError> {
    let by = uploader(&app, caller)?;
    let Json(upload) = body?;
    take(&app, by, upload).await.map(axum::Json)
}

/// Registers what somebody who may upload has sent.
///
/// # Errors
/// What [`register`] answers.
pub async fn take(app: &App, by: Option<String>, upload: ModUpload) -> Result<Registered, ApiError> {
    let name = look_at(app, &upload)?;
    let store = app.store()?;
    let factory = import(app, upload.clone()).await?;
    let described = factory.describe();
    let version = ModVersion {
        name: name.clone(),
        hash: mods::version_of(&*factory),
        upload: serde_json::to_value(&upload).map_err(ApiError::internal)?,
        created_at: app.now(),
        created_by: by.clone(),
        from_file: false,
    };
    let changing = app.mods_changing().await;
    store.save_mod(&version).await?;
    let hash = version.hash.clone();
    let unchanged = app.registry().info(&name).is_some_and(|shown| shown.current.hash == hash);
    let current = as_version(version.hash, version.created_at, by);
    let replaced = app.registry().register(factory, current).map_err(|error| is_taken(&error))?;
    drop(changing);
    app.registry().set_problem(&name, None);
    tracing::info!(mod.name = name, mod.version = hash, by = version.created_by, "a mod was uploaded");
    let enabled = app.registry().info(&name).is_some_and(|shown| shown.enabled);
    Ok(Registered { name, replaced, unchanged, description: described.description, hash, enabled })
}

/// Everything about an upload that can be known without running it; its name.
pub(super) fn look_at(app: &App, upload: &ModUpload) -> Result<String, ApiError> {
    upload.check().map_err(|wrong| ApiError::invalid(wrong.field, wrong.message))?;
    let name = upload.name().map_err(|wrong| ApiError::invalid(wrong.field, wrong.message))?.to_owned();
    app.registry().check_name(&name, ModOrigin::Uploaded, None).map_err(|error| is_taken(&error))?;
    let uploaded =
        app.registry().list_info().iter().filter(|shown| shown.current.origin == ModOrigin::Uploaded).count();
    if uploaded >= MOST_MODS && app.registry().info(&name).is_none() {
        let detail = format!("{uploaded} mods are uploaded, and there may be no more; remove one first");
        return Err(ApiError::new(Kind::NoRoom, detail));
    }
    Ok(name)
}

fn is_taken(error: &mods::NameTaken) -> ApiError {
    ApiError::conflict(error.to_string()).at("name")
}

pub(super) fn as_version(hash: String, at: DateTime<Utc>, by: Option<String>) -> RegisteredVersion {
    RegisteredVersion { hash, origin: ModOrigin::Uploaded, registered_at: Some(at), registered_by: by }
}

/// Imports a source in a worker, as somebody else's.
pub(super) async fn import(app: &App, upload: ModUpload) -> Result<Arc<dyn ModFactory>, ApiError> {
    import_as(upload, mods::python::PythonMods { origin: ModOrigin::Uploaded, ..app.registry().python() }).await
}

/// Imports a source in a worker, as those mods run.
pub(super) async fn import_as(
    upload: ModUpload,
    python: mods::python::PythonMods,
) -> Result<Arc<dyn ModFactory>, ApiError> {
    try_import(upload, python).await?.map_err(|error| match &error {
        LoadError::Failed { .. } => {
            let detail = match error.traceback() {
                Some(traceback) => format!("{error}\n{}", traceback.trim_end()),
                None => error.to_string(),
            };
            ApiError::invalid("source", detail).code("mod_failed")
        }
        // What is missing is the server's to have.
        _ => ApiError::unavailable(error.to_string()),
    })
}

/// The same; what Python says of the source comes as it is.
pub(super) async fn try_import(
    upload: ModUpload,
    python: mods::python::PythonMods,
) -> Result<Result<Arc<dyn ModFactory>, LoadError>, ApiError> {
    static WAITING: Semaphore = Semaphore::const_new(MOST_WAITING);
    let busy = || ApiError::new(Kind::Busy, "too many mods are being checked at the moment").retry_after(1);
    let _waits = WAITING.try_acquire().map_err(|_| busy())?;
    let _turn = CHECKS.acquire().await.map_err(|_| busy())?;
    tokio::task::spawn_blocking(move || upload.load(&python)).await.map_err(ApiError::internal)
}
