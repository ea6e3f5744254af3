//! Errors in `KoboldCPP`'s format: `{"detail": {"msg": text, "type": word}}`.

use crate::server::{ApiError, ErrorKind};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An [`ApiError`] in `KoboldCPP`'s format.
#[derive(Debug, Clone)]
pub struct KoboldError(pub ApiError);

impl<E: Into<ApiError>> From<E> for KoboldError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl KoboldError {
    /// Renders an error in this format.
    pub fn render(error: ApiError) -> Response {
        Self(error).into_response()
    }
}

impl IntoResponse for KoboldError {
    fn into_response(self) -> Response {
        let body = to_json(&self.0).to_string();
        self.0.respond("application/json", body.into_bytes())
    }
}

/// Returns the body of an error.
pub(super) fn to_json(error: &ApiError) -> Value {
    let word = match error.kind() {
        ErrorKind::Unauthorized => "unauthorized",
        ErrorKind::Forbidden => "forbidden",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Busy | ErrorKind::Unavailable | ErrorKind::NoRoom => "service_unavailable",
        ErrorKind::Internal => "server_error",
        ErrorKind::NotSupported => "not_supported",
        _ => "bad_input",
    };
    json!({ "detail": { "msg": error.public_detail(), "type": word } })
}
