//! Parses bodies in `MessagePack`.

use super::MAX_DEPTH;
use crate::server::{ApiError, ErrorCode};
use serde::Deserialize;
use serde_json::Value;

/// Parses a body as `MessagePack`, with the same nesting limit as JSON.
///
/// # Errors
/// 400 with the cause of the decoding failure.
pub(crate) fn parse_msgpack(body: &[u8]) -> Result<Value, ApiError> {
    let invalid = |detail: String| ApiError::bad_request(detail).code(ErrorCode::InvalidJson);
    let mut rest = body;
    let mut reader = rmp_serde::Deserializer::new(&mut rest);
    // Values are decoded recursively, and a thread's stack is small.
    reader.set_max_depth(MAX_DEPTH + 1);
    let value = Value::deserialize(&mut reader).map_err(|error| match error {
        rmp_serde::decode::Error::DepthLimitExceeded => {
            let detail =
                format!("the body is nested too deeply: at most {MAX_DEPTH} levels of lists and objects are allowed");
            ApiError::bad_request(detail).code(ErrorCode::NestedTooDeep)
        }
        other => invalid(format!("the body is not MessagePack: {other}")),
    })?;
    if !rest.is_empty() {
        return Err(invalid(format!(
            "the body is not MessagePack: expected one value, but {} bytes follow it",
            rest.len()
        )));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::parse_msgpack;
    use proptest::prelude::*;
    use serde_json::json;

    /// Returns `depth` nested lists with a number inside.
    fn nested(depth: usize) -> Vec<u8> {
        let mut body = vec![0x91; depth];
        body.push(5);
        body
    }

    #[test]
    fn msgpack_body_is_one_value() {
        let body = rmp_serde::to_vec_named(&json!({"a": [1, null, "x"]})).unwrap();
        assert_eq!(parse_msgpack(&body).unwrap(), json!({"a": [1, null, "x"]}));
        for wrong in
            [&b""[..], b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x05\x05"]
        {
            let detail = parse_msgpack(wrong).unwrap_err().problem().detail;
            assert!(detail.contains("not MessagePack"), "{wrong:?}: {detail}");
        }
    }

    #[test]
    fn msgpack_body_depth_is_limited() {
        assert!(parse_msgpack(&nested(super::MAX_DEPTH)).is_ok());
        for depth in [super::MAX_DEPTH + 1, 1_000_000] {
            let detail = parse_msgpack(&nested(depth)).unwrap_err().problem().detail;
            assert!(detail.contains("nested too deeply"), "{detail}");
        }
    }

    proptest! {
        /// Random and damaged bytes are parsed or rejected, and a parsed value can be encoded again.
        #[test]
        fn hostile_msgpack_is_parsed_or_rejected(
            noise in prop::collection::vec(any::<u8>(), 0..200), at: prop::sample::Index, byte: u8, cut: prop::sample::Index,
        ) {
            let body = json!({"input_ids": [1, -4, 70000], "text": "a ü", "nested": {"list": [[null, true, 0.5]]}});
            let mut damaged = rmp_serde::to_vec_named(&body).unwrap();
            let at = at.index(damaged.len());
            damaged[at] = byte;
            let cut = &damaged[..cut.index(damaged.len())];
            for bytes in [&noise[..], &damaged, cut] {
                if let Ok(value) = parse_msgpack(bytes) {
                    prop_assert!(rmp_serde::to_vec_named(&value).is_ok());
                }
            }
        }
    }
}
