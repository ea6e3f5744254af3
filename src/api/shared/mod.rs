//! Code that several protocols share: parsing of request bodies, chat and token streams, server-sent events and error
//! formats.

pub(super) mod aliases;
pub(super) mod asyncapi;
pub(super) mod attention;
pub(super) mod body;
pub(super) mod chat;
pub(super) mod client_names;
pub(super) mod encoding;
pub(super) mod error;
pub(super) mod feedback;
pub(super) mod fields;
pub(super) mod generation;
pub(super) mod images;
pub(super) mod infill;
pub(super) mod llama_completion;
mod model_body;
pub(super) mod model_status;
mod msgpack;
pub(super) mod parameters;
mod request;
pub(super) mod settings;
pub(super) mod sse;

pub(super) use client_names::ClientNames;
pub(super) use fields::Fields;
pub(super) use model_body::ModelBody;
pub(super) use msgpack::parse_msgpack;
pub(super) use request::{base_request, engine_request};

use crate::server::{ApiError, ErrorCode};
use serde_json::Value;

/// Maximum nesting of lists and objects; this is the limit of `serde_json`.
const MAX_DEPTH: usize = 127;

/// Parses a body as JSON. The content type is ignored, because clients that avoid a CORS preflight send JSON as text.
///
/// # Errors
/// 400 with the position of the syntax error.
pub(super) fn parse_json(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        // `serde_json` has no error kind for exceeding this depth.
        let too_deep = error.to_string().starts_with("recursion limit");
        let detail = if too_deep {
            let position = format!("line {}, column {}", error.line(), error.column());
            format!(
                "the body is nested too deeply: at most {MAX_DEPTH} levels of lists and objects are allowed, exceeded \
                 at {position}"
            )
        } else {
            format!("the body is not JSON: {error}")
        };
        ApiError::bad_request(detail).code(if too_deep { ErrorCode::NestedTooDeep } else { ErrorCode::InvalidJson })
    })
}

#[cfg(test)]
mod tests {
    use super::{MAX_DEPTH, parse_json};

    #[test]
    fn json_body_depth_is_limited() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(parse_json(nested(MAX_DEPTH).as_bytes()).is_ok());
        let problem = parse_json(nested(MAX_DEPTH + 1).as_bytes()).unwrap_err().problem();
        assert!(problem.detail.contains("nested too deeply"), "{}", problem.detail);
        assert!(parse_json(b"[1,").unwrap_err().problem().detail.contains("not JSON"));
    }
}
