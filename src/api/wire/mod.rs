//! What the bodies of all dialects have in common: reading fields so that every error names one, the parameters of
//! sampling and limits, and which mods a request asks for.

pub(super) mod constraint;
pub(super) mod fields;
pub(super) mod lora;
pub(super) mod mods;
mod packed;
pub(super) mod parameters;
mod request;

pub(super) use fields::Fields;
pub(super) use packed::packed;
pub(super) use request::request;

use super::ApiError;
use serde_json::Value;

/// How deep lists and objects may be nested, which is the limit of `serde_json`.
const DEEPEST: usize = 127;

/// The body as JSON, whatever its content type says: clients that avoid a preflight send JSON as text.
///
/// # Errors
/// 400 with the place where it stops being JSON.
pub(super) fn json(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        // The reader has no other word for it: it gives up at this depth, whatever follows.
        let too_deep = error.to_string().starts_with("recursion limit");
        let detail = if too_deep {
            let place = format!("line {}, column {}", error.line(), error.column());
            format!("the body is nested too deep: lists and objects may be nested {DEEPEST} deep, {place} is deeper")
        } else {
            format!("the body is not JSON: {error}")
        };
        ApiError::bad_request(detail).code(if too_deep { "nested_too_deep" } else { "invalid_json" })
    })
}

#[cfg(test)]
mod tests {
    use super::{DEEPEST, json};

    #[test]
    fn a_body_may_be_as_deep_as_is_said() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(json(nested(DEEPEST).as_bytes()).is_ok());
        let problem = json(nested(DEEPEST + 1).as_bytes()).unwrap_err().problem();
        assert!(problem.detail.contains("nested too deep"), "{}", problem.detail);
        assert!(json(b"[1,").unwrap_err().problem().detail.contains("not JSON"));
    }
}
