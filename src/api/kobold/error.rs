//! Errors in `KoboldCPP`'s format: `{"detail": {"msg": text, "type": kind}}`.

use crate::api::shared::error::protocol_error;
use crate::server::{ApiError, ErrorKind};
use serde::Serialize;
use utoipa::ToSchema;

protocol_error! {
    /// An [`ApiError`] in `KoboldCPP`'s format.
    KoboldError, kobold, "application/json"
}

/// An error response in `KoboldCPP`'s format.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct KoboldErrorResponse {
    detail: KoboldErrorDetail,
}

/// An error in `KoboldCPP`'s format.
#[derive(Debug, Serialize, ToSchema)]
struct KoboldErrorDetail {
    msg: String,
    r#type: &'static str,
}

impl ApiError {
    /// Returns the error in `KoboldCPP`'s format. Logs the cause of an internal error.
    pub(super) fn kobold(&self) -> KoboldErrorResponse {
        let r#type = match self.kind() {
            ErrorKind::Unauthorized => "unauthorized",
            ErrorKind::Forbidden => "forbidden",
            ErrorKind::NotFound => "not_found",
            ErrorKind::Busy | ErrorKind::Unavailable | ErrorKind::NoRoom => "service_unavailable",
            ErrorKind::Internal => "server_error",
            ErrorKind::NotSupported => "not_supported",
            _ => "bad_input",
        };
        KoboldErrorResponse { detail: KoboldErrorDetail { msg: self.public_detail(), r#type } }
    }
}
