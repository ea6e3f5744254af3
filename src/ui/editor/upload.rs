//! The upload that a save of the editor sends.

use crate::mods::{ModUpload, version_of};
use crate::server::{ApiError, App};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The form fields sent by browsers without scripts.
#[derive(Debug, Deserialize)]
pub(in crate::ui) struct EditorForm {
    pub name: String,
    pub source: String,
    /// The displayed version.
    #[serde(default)]
    pub version: String,
}

/// Returns the upload of a form: this source with the other fields of the displayed version of the mod `displayed`.
pub(super) async fn upload_of(
    app: &App,
    displayed: Option<&str>,
    submitted: &EditorForm,
    source: String,
) -> Result<ModUpload, ApiError> {
    let mut upload = match displayed {
        Some(name) => stored_fields(app, name, &submitted.version).await?.unwrap_or_default(),
        None => Map::new(),
    };
    upload.insert("name".to_owned(), submitted.name.as_str().into());
    upload.insert("source".to_owned(), source.into());
    serde_json::from_value(Value::Object(upload)).map_err(ApiError::internal)
}

/// Returns the fields of the current or a stored version, without its source.
pub(super) async fn stored_fields(app: &App, name: &str, hash: &str) -> Result<Option<Map<String, Value>>, ApiError> {
    // The version of a file is not stored before a run uses it.
    let current = app.registry().get(name).filter(|factory| version_of(&**factory) == hash);
    let upload = if let Some(upload) = current.as_ref().and_then(|factory| factory.upload()) {
        Some(serde_json::to_value(upload).map_err(ApiError::internal)?)
    } else {
        app.store()?.mod_version(name, hash).await?.map(|version| version.upload)
    };
    Ok(upload.and_then(|upload| match upload {
        Value::Object(mut fields) => {
            fields.remove("source");
            Some(fields)
        }
        _ => None,
    }))
}
