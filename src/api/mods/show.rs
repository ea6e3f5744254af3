use super::unknown;
use crate::api::extract::{Path, Query};
use crate::api::{ApiError, App, Kind, Problem};
use crate::mods::{self, ModInfo, ModOrigin, ModSource, RegisteredVersion};
use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Every mod, with what is known of it.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModList {
    /// By name: `name`, `description`, `language`, `version`, `hash`, `config`, `origin` (`builtin`, `file`, `uploaded`),
    /// `enabled`, `registered_at`, `registered_by`, `earlier`, `calls`, `failures`, `mean_us`, `last_failure`, `problem`.
    #[schema(value_type = Vec<Object>)]
    mods: Vec<ModInfo>,
    /// Sources that are not registered: `file`, `message`, `traceback`, `at`.
    #[schema(value_type = Vec<Object>)]
    problems: Vec<mods::ModProblem>,
}

/// The versions of a mod.
#[derive(Debug, Serialize, ToSchema)]
pub struct VersionList {
    /// The mod.
    pub name: String,
    /// The version that runs take; `null` for a mod that was removed.
    pub current: Option<String>,
    /// Newest first.
    #[schema(value_type = Vec<Object>)]
    pub versions: Vec<RegisteredVersion>,
}

/// Which source to show.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WhichSource {
    /// The hash of the version, or at least 6 of its first digits; without it the one that runs take.
    version: Option<String>,
}

fn all(app: &App) -> ModList {
    ModList { mods: app.registry().list_info(), problems: app.registry().problems() }
}

/// Lists the mods.
#[utoipa::path(get, path = "/v1/mods", tag = "mods", responses((status = 200, body = ModList)))]
pub async fn list(State(app): State<App>) -> Json<ModList> {
    Json(all(&app))
}

/// Lists the mods; the same as `/v1/mods`.
#[utoipa::path(get, path = "/api/v1/mods", tag = "mods", responses((status = 200, body = ModList)))]
pub async fn list_native(State(app): State<App>) -> Json<ModList> {
    Json(all(&app))
}

/// Shows one mod.
#[utoipa::path(get, path = "/v1/mods/{name}", tag = "mods", params(("name" = String, Path, description = "Its name")),
    responses((status = 200, description = "As in the list", body = Object), (status = 404, body = Problem)))]
pub async fn show(State(app): State<App>, Path(name): Path<String>) -> Result<Json<ModInfo>, ApiError> {
    app.registry().info(&name).map(Json).ok_or_else(|| unknown(&app, &name))
}

/// Lists the versions of a mod: those that were uploaded, those of a file that runs have used, and those of a file since
/// the server's start.
#[utoipa::path(get, path = "/v1/mods/{name}/versions", tag = "mods",
    params(("name" = String, Path, description = "Its name")),
    responses((status = 200, body = VersionList), (status = 404, body = Problem)))]
pub async fn versions(State(app): State<App>, Path(name): Path<String>) -> Result<Json<VersionList>, ApiError> {
    versions_of(&app, name).await.map(Json)
}

/// The versions of a mod.
///
/// # Errors
/// There is no such mod and never was, or the database failed.
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
        return Err(unknown(app, &name));
    }
    // What runs take comes first, also where it was registered before.
    versions.sort_by_key(|version| std::cmp::Reverse((current.as_ref() == Some(&version.hash), version.registered_at)));
    Ok(VersionList { name, current, versions })
}

/// Shows a mod's source: a text, or for a package JSON, an object from path to text.
#[utoipa::path(get, path = "/v1/mods/{name}/source", tag = "mods",
    params(("name" = String, Path, description = "Its name"), WhichSource),
    responses((status = 200, description = "The source", content_type = "text/x-python"),
              (status = 400, body = Problem, description = "Several versions begin like that"), (status = 404, body = Problem)))]
pub async fn source(
    State(app): State<App>,
    Path(name): Path<String>,
    Query(which): Query<WhichSource>,
) -> Result<Response, ApiError> {
    Ok(match source_of(&app, &name, which.version).await? {
        // Never as a page: a browser shows it and runs nothing.
        ModSource::Text(text) => ([(header::CONTENT_TYPE, "text/x-python; charset=utf-8")], text).into_response(),
        ModSource::Files(files) => Json(files).into_response(),
    })
}

/// The source of a version; without one of that which runs take.
///
/// # Errors
/// No such mod or version, several versions that begin like that, a mod without source, or the database failed.
pub async fn source_of(app: &App, name: &str, version: Option<String>) -> Result<ModSource, ApiError> {
    let current = app.registry().get(name);
    let Some(wanted) = version else {
        let factory = current.ok_or_else(|| unknown(app, name))?;
        let text = factory.source_text();
        let text = text.ok_or_else(|| ApiError::new(Kind::NotFound, format!("'{name}' is a built-in mod")))?;
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
            let message = format!("{} versions of '{name}' begin with {wanted}; give more digits", others + 1);
            Err(ApiError::invalid("version", message))
        }
        (None, _) => {
            let detail = format!("no source of a version {wanted} of '{name}' is kept");
            Err(ApiError::new(Kind::NotFound, detail))
        }
    }
}
