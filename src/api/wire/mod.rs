//! What the bodies of all dialects have in common: reading fields so that every error names one, the parameters of
//! sampling and limits, and which mods a request asks for.

pub(super) mod constraint;
pub(super) mod fields;
pub(super) mod mods;
pub(super) mod parameters;

pub(super) use fields::Fields;

use super::ApiError;
use serde_json::Value;

/// The body as JSON, whatever its content type says: clients that avoid a preflight send JSON as text.
///
/// # Errors
/// 400 with the place where it stops being JSON.
pub(super) fn json(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body)
        .map_err(|error| ApiError::bad_request(format!("the body is not JSON: {error}")).code("invalid_json"))
}
