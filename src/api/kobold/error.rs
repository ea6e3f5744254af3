//! Errors in `KoboldCPP`'s format: `{"detail": {"msg": text, "type": word}}`.

use crate::api::shared::sse::to_text;
use crate::server::{ApiError, ErrorKind};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

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
        let body = to_text(&KoboldErrorResponse::from(&self.0));
        self.0.respond("application/json", body.into_bytes())
    }
}

/// An error.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct KoboldErrorResponse {
    detail: KoboldErrorDetail,
}

/// The cause of an error.
#[derive(Debug, Serialize, ToSchema)]
struct KoboldErrorDetail {
    msg: String,
    r#type: &'static str,
}

impl From<&ApiError> for KoboldErrorResponse {
    fn from(error: &ApiError) -> Self {
        let r#type = match error.kind() {
            ErrorKind::Unauthorized => "unauthorized",
            ErrorKind::Forbidden => "forbidden",
            ErrorKind::NotFound => "not_found",
            ErrorKind::Busy | ErrorKind::Unavailable | ErrorKind::NoRoom => "service_unavailable",
            ErrorKind::Internal => "server_error",
            ErrorKind::NotSupported => "not_supported",
            _ => "bad_input",
        };
        Self { detail: KoboldErrorDetail { msg: error.public_detail(), r#type } }
    }
}
