//! Parts of requests that several routes of this folder share.

use serde::Deserialize;

/// The query parameter that selects a model on routes without a body.
#[derive(Debug, Deserialize)]
pub(super) struct ModelParams {
    pub(super) model: Option<String>,
}
