//! Parses requests about slots: numbers, small bodies and snapshots.

use crate::api::shared;
use crate::api::shared::fields::Fields;
use crate::engine::Engine;
use crate::server::{ApiError, ErrorKind};
use axum::body::Body;
use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use serde_json::{Map, Value};

/// Content type of binary bodies.
pub(super) const OCTET_STREAM: &str = "application/octet-stream";
/// First bytes of a snapshot.
const MAGIC: &[u8] = b"SES1";
/// Maximum bytes of the JSON around a snapshot.
const MAX_JSON_OVERHEAD: usize = 4096;

/// Parses a slot number in a path or query.
pub(super) fn slot_number(name: &str, text: &str) -> Result<u32, ApiError> {
    text.parse()
        .map_err(|_| ApiError::invalid(name, format!("`{name}` must be the index of a slot, from 0, got '{text}'")))
}

/// Parses a small JSON body; an empty body is an empty object.
pub(super) async fn parse_small_body(body: Body) -> Result<Value, ApiError> {
    const MAX_BYTES: usize = 64 << 10;
    let bytes = read_body(body, MAX_BYTES)
        .await?
        .ok_or_else(|| ApiError::new(ErrorKind::TooLarge, format!("the body must have at most {MAX_BYTES} bytes")))?;
    if bytes.is_empty() { Ok(Value::Object(Map::new())) } else { shared::parse_json(&bytes) }
}

/// Reads a body of up to `max_bytes` bytes; returns `None` for a longer one.
async fn read_body(body: Body, max_bytes: usize) -> Result<Option<Bytes>, ApiError> {
    /// Maximum bytes of an oversized body that are read, so that the client receives the response before the connection
    /// closes.
    const MAX_DISCARDED_BYTES: usize = 64 << 20;
    let mut chunks = body.into_data_stream();
    let mut bytes = BytesMut::new();
    let mut read = 0;
    while read <= max_bytes.saturating_add(MAX_DISCARDED_BYTES)
        && let Some(chunk) = chunks.next().await
    {
        let chunk = chunk.map_err(|error| ApiError::bad_request(format!("reading the body failed: {error}")))?;
        read += chunk.len();
        if read <= max_bytes {
            bytes.extend_from_slice(&chunk);
        } else {
            bytes = BytesMut::new();
        }
    }
    Ok((read <= max_bytes).then(|| bytes.freeze()))
}

/// Returns the error for an `?action=` that is missing or unknown.
pub(super) fn unknown_action(action: Option<&str>, expected: &str) -> ApiError {
    let problem = action.map_or_else(|| "is missing".to_owned(), |action| format!("'{action}' is unknown"));
    ApiError::invalid("action", format!("`action` {problem}; expected {expected}"))
}

/// Reads the snapshot in a body: binary, or base64 in JSON. A body that begins like a snapshot is one, whatever its
/// content type.
pub(super) async fn read_snapshot(engine: &Engine, headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    let max_bytes = engine.max_snapshot_bytes()?;
    let too_long = || {
        let detail =
            format!("the snapshot is too large: snapshots of this server's slots have at most {max_bytes} bytes");
        ApiError::invalid("state", detail)
    };
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if content_type.trim_start().to_ascii_lowercase().starts_with(OCTET_STREAM) {
        return require_body(read_body(body, max_bytes).await?.ok_or_else(too_long)?);
    }
    // Base64 may contain line breaks.
    let max_json_bytes = max_bytes / 3 * 4 + max_bytes / 16 + MAX_JSON_OVERHEAD;
    let body = require_body(read_body(body, max_json_bytes).await?.ok_or_else(too_long)?)?;
    if body.starts_with(MAGIC) {
        return if body.len() <= max_bytes { Ok(body) } else { Err(too_long()) };
    }
    let decode = move || {
        let body = shared::parse_json(&body)?;
        let text = Fields::new(&body)?.text("state")?;
        let text = text.ok_or_else(|| {
            ApiError::invalid(
                "state",
                format!("`state` is missing; send the snapshot in base64, or as a body of type {OCTET_STREAM}"),
            )
        })?;
        let lines: Vec<&str> = text.split_ascii_whitespace().collect();
        STANDARD
            .decode(lines.concat())
            .map_err(|error| ApiError::invalid("state", format!("`state` is not base64: {error}")))
            .map(Bytes::from)
    };
    tokio::task::spawn_blocking(decode).await.map_err(ApiError::internal)?
}

/// Returns a body that is not empty.
fn require_body(body: Bytes) -> Result<Bytes, ApiError> {
    if body.is_empty() {
        let detail =
            format!("the body is empty; send a snapshot as `state` in base64, or as a body of type {OCTET_STREAM}");
        return Err(ApiError::bad_request(detail));
    }
    Ok(body)
}

/// Returns true if the client accepts the content type and does not prefer JSON.
pub(super) fn accepts(headers: &HeaderMap, kind: &str) -> bool {
    let lines = headers.get_all(header::ACCEPT).iter().filter_map(|accept| accept.to_str().ok());
    let ranges: Vec<(String, f32)> = lines.flat_map(|line| line.split(',')).map(parse_accept_range).collect();
    let weight =
        |named: &str| ranges.iter().find(|(range, _)| range.eq_ignore_ascii_case(named)).map(|(_, weight)| *weight);
    weight(kind).is_some_and(|binary| binary > 0.0 && weight("application/json").is_none_or(|json| json <= binary))
}

/// Parses a range of `Accept` and its weight; the default weight is 1.
fn parse_accept_range(range: &str) -> (String, f32) {
    let mut parts = range.split(';').map(str::trim);
    let name = parts.next().unwrap_or_default().to_owned();
    let weight = parts.filter_map(|part| part.split_once('=')).find(|(key, _)| key.trim().eq_ignore_ascii_case("q"));
    (name, weight.and_then(|(_, weight)| weight.trim().parse().ok()).unwrap_or(1.0))
}

#[cfg(test)]
mod tests {
    use super::{OCTET_STREAM, accepts};
    use axum::http::{HeaderMap, HeaderValue, header};

    #[test]
    fn accept_header_selects_binary() {
        let accepts_binary = |accept: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for one in accept {
                headers.append(header::ACCEPT, HeaderValue::from_static(one));
            }
            accepts(&headers, OCTET_STREAM)
        };
        for binary in [
            &["application/octet-stream"][..],
            &["text/html, Application/Octet-Stream;q=0.5"],
            &["*/*", "application/octet-stream"],
            &["application/json;q=0.5, application/octet-stream"],
        ] {
            assert!(accepts_binary(binary), "{binary:?}");
        }
        for json in [
            &[][..],
            &["*/*"],
            &["application/octet-stream;q=0"],
            &["application/octet-stream; Q=0.0, */*"],
            &["application/json", "application/octet-stream;q=0.5"],
        ] {
            assert!(!accepts_binary(json), "{json:?}");
        }
    }
}
