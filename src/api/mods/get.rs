use super::unknown_mod;
use crate::api::extract::{Path, Query};
use crate::api::{ApiError, App, ErrorKind, Problem};
use crate::mods::{self, ModInfo, ModOrigin, ModSource, RegisteredVersion};
use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// All mods with their configuration and statistics.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModList {
    /// Sorted by name. Fields: `name`, `description`, `language`, `version`, `hash`, `config`, `origin` (`builtin`,
    /// `file`, `uploaded`), `enabled`, `registered_at`, `registered_by`, `earlier`, `calls`, `failures`, `mean_us`,
    /// `last_failure`, `problem`.
    #[schema(value_type = Vec<Object>)]
    mods: Vec<ModInfo>,
    /// Sources that failed to load: `file`, `message`, `traceback`, `at`.
    #[schema(value_type = Vec<Object>)]
    problems: Vec<mods::ModProblem>,
}

/// The versions of a mod.
#[derive(Debug, Serialize, ToSchema)]
pub struct VersionList {
    /// Name of the mod.
    pub name: String,
    /// Hash of the version that runs use; `null` for a deleted mod.
    pub current: Option<String>,
    /// Newest first.
    #[schema(value_type = Vec<Object>)]
    pub versions: Vec<RegisteredVersion>,
}

/// Query parameters of the source.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SourceParams {
    /// Hash of the version, or its first 6 or more digits; default is the version that runs use.
    version: Option<String>,
}

fn mod_list(app: &App) -> ModList {
    ModList { mods: app.registry().list_info(), problems: app.registry().problems() }
}

/// Lists the mods.
#[utoipa::path(get, path = "/v1/mods", tag = "mods", responses((status = 200, body = ModList)))]
pub async fn list(State(app): State<App>) -> Json<ModList> {
    Json(mod_list(&app))
}

/// Lists the mods, like `/v1/mods`.
#[utoipa::path(get, path = "/api/v1/mods", tag = "mods", responses((status = 200, body = ModList)))]
pub async fn list_native(State(app): State<App>) -> Json<ModList> {
    Json(mod_list(&app))
}

/// Returns one mod.
#[utoipa::path(get, path = "/v1/mods/{name}", tag = "mods", params(("name" = String, Path, description = "Name of the mod")),
    responses((status = 200, description = "Same fields as in the list", body = Object), (status = 404, body = Problem)))]
pub async fn show(State(app): State<App>, Path(name): Path<String>) -> Result<Json<ModInfo>, ApiError> {
    app.registry().info(&name).map(Json).ok_or_else(|| unknown_mod(&app, &name))
}

/// Lists the versions of a mod: uploads, versions of a file that runs have used, and versions of a file since the
/// server's start.
#[utoipa::path(get, path = "/v1/mods/{name}/versions", tag = "mods",
    params(("name" = String, Path, description = "Name of the mod")),
    responses((status = 200, body = VersionList), (status = 404, body = Problem)))]
pub async fn versions(State(app): State<App>, Path(name): Path<String>) -> Result<Json<VersionList>, ApiError> {
    versions_of(&app, name).await.map(Json)
}

/// Returns the versions of a mod.
///
/// # Errors
/// The mod never existed, or the database failed.
pub async fn versions_of(app: &App, name: String) -> Result<VersionList, ApiError> {
    let shown = app.registry().info(&name);
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

/// Returns the source of a mod: text, or for a package a JSON object that maps paths to texts.
#[utoipa::path(get, path = "/v1/mods/{name}/source", tag = "mods",
    params(("name" = String, Path, description = "Name of the mod"), SourceParams),
    responses((status = 200, description = "The source", content_type = "text/x-python"),
              (status = 400, body = Problem, description = "Several versions match the prefix"), (status = 404, body = Problem)))]
pub async fn source(
    State(app): State<App>,
    Path(name): Path<String>,
    Query(which): Query<SourceParams>,
) -> Result<Response, ApiError> {
    Ok(match source_of(&app, &name, which.version).await? {
        // `text/x-python` keeps browsers from running the source as a page.
        ModSource::Text(text) => ([(header::CONTENT_TYPE, "text/x-python; charset=utf-8")], text).into_response(),
        ModSource::Files(files) => Json(files).into_response(),
    })
}

/// Returns the source of a version; default is the version that runs use.
///
/// # Errors
/// Unknown mod or version, an ambiguous prefix, a mod without source, or the database failed.
pub async fn source_of(app: &App, name: &str, version: Option<String>) -> Result<ModSource, ApiError> {
    let current = app.registry().get(name);
    let Some(wanted) = version else {
        let factory = current.ok_or_else(|| unknown_mod(app, name))?;
        let text = factory.source_text();
        let text = text.ok_or_else(|| ApiError::new(ErrorKind::NotFound, format!("'{name}' is a built-in mod")))?;
        return serde_json::from_value(text).map_err(ApiError::internal);
    };
    if wanted.len() < 6 || !wanted.chars().all(|c| c.is_ascii_hexdigit()) {
        return Err(ApiError::invalid("version", "version must be 6 to 64 hexadecimal digits"));
    }
    let is_wanted = |hash: &str| hash.starts_with(&wanted.to_ascii_lowercase());
    if let Some(factory) = current.filter(|factory| is_wanted(&mods::version_of(&**factory)))
        && let Some(text) = factory.source_text()
    {
        return serde_json::from_value(text).map_err(ApiError::internal);
    }
    let mut stored = app.store()?.mod_versions(name).await?;
    stored.retain(|version| is_wanted(&version.hash));
    match (stored.pop(), stored.len()) {
        (Some(mut version), 0) => serde_json::from_value(version.upload["source"].take()).map_err(ApiError::internal),
        (Some(_), others) => {
            let message = format!("{} versions of '{name}' start with {wanted}; send more digits", others + 1);
            Err(ApiError::invalid("version", message))
        }
        (None, _) => {
            let detail = format!("no source of version {wanted} of '{name}' is stored");
            Err(ApiError::new(ErrorKind::NotFound, detail))
        }
    }
}
