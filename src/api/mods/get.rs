//! Lists mods, and returns one mod, its versions and its source.

use crate::events::Scope;
use crate::mods::{ModInfo, ModProblem, ModSource};
use crate::server::extract::{Path, Query};
use crate::server::mods::{VersionList, find_mod, source_of, unknown_mod, versions_of};
use crate::server::{ApiError, App, Problem};
use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// All mods with their configuration and statistics.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModList {
    /// The mods, sorted by name.
    mods: Vec<ModInfo>,
    /// Sources that failed to load.
    problems: Vec<ModProblem>,
}

/// Query parameters of the source.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SourceParams {
    /// Hash of the version, or at least its first 6 digits; default is the version that new runs use.
    version: Option<String>,
}

fn mod_list(app: &App, scope: &Scope) -> ModList {
    ModList { mods: app.registry().list_info(Some(scope)), problems: app.registry().problems() }
}

/// Lists the mods.
#[utoipa::path(get, path = "/v1/mods", tag = "mods", responses((status = 200, body = ModList)))]
pub async fn list(State(app): State<App>, scope: Scope) -> Json<ModList> {
    Json(mod_list(&app, &scope))
}

/// Lists the mods, like `/v1/mods`.
#[utoipa::path(get, path = "/api/v1/mods", tag = "mods", responses((status = 200, body = ModList)))]
pub async fn list_native(State(app): State<App>, scope: Scope) -> Json<ModList> {
    Json(mod_list(&app, &scope))
}

/// Returns one mod.
#[utoipa::path(get, path = "/v1/mods/{name}", tag = "mods", params(("name" = String, Path, description = "Name of the mod")),
    responses((status = 200, body = ModInfo), (status = 404, body = Problem)))]
pub async fn show(State(app): State<App>, scope: Scope, Path(name): Path<String>) -> Result<Json<ModInfo>, ApiError> {
    find_mod(&app, &name, &scope).await?.map(Json).ok_or_else(|| unknown_mod(&app, &name))
}

/// Lists the versions of a mod: uploads, versions of a file that runs have used, and versions of a file since the
/// server's start.
#[utoipa::path(get, path = "/v1/mods/{name}/versions", tag = "mods",
    params(("name" = String, Path, description = "Name of the mod")),
    responses((status = 200, body = VersionList), (status = 404, body = Problem)))]
pub async fn versions(
    State(app): State<App>,
    scope: Scope,
    Path(name): Path<String>,
) -> Result<Json<VersionList>, ApiError> {
    versions_of(&app, name, &scope).await.map(Json)
}

/// Returns the source of a mod: text, or for a package a JSON object that maps paths to texts.
#[utoipa::path(get, path = "/v1/mods/{name}/source", tag = "mods",
    params(("name" = String, Path, description = "Name of the mod"), SourceParams),
    responses((status = 200, description = "The source", content_type = "text/x-python"),
              (status = 400, body = Problem, description = "Several versions match the prefix"), (status = 404, body = Problem)))]
pub async fn source(
    State(app): State<App>,
    Path(name): Path<String>,
    Query(params): Query<SourceParams>,
) -> Result<Response, ApiError> {
    let (_, source) = source_of(&app, &name, params.version).await?;
    Ok(match source {
        // With `text/x-python`, browsers do not interpret the source as a page.
        ModSource::Text(text) => ([(header::CONTENT_TYPE, "text/x-python; charset=utf-8")], text).into_response(),
        ModSource::Files(files) => Json(files).into_response(),
    })
}
