//! API keys in the request body, as Quote's clients send them: `{"user_api_key": KEY, …}`.
//!
//! The body is read before the client is authenticated, so reading is limited to [`MAX_BYTES`] within [`READ_TIMEOUT`],
//! for up to [`MAX_CONCURRENT_READS`] requests at a time. The handler receives the same bytes.

use crate::server::{ApiError, ErrorKind};
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{Method, header};
use serde::Deserialize;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Maximum size of a body that is searched for a key.
const MAX_BYTES: usize = 1 << 20;
/// Maximum time for such a body to arrive.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bodies read concurrently before authentication.
const MAX_CONCURRENT_READS: usize = 32;

static READS: Semaphore = Semaphore::const_new(MAX_CONCURRENT_READS);

#[derive(Deserialize)]
struct BodyWithKey {
    user_api_key: Option<String>,
}

/// Returns true if the body may contain a key: a POST, neither compressed nor too long.
pub(super) fn may_contain_key(request: &Request) -> bool {
    let headers = request.headers();
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    request.method() == Method::POST
        && !headers.contains_key(header::CONTENT_ENCODING)
        && length.is_none_or(|length| length <= MAX_BYTES)
}

/// Reads the body. Returns the request with its body, and the key.
///
/// # Errors
/// 401 if the body is too long or does not arrive in time; 429 if too many bodies are being read.
pub(super) async fn read(request: Request) -> Result<(Request, Option<String>), ApiError> {
    let Ok(_permit) = READS.try_acquire() else {
        let detail =
            "too many requests with a key in their body are being read; send the key as a header, or try again";
        return Err(ApiError::new(ErrorKind::Busy, detail).retry_after(1));
    };
    let (parts, body) = request.into_parts();
    let Ok(Ok(bytes)) = tokio::time::timeout(READ_TIMEOUT, to_bytes(body, MAX_BYTES)).await else {
        let detail = format!(
            "an API key is required; the server looks for \"user_api_key\" only in bodies of at most {} MiB that arrive within {} s; \
             send it as a header: 'X-User-Api-Key: KEY'",
            MAX_BYTES >> 20,
            READ_TIMEOUT.as_secs()
        );
        return Err(ApiError::new(ErrorKind::Unauthorized, detail));
    };
    let sent = serde_json::from_slice::<BodyWithKey>(&bytes).ok().and_then(|keyed| keyed.user_api_key);
    Ok((Request::from_parts(parts, Body::from(bytes)), sent))
}
