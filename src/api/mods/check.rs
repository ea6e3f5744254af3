//! Validates an upload without registering it.

use crate::mods::python::{LoadError, last_location};
use crate::mods::{ModFactory, ModSource, ModUpload};
use crate::server::extract::Json;
use crate::server::mods::{ImportError, import, python_for_uploads, require_upload_rights, validate_upload};
use crate::server::{ApiError, App, Caller, ErrorKind, Problem};
use axum::extract::State;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// Result of checking an upload.
#[derive(Debug, Serialize, ToSchema)]
pub struct CheckResponse {
    /// The problems found; empty if the mod can be registered.
    problems: Vec<CheckProblem>,
    /// The mod's description, if it can be registered.
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
}

/// A problem of an upload.
#[derive(Debug, Serialize, ToSchema)]
pub struct CheckProblem {
    /// The file of the package that has the problem, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    /// Line of the source or of the file, from 1, if known.
    line: Option<u32>,
    /// The problem in one line.
    message: String,
    /// Python's traceback, if there is one.
    traceback: Option<String>,
    /// The invalid field, e.g. `source`.
    pointer: String,
}

/// Validates a mod as registration would, without registering it. The mod is imported in a sandbox, so the same rights
/// are required.
#[utoipa::path(post, path = "/api/v1/mods/check", tag = "mods",
    request_body(content = ModUpload, content_type = "application/json"),
    responses((status = 200, body = CheckResponse), (status = 403, body = Problem, description = "Uploads are disabled, or the key lacks the right"),
              (status = 413, body = Problem), (status = 429, body = Problem)))]
pub async fn check(
    State(app): State<App>,
    caller: Caller,
    body: Result<Json<ModUpload>, ApiError>,
) -> Result<axum::Json<CheckResponse>, ApiError> {
    require_upload_rights(&app, &caller)?;
    let Json(upload) = body?;
    Ok(axum::Json(match validate_and_import(&app, upload).await? {
        Ok(factory) => CheckResponse { problems: Vec::new(), description: Some(factory.describe().description) },
        Err(problem) => CheckResponse { problems: vec![problem], description: None },
    }))
}

/// Validates an upload and imports it in a sandbox. Problems of the upload are returned as the inner error.
pub(super) async fn validate_and_import(
    app: &App,
    upload: ModUpload,
) -> Result<Result<Arc<dyn ModFactory>, CheckProblem>, ApiError> {
    if let Err(error) = validate_upload(app, &upload) {
        let pointer = error.pointer().unwrap_or_default().to_owned();
        return match error.kind() {
            ErrorKind::BadRequest | ErrorKind::Conflict | ErrorKind::NoRoom => Ok(Err(CheckProblem {
                file: None,
                line: None,
                message: error.problem().detail,
                traceback: None,
                pointer,
            })),
            _ => Err(error),
        };
    }
    let files: Vec<String> = match &upload.source {
        ModSource::Text(_) => Vec::new(),
        ModSource::Files(files) => files.keys().cloned().collect(),
    };
    let hash = upload.hash();
    match import(upload, hash, python_for_uploads(app)).await {
        Ok(factory) => Ok(Ok(factory)),
        Err(ImportError::Load(ref error @ LoadError::Failed { ref message, .. })) => {
            let traceback = error.traceback().map(str::to_owned);
            let paths = files.iter().map(String::as_str);
            let location = traceback.as_deref().and_then(|traceback| last_location(paths, traceback));
            let (file, line) =
                location.map_or((None, error.line()), |(file, line)| (Some(file.to_owned()), Some(line)));
            Ok(Err(CheckProblem { file, line, message: message.clone(), traceback, pointer: "source".into() }))
        }
        Err(error) => Err(error.into()),
    }
}
