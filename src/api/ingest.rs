//! `POST /ingest`: stores a complete run of another engine, sent in the `/ingest` document format. One of these engines
//! is Quote, whose additional fields are accepted.
//!
//! The body is JSON, plain or compressed; its content type is ignored. A 201 response has an empty body and means that
//! the run is committed. The same document returns 201 again, so that a client that lost the response can repeat the
//! request; another document with the same `request_id` is a conflict.

use crate::events::Surface;
use crate::server::mods;
use crate::server::{Access, ApiError, App, Caller, ErrorKind, Problem, Protocol};
use crate::trace::document::{Document, DocumentError, DocumentWire};
use axum::body::{Body, BodyDataStream};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use futures::StreamExt;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// `thunder run` sends this header with its own runs, so that they can be distinguished from those of other engines.
const SURFACE: HeaderName = HeaderName::from_static("x-thunder-surface");
/// Maximum size of a document after decompression.
const MAX_BYTES: usize = 64 * 1024 * 1024;
/// Maximum bytes of an oversized document that are read and discarded. Without that, a client that is still sending
/// would see a broken connection instead of the response.
const MAX_DISCARDED_BYTES: usize = 4 * MAX_BYTES;
/// Size above which documents are parsed on a blocking thread.
const LARGE_BYTES: usize = 256 * 1024;
/// Size above which a body is read only with a permit of [`LARGE_BODIES`].
const SMALL_BODY_BYTES: usize = 1 << 20;
/// The limits of large bodies.
static LARGE_BODIES: LargeBodies = LargeBodies {
    permits: Semaphore::const_new(4),
    permit_timeout: Duration::from_secs(30),
    idle_timeout: Duration::from_secs(30),
    total_timeout: Duration::from_mins(15),
};
/// Permits to parse and store documents, one per MiB or part of it, because a document needs several times its size in
/// memory.
static MIB_PERMITS: Semaphore = Semaphore::const_new(4 * (MAX_BYTES >> 20));

/// Limits of bodies above [`SMALL_BODY_BYTES`].
struct LargeBodies {
    /// Permits to have a large body in memory, from its first bytes until its document is stored.
    permits: Semaphore,
    /// Maximum time to wait for a permit.
    permit_timeout: Duration,
    /// Maximum time between two parts of a body, so that a client that stalls frees its permit.
    idle_timeout: Duration,
    /// Maximum time to read a body; enough for [`MAX_BYTES`] over a slow line.
    total_timeout: Duration,
}

/// A body, and the permit for it if it is large.
struct Payload {
    bytes: Vec<u8>,
    permit: Option<SemaphorePermit<'static>>,
}

/// Returns the routes.
pub(super) fn protocol() -> Protocol {
    let routes = OpenApiRouter::new().routes(routes!(ingest)).route("/v1/ingest", axum::routing::post(ingest));
    Protocol::native(&["/ingest", "/v1/ingest"]).routes(Access::Ingest, routes)
}

/// Stores a complete run of another engine. Also at `/v1/ingest`.
///
/// The fields that Quote, another engine with mods, adds to `request` are stored too: `system_prompt`, `user_prompt`, `system_prompt_token_ids`,
/// `user_prompt_token_ids`, `active_mod_name`, `final_text`, `final_token_ids` and `inference_stats`. So is `thunder_run`, which
/// Thunder writes into its exports: status, finish reason, seed, metadata, token counts and durations. NUL characters are
/// replaced with U+FFFD; `run.notes` of `GET /api/v1/runs/{id}` counts them.
#[utoipa::path(post, path = "/ingest", tag = "ingest",
    request_body(content = DocumentWire, content_type = "application/json",
        description = "`{request, events, mod_calls, mod_logs, actions}`; gzip and zstd by Content-Encoding; at most 64 MiB decompressed; above 1 MiB, it must arrive within 15 minutes and without a pause of 30 s",
        example = json!({
            "request": {"request_id": "req_1", "created_at": "2025-12-01T18:30:00Z", "model": "my-model", "max_tokens": 100},
            "events": [
                {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 150, "max_steps": 100},
                {"event_type": "ForwardPass", "step": 1, "sequence_order": 1, "top_tokens": [{"token": 1234, "prob": 0.85}]},
                {"event_type": "Sampled", "step": 1, "sequence_order": 2, "sampled_token": 1234, "token_text": " there"},
                {"event_type": "Added", "step": 1, "sequence_order": 3, "added_tokens": [1234], "added_token_count": 1, "forced": false}],
            "mod_calls": [{"event_sequence_order": 2, "mod_name": "my_mod", "event_type": "Sampled", "step": 1, "execution_time_ms": 0.4}],
            "mod_logs": [{"mod_call_sequence": 0, "mod_name": "my_mod", "log_message": "hello", "log_level": "INFO"}],
            "actions": [{"mod_call_sequence": 0, "action_type": "Noop", "action_order": 0}]})),
    responses(
        (status = 201, description = "Stored, or the same document was stored before; the body is empty"),
        (status = 400, body = Problem, description = "The body is not JSON, a field has the wrong type, or an entry refers to a missing one; `pointer` is the JSON path"),
        (status = 401, body = Problem, description = "The API key is missing or unknown; see --ingest-key and --ingest-open"),
        (status = 408, body = Problem, description = "A body above 1 MiB paused for 30 s or took longer than 15 minutes; the request can be sent again"),
        (status = 409, body = Problem, description = "Another document has this request_id"),
        (status = 413, body = Problem),
        (status = 503, body = Problem, description = "The database is unavailable, or the server is reading too many bodies above 1 MiB; see Retry-After")))]
