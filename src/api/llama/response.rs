//! Responses that several routes of this folder share.

use serde::Serialize;
use utoipa::ToSchema;

/// The response to a change without a result.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct SuccessResponse {
    /// Always true.
    success: bool,
}

impl Default for SuccessResponse {
    fn default() -> Self {
        Self { success: true }
    }
}
