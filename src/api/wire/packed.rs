use super::DEEPEST;
use crate::api::ApiError;
use serde::Deserialize;
use serde_json::Value;

/// The body as `MessagePack`, as deep as JSON may be.
///
/// # Errors
/// 400, with what is not `MessagePack`.
pub(in crate::api) fn packed(body: &[u8]) -> Result<Value, ApiError> {
    let refused = |detail: String| ApiError::bad_request(detail).code("invalid_json");
    let mut rest = body;
    let mut reader = rmp_serde::Deserializer::new(&mut rest);
    // Values are read by recursion, and the stack of a thread is small.
    reader.set_max_depth(DEEPEST + 1);
    let value = Value::deserialize(&mut reader).map_err(|error| match error {
        rmp_serde::decode::Error::DepthLimitExceeded => {
            let detail =
                format!("the body is nested too deep: lists and objects may be nested {DEEPEST} deep, this is deeper");
            ApiError::bad_request(detail).code("nested_too_deep")
        }
        other => refused(format!("the body is not MessagePack: {other}")),
    })?;
    if !rest.is_empty() {
        return Err(refused(format!("the body is not MessagePack: {} bytes follow its only value", rest.len())));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::packed;
    use serde_json::json;

    /// So many lists within each other, and a number.
    fn nested(depth: usize) -> Vec<u8> {
        let mut body = vec![0x91; depth];
        body.push(5);
        body
    }

    #[test]
    fn a_body_is_one_value() {
        let body = rmp_serde::to_vec_named(&json!({"a": [1, null, "x"]})).unwrap();
        assert_eq!(packed(&body).unwrap(), json!({"a": [1, null, "x"]}));
        for wrong in
            [&b""[..], b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x05\x05"]
        {
            let detail = packed(wrong).unwrap_err().problem().detail;
            assert!(detail.contains("not MessagePack"), "{wrong:?}: {detail}");
        }
    }

    #[test]
    fn a_body_may_be_as_deep_as_json() {
        assert!(packed(&nested(super::DEEPEST)).is_ok());
        for depth in [super::DEEPEST + 1, 1_000_000] {
            let detail = packed(&nested(depth)).unwrap_err().problem().detail;
            assert!(detail.contains("nested too deep"), "{detail}");
        }
    }
}
