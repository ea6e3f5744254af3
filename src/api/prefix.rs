//! Everything below a prefix of the address, as `--api-prefix` wants it.
//!
//! The prefix is taken away before any route, gate or limit sees a request, and put back where an answer leads on. Pages learn of
//! it from a header that only this file sets.

use super::{ApiError, ErrorKind, security};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use std::sync::Arc;

const HEADER: HeaderName = HeaderName::from_static("x-forwarded-prefix");

/// What stands before every path of this server, as the client has to write it; mostly nothing.
#[must_use]
pub fn base(headers: &HeaderMap) -> &str {
    headers.get(HEADER).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// The routes below that prefix, which may be empty.
pub(super) fn below(prefix: &str, routes: Router) -> Router {
    let shared: Arc<str> = prefix.into();
    let routes = routes.layer(from_fn_with_state(Arc::clone(&shared), pass));
    if prefix.is_empty() {
        return routes;
    }
    let outside = move |request: Request| std::future::ready(outside(&shared, &request));
    Router::new().nest_service(prefix, routes).fallback(outside)
}

async fn pass(State(prefix): State<Arc<str>>, mut request: Request, next: Next) -> Response {
    // What a client says of it is not believed: pages would lead elsewhere.
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

fn outside(prefix: &str, request: &Request) -> Response {
    let path = request.uri().path();
    let detail = format!("there is nothing at {path}; everything of this server is below {prefix}");
    security::in_dialect(path, ApiError::new(ErrorKind::NotFound, detail))
}