async fn ingest(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, ApiError> {
    app.store()?;
    let payload = read(&headers, body, &LARGE_BODIES).await?;
    let surface = headers.get(SURFACE).is_some_and(|surface| surface == "cli").then_some(Surface::Cli);
    // A task, because the permits must cover the work, which does not end when the client disconnects.
    tokio::spawn(store(app, caller, surface, payload)).await.map_err(ApiError::internal)??;
    Ok(StatusCode::CREATED)
}

async fn store(app: App, caller: Caller, surface: Option<Surface>, payload: Payload) -> Result<(), ApiError> {
    let Payload { bytes, permit: _permit } = payload;
    let mib = bytes.len().div_ceil(1 << 20).max(1);
    let _permits = MIB_PERMITS.acquire_many(mib as u32).await.map_err(ApiError::internal)?;
    let mut document = if bytes.len() > LARGE_BYTES {
        tokio::task::spawn_blocking(move || Document::parse(&bytes)).await.map_err(ApiError::internal)?
    } else {
        Document::parse(&bytes)
    }?;
    let credentials = app.credentials();
    if let Some(sent) = &mut document.request.user_api_key
        && let Some(key) = credentials.security.find_ingest_key(sent)
    {
        // Quote sends its client's key in this field; the key's label is stored instead.
        *sent = key.label();
    }
    document.request.surface = surface.or(document.request.surface);
    let files = mods::used_files(&document);
    app.store()?.ingest(&caller.scope, caller.tenant, document).await?;
    // The run is stored, so a failure here must not become an error response.
    if let Err(error) = mods::store_local_sources(&app, files).await {
        tracing::warn!(?error, "mod sources of a run not stored; the run cannot be repeated with them");
    }
    Ok(())
}

async fn read(headers: &HeaderMap, body: Body, large_bodies: &'static LargeBodies) -> Result<Payload, ApiError> {
    let number = |name| headers.get(name).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    let length = number(header::CONTENT_LENGTH).unwrap_or(0);
    // A client that sends `Expect: 100-continue` has sent nothing yet.
    if length > MAX_BYTES && headers.contains_key(header::EXPECT) {
        return Err(too_large());
    }
    let mut chunks = body.into_data_stream();
    let mut payload = Payload { bytes: Vec::new(), permit: None };
    let mut deadline = None;
    loop {
        if payload.permit.is_none() && length.max(payload.bytes.len()) > SMALL_BODY_BYTES {
            payload.permit = Some(large_bodies.acquire().await?);
            deadline = Some(Instant::now() + large_bodies.total_timeout);
        }
        let chunk = match deadline {
            Some(deadline) => {
                let chunk = timeout_at(deadline.min(Instant::now() + large_bodies.idle_timeout), chunks.next()).await;
                chunk.map_err(|_| large_bodies.too_slow(payload.bytes.len()))?
            }
            None => chunks.next().await,
        };
        let Some(chunk) = chunk else { return Ok(payload) };
        let chunk = chunk.map_err(|error| read_error(&error))?;
        if payload.bytes.len() + chunk.len() > MAX_BYTES {
            drop(payload);
            discard(chunks).await;
            return Err(too_large());
        }
        payload.bytes.extend_from_slice(&chunk);
    }
}

impl LargeBodies {
    async fn acquire(&self) -> Result<SemaphorePermit<'_>, ApiError> {
        let permit = timeout(self.permit_timeout, self.permits.acquire()).await;
        permit.map_err(|_| self.too_many())?.map_err(ApiError::internal)
    }

    fn too_many(&self) -> ApiError {
        let seconds = self.permit_timeout.as_secs();
        let detail = format!(
            "a body above {} MiB waited {seconds} s for other large bodies; send it again later",
            SMALL_BODY_BYTES >> 20
        );
        ApiError::unavailable(detail).retry_after(seconds)
    }

    fn too_slow(&self, received: usize) -> ApiError {
        let detail = format!(
            "a body above {} MiB must arrive within {} s and without a pause of {} s, but only {received} bytes arrived; \
             send it again, and compress it with gzip or zstd if the connection is slow",
            SMALL_BODY_BYTES >> 20,
            self.total_timeout.as_secs(),
            self.idle_timeout.as_secs()
        );
        ApiError::new(ErrorKind::RequestTimeout, detail)
    }
}

