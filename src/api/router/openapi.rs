//! The `OpenAPI` document: the declarations of the routers, completed so that the document is valid and clients can be
//! generated from it.

use axum::http::StatusCode;
use bytes::Bytes;
use serde_json::{Map, Value};
use utoipa::openapi::{OpenApi, Server};

/// Path of the document.
pub(super) const PATH: &str = "/api/v1/openapi.json";

/// Returns the document for a server whose paths start with `prefix`, which may be empty.
pub(super) fn document(mut declared: OpenApi, prefix: &str) -> Bytes {
    if !prefix.is_empty() {
        declared.servers = Some(vec![Server::new(prefix)]);
    }
    let mut document = serde_json::to_value(declared).unwrap_or_default();
    for (path, item) in members(document.get_mut("paths")) {
        for (method, operation) in members(Some(item)) {
            complete(operation, method, path);
        }
    }
    document.to_string().into()
}

fn members(value: Option<&mut Value>) -> impl Iterator<Item = (&String, &mut Value)> {
    value.and_then(Value::as_object_mut).into_iter().flat_map(Map::iter_mut)
}

/// Sets a unique operation id, and describes responses without a description with the reason phrase of their status.
fn complete(operation: &mut Value, method: &str, path: &str) {
    // `GET /api/v1/runs/{id}` becomes `get_api_v1_runs_id`. The default, the handler's name, is not unique.
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let id: Vec<&str> = std::iter::once(method).chain(words).collect();
    operation["operationId"] = id.join("_").into();
    for (status, response) in members(operation.get_mut("responses")) {
        let phrase = StatusCode::from_bytes(status.as_bytes()).ok().and_then(|status| status.canonical_reason());
        if let Some(response) = response.as_object_mut().filter(|response| !response.contains_key("$ref")) {
            response.entry("description").or_insert_with(|| phrase.unwrap_or("Response").into());
        }
    }
}
