//! Enables, disables and removes mods.

use crate::mods::{ModInfo, ModOrigin};
use crate::server::extract::Path;
use crate::server::mods::{find_mod, require_mod_rights, unknown_mod};
use crate::server::{ApiError, App, Caller, Problem};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

/// Enables a mod. Active runs that have stopped calling it do not call it again.
#[utoipa::path(post, path = "/v1/mods/{name}/enable", tag = "mods",
    params(("name" = String, Path, description = "Name of the mod")),
    responses((status = 200, body = ModInfo), (status = 403, body = Problem), (status = 404, body = Problem)))]
pub async fn enable(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Json<ModInfo>, ApiError> {
    set_enabled(&app, &caller, &name, true).await
}

/// Disables a mod. Requests that name it are rejected, and active runs stop calling it from their next event on.
#[utoipa::path(post, path = "/v1/mods/{name}/disable", tag = "mods",
    params(("name" = String, Path, description = "Name of the mod")),
    responses((status = 200, body = ModInfo), (status = 403, body = Problem), (status = 404, body = Problem)))]
pub async fn disable(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Json<ModInfo>, ApiError> {
    set_enabled(&app, &caller, &name, false).await
}

async fn set_enabled(app: &App, caller: &Caller, name: &str, enabled: bool) -> Result<Json<ModInfo>, ApiError> {
    let by = require_mod_rights(caller)?;
    if find_mod(app, name, &caller.scope).await?.is_none() {
        return Err(unknown_mod(app, name));
    }
    // The mod may be harmful, so it is disabled immediately, even if the database is unavailable.
    if !enabled {
        app.registry().set_enabled(name, false);
    }
    let changing = app.lock_mod_changes().await;
    app.store()?.set_mod_enabled(name, enabled, app.now(), by.as_deref()).await?;
    app.registry().set_enabled(name, enabled);
    drop(changing);
    tracing::info!(mod.name = name, by = by.as_deref(), "mod {}", if enabled { "enabled" } else { "disabled" });
    find_mod(app, name, &caller.scope).await?.map(Json).ok_or_else(|| unknown_mod(app, name))
}

/// Deletes an uploaded mod. Its versions are kept for the runs that used them.
#[utoipa::path(delete, path = "/v1/mods/{name}", tag = "mods", params(("name" = String, Path, description = "Name of the mod")),
    responses((status = 204), (status = 403, body = Problem), (status = 404, body = Problem),
              (status = 409, body = Problem, description = "The mod is built in or a file of the server")))]
pub async fn remove(State(app): State<App>, caller: Caller, Path(name): Path<String>) -> Result<StatusCode, ApiError> {
    let by = require_mod_rights(&caller)?;
    let shown = find_mod(&app, &name, &caller.scope).await?.ok_or_else(|| unknown_mod(&app, &name))?;
    let owner = match shown.current.origin {
        ModOrigin::Uploaded => {
            let _changing = app.lock_mod_changes().await;
            app.store()?.remove_mod(&name).await?;
            app.registry().remove(&name);
            app.registry().set_problem(&name, None);
            tracing::info!(mod.name = name, by, "mod removed");
            return Ok(StatusCode::NO_CONTENT);
        }
        ModOrigin::Builtin => "built in".to_owned(),
        ModOrigin::File => format!("the server's own file {}", shown.current.registered_by.as_deref().unwrap_or("")),
    };
    Err(ApiError::conflict(format!(
        "'{name}' is {owner} and cannot be removed; POST /v1/mods/{name}/disable disables it"
    )))
}