async fn discard(mut chunks: BodyDataStream) {
    let mut discarded = 0;
    while let Some(Ok(chunk)) = chunks.next().await {
        discarded += chunk.len();
        if discarded > MAX_DISCARDED_BYTES {
            return;
        }
    }
}

fn too_large() -> ApiError {
    ApiError::new(
        ErrorKind::TooLarge,
        format!(
            "a document may have at most {} MiB after decompression; `thunder ingest` with `--database-url` or \
             `--data-dir` stores larger ones",
            MAX_BYTES >> 20
        ),
    )
}

fn read_error(error: &axum::Error) -> ApiError {
    let mut reason = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        reason = cause.to_string();
        source = cause.source();
    }
    ApiError::bad_request(format!(
        "reading the body failed: {reason}; check that it is compressed as stated in Content-Encoding"
    ))
}

impl From<DocumentError> for ApiError {
    fn from(error: DocumentError) -> Self {
        let detail = format!("expected {}, got {}", error.expected, error.found);
        Self::invalid(error.path, detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Bytes;
    use axum::http::HeaderValue;
    use futures::stream;
    use std::io;

    /// Returns limits with one permit; a timeout of 0 expires at once.
    const fn limits(idle_timeout: Duration, total_timeout: Duration) -> LargeBodies {
        LargeBodies { permits: Semaphore::const_new(1), permit_timeout: Duration::ZERO, idle_timeout, total_timeout }
    }

    fn large_length() -> HeaderMap {
        HeaderMap::from_iter([(header::CONTENT_LENGTH, HeaderValue::from(SMALL_BODY_BYTES + 1))])
    }

    /// Returns a body that never ends after its chunks.
    fn stalled(chunks: &[&'static str]) -> Body {
        let chunks: Vec<_> = chunks.iter().map(|chunk| Ok::<_, io::Error>(Bytes::from(*chunk))).collect();
        Body::from_stream(stream::iter(chunks).chain(stream::pending()))
    }

    #[tokio::test]
    async fn stalled_large_body_is_a_408_and_frees_its_permit() {
        static IDLE: LargeBodies = limits(Duration::ZERO, Duration::from_hours(1));
        static TOTAL: LargeBodies = limits(Duration::from_hours(1), Duration::ZERO);
        for limits in [&IDLE, &TOTAL] {
            let error = read(&large_length(), stalled(&["{", "}"]), limits).await.err().unwrap();
            assert_eq!(error.status(), StatusCode::REQUEST_TIMEOUT);
            assert!(error.public_detail().contains("only 2 bytes arrived"), "{}", error.public_detail());
            assert_eq!(limits.permits.available_permits(), 1);
        }
    }

    #[tokio::test]
    async fn large_body_without_permit_is_a_503_with_retry_after() {
        static LIMITS: LargeBodies = LargeBodies {
            permit_timeout: Duration::from_millis(10),
            permits: Semaphore::const_new(0),
            idle_timeout: Duration::from_hours(1),
            total_timeout: Duration::from_hours(1),
        };
        let error = read(&large_length(), stalled(&[]), &LIMITS).await.err().unwrap();
        assert_eq!((error.status(), error.retry_after_s().is_some()), (StatusCode::SERVICE_UNAVAILABLE, true));
        assert_eq!(read(&HeaderMap::new(), Body::from("{}"), &LIMITS).await.ok().unwrap().bytes, b"{}");
    }
}
