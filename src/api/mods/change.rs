use super::{changer, unknown};
use crate::api::extract::Path;
use crate::api::{ApiError, App, Caller, Problem};
use crate::mods::{ModInfo, ModOrigin};
use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};

/// Switches a mod on. Runs that are going on call it again at their next event.
#[utoipa::path(post, path = "/v1/mods/{name}/enable", tag = "mods",
    params(("name" = String, Path, description = "Its name")),
    responses((status = 200, description = "The mod", body = Object), (status = 403, body = Problem), (status = 404, body = Problem)))]
pub async fn enable(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    Path(name): Path<String>,
) -> Result<Json<ModInfo>, ApiError> {
    switch(&app, caller, &name, true).await
}

/// Switches a mod off. Requests that name it are refused, and runs that are going on call it no more from their next event on.
#[utoipa::path(post, path = "/v1/mods/{name}/disable", tag = "mods",
    params(("name" = String, Path, description = "Its name")),
    responses((status = 200, description = "The mod", body = Object), (status = 403, body = Problem), (status = 404, body = Problem)))]
pub async fn disable(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    Path(name): Path<String>,
) -> Result<Json<ModInfo>, ApiError> {
    switch(&app, caller, &name, false).await
}

async fn switch(
    app: &App,
    caller: Option<Extension<Caller>>,
    name: &str,
    enabled: bool,
) -> Result<Json<ModInfo>, ApiError> {
    let by = changer(app, caller)?;
    if app.registry().info(name).is_none() {
        return Err(unknown(app, name));
    }
    // A mod that does harm is off at once, whether the database is there or not.
    if !enabled {
        app.registry().enable(name, false);
    }
    app.store()?.enable_mod(name, enabled, app.now(), by.as_deref()).await?;
    app.registry().enable(name, enabled);
    tracing::info!(mod.name = name, by = by.as_deref(), "the mod is switched {}", if enabled { "on" } else { "off" });
    app.registry().info(name).map(Json).ok_or_else(|| unknown(app, name))
}

/// Removes an uploaded mod. Its versions are kept for the runs that ran with them.
#[utoipa::path(delete, path = "/v1/mods/{name}", tag = "mods", params(("name" = String, Path, description = "Its name")),
    responses((status = 204), (status = 403, body = Problem), (status = 404, body = Problem),
              (status = 409, body = Problem, description = "It is built in, or a file of the server's")))]
pub async fn remove(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    let by = changer(&app, caller)?;
    let shown = app.registry().info(&name).ok_or_else(|| unknown(&app, &name))?;
    let where_it_is = match shown.current.origin {
        ModOrigin::Uploaded => {
            let _changing = app.mods_changing().await;
            app.store()?.remove_mod(&name).await?;
            app.registry().remove(&name);
            app.registry().set_problem(&name, None);
            tracing::info!(mod.name = name, by, "the mod is removed");
            return Ok(StatusCode::NO_CONTENT);
        }
        ModOrigin::Builtin => "built in".to_owned(),
        ModOrigin::File => format!("the server's own file {}", shown.current.registered_by.as_deref().unwrap_or("")),
    };
    Err(ApiError::conflict(format!(
        "'{name}' is {where_it_is} and cannot be removed; POST /v1/mods/{name}/disable switches it off"
    )))
}
