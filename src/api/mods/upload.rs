//! Registers an uploaded mod.

use crate::mods::ModUpload;
use crate::server::extract::Json;
use crate::server::mods::{RegisterModResponse, register_upload, require_upload_rights};
use crate::server::{ApiError, App, Caller, Problem};
use axum::extract::State;

/// Registers a mod or a new version of one: `{name, description?, language: "python", module?, entrypoint?, source}`.
/// `source` is text, or an object that maps paths to texts. The mod is imported in a sandbox before it is registered.
#[utoipa::path(post, path = "/v1/mods", tag = "mods", request_body(content = ModUpload, content_type = "application/json"),
    responses((status = 200, body = RegisterModResponse),
              (status = 400, body = Problem, description = "A field is invalid, or Python's error with its traceback"),
              (status = 403, body = Problem, description = "Uploads are disabled, or the key lacks the right"),
              (status = 409, body = Problem, description = "The name belongs to a built-in mod or a file"),
              (status = 413, body = Problem), (status = 429, body = Problem)))]
pub async fn register(
    State(app): State<App>,
    caller: Caller,
    body: Result<Json<ModUpload>, ApiError>,
) -> Result<axum::Json<RegisterModResponse>, ApiError> {
    let uploader = require_upload_rights(&app, &caller)?;
    let Json(upload) = body?;
    register_upload(&app, uploader, upload).await.map(axum::Json)
}
