//! Parts of requests that several routes of this folder share.

use serde::Deserialize;
use serde_json::Value;

/// The query parameter that selects a model on routes without a body.
#[derive(Debug, Deserialize)]
pub(super) struct ModelParams {
    pub(super) model: Option<String>,
}

/// Returns true for null and for an empty list.
pub(super) fn is_null_or_empty(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}
