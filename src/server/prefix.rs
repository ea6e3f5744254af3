//! Serves all routes under a URL prefix, for `--api-prefix`.
//!
//! The prefix is removed before routes and middleware see a request, and added to redirects. Pages read it
//! from a header that only this module sets.

use super::protocol::GuardRejection;
use super::{ApiError, ErrorKind};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use std::sync::Arc;

const HEADER: HeaderName = HeaderName::from_static("x-forwarded-prefix");

/// Returns the URL prefix that clients must put before every path; usually empty.
#[must_use]
pub fn base(headers: &HeaderMap) -> &str {
    headers.get(HEADER).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Nests routes under a prefix, which may be empty.
pub(crate) fn nest(prefix: &str, routes: Router) -> Router {
    let shared: Arc<str> = prefix.into();
    let routes = routes.layer(from_fn_with_state(Arc::clone(&shared), strip_prefix));
    if prefix.is_empty() {
        return routes;
    }
    let outside = routes.clone().layer(from_fn_with_state(shared, reject_outside_prefix));
    Router::new().nest_service(prefix, routes).fallback_service(outside)
}

async fn strip_prefix(State(prefix): State<Arc<str>>, mut request: Request, next: Next) -> Response {
    // Ignore the header of a client, because pages would link to other paths.
    request.headers_mut().remove(HEADER);
    if prefix.is_empty() {
        return next.run(request).await;
    }
    if let Ok(value) = HeaderValue::from_str(&prefix) {
        request.headers_mut().insert(HEADER, value);
    }
    let mut response = next.run(request).await;
    let target = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
    let target = target.filter(|target| target.starts_with('/')).map(|target| format!("{prefix}{target}"));
    if let Some(target) = target.and_then(|target| HeaderValue::from_str(&target).ok()) {
        response.headers_mut().insert(header::LOCATION, target);
    }
    response
}

/// Rejects a request to a path outside the prefix.
async fn reject_outside_prefix(State(prefix): State<Arc<str>>, mut request: Request, next: Next) -> Response {
    let detail = format!("no route exists at {}; all routes are below {prefix}", request.uri().path());
    request.extensions_mut().insert(GuardRejection(ApiError::new(ErrorKind::NotFound, detail)));
    next.run(request).await
}
