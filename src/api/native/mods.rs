//! `/api/v1/mods`: the mods that runs can name.

use crate::api::App;
use crate::mods::Description;
use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

/// The mods that runs can name.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModList {
    /// By name.
    #[schema(value_type = Vec<Object>)]
    mods: Vec<Description>,
}

/// Lists the mods that runs can name.
#[utoipa::path(get, path = "/api/v1/mods", tag = "mods", responses((status = 200, body = ModList)))]
pub async fn list(State(app): State<App>) -> Json<ModList> {
    Json(ModList { mods: app.registry().list() })
}
