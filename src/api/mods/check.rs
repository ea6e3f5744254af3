use super::upload::{look_at, try_import};
use super::uploader;
use crate::api::extract::Json;
use crate::api::{ApiError, App, Caller, Kind, Problem};
use crate::mods::python::{LoadError, PythonMods};
use crate::mods::{ModOrigin, ModUpload};
use axum::Extension;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

/// What would become of an upload.
#[derive(Debug, Serialize, ToSchema)]
pub struct Checked {
    /// What is wrong with it; nothing in one that would be registered.
    problems: Vec<Found>,
    /// One sentence, of a mod that would be registered.
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
}

/// Something that is wrong with an upload.
#[derive(Debug, Serialize, ToSchema)]
pub struct Found {
    /// The line of the source, from 1, where there is one.
    line: Option<u32>,
    /// What is wrong, in one line.
    message: String,
    /// Python's traceback, where it says more.
    traceback: Option<String>,
    /// The field that is wrong, e.g. `source`.
    pointer: String,
}

/// Says what is wrong with a mod, as registering it would, and registers nothing. It is imported in a sandbox, so it needs
/// what registering needs.
#[utoipa::path(post, path = "/api/v1/mods/check", tag = "mods",
    request_body(content = Object, content_type = "application/json"),
    responses((status = 200, body = Checked), (status = 403, body = Problem, description = "Uploading is off, or the key may not"),
              (status = 413, body = Problem), (status = 429, body = Problem)))]
pub async fn check(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    body: Result<Json<ModUpload>, ApiError>,
) -> Result<axum::Json<Checked>, ApiError> {
    uploader(&app, caller)?;
    let Json(upload) = body?;
    let wrong = |found| Ok(axum::Json(Checked { problems: vec![found], description: None }));
    if let Err(error) = look_at(&app, &upload) {
        let pointer = error.pointer().unwrap_or_default().to_owned();
        return match error.kind() {
            Kind::BadRequest | Kind::Conflict | Kind::NoRoom => {
                wrong(Found { line: None, message: error.problem().detail, traceback: None, pointer })
            }
            _ => Err(error),
        };
    }
    let python = PythonMods { origin: ModOrigin::Uploaded, ..app.registry().python() };
    match try_import(upload, python).await? {
        Ok(factory) => {
            let description = Some(factory.describe().description);
            Ok(axum::Json(Checked { problems: Vec::new(), description }))
        }
        Err(error) => match (error.line(), error.traceback().map(str::to_owned), error) {
            (line, traceback, LoadError::Failed { message, .. }) => {
                wrong(Found { line, message, traceback, pointer: "source".into() })
            }
            (_, _, error) => Err(ApiError::unavailable(error.to_string())),
        },
    }
}
