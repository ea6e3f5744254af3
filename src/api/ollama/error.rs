//! Errors in Ollama's format.

use crate::api::shared::error::protocol_error;
use crate::server::ApiError;
use serde::Serialize;
use utoipa::ToSchema;

protocol_error! {
    /// An [`ApiError`] in Ollama's format.
    OllamaError, ollama, "application/json; charset=utf-8"
}

/// An error response in Ollama's format.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OllamaErrorResponse {
    /// Cause of the error, and the expected value.
    error: String,
}

impl ApiError {
    /// Returns the error in Ollama's format. Logs the cause of an internal error.
    #[must_use]
    pub fn ollama(&self) -> OllamaErrorResponse {
        OllamaErrorResponse { error: self.public_detail() }
    }
}
