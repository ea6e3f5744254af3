//! Serves all routes below a URL prefix, for `--api-prefix`.
//!
//! The prefix is removed before routes and middleware see a request, and added to the URLs in responses. Pages read it
//! from a header that only this module sets.

use super::protocol::Refusal;
use super::{ApiError, ErrorKind};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use std::sync::Arc;

const HEADER: HeaderName = HeaderName::from_static("x-forwarded-prefix");

/// Returns the prefix of every path as the client has to write it; usually empty.
#[must_use]
pub fn base(headers: &HeaderMap) -> &str {
    headers.get(HEADER).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Moves routes below a prefix, which may be empty.
pub(crate) fn below(prefix: &str, routes: Router) -> Router {
    let shared: Arc<str> = prefix.into();
    let routes = routes.layer(from_fn_with_state(Arc::clone(&shared), pass));
    if prefix.is_empty() {
        return routes;
    }
    let outside = routes.clone().layer(from_fn_with_state(shared, refuse_outside));
    Router::new().nest_service(prefix, routes).fallback_service(outside)
}

async fn pass(State(prefix): State<Arc<str>>, mut request: Request, next: Next) -> Response {
    // The client's header is ignored because pages would link to other paths.
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

/// Refuses a request to a path outside the prefix.
async fn refuse_outside(State(prefix): State<Arc<str>>, mut request: Request, next: Next) -> Response {
    let detail = format!("no route exists at {}; all routes are below {prefix}", request.uri().path());
    request.extensions_mut().insert(Refusal(ApiError::new(ErrorKind::NotFound, detail)));
    next.run(request).await
}
