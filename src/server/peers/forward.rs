//! Forwards HTTP requests to another server.

use super::{CONNECT_TIMEOUT, ForwardHeaders, Peer};
use crate::server::error::RUN_ID;
use crate::server::{ApiError, App, client_tls, root_cause};
use axum::body::{Body, Bytes};
use axum::http::{HeaderName, Method, header};
use axum::response::Response;
use reqwest::redirect::Policy;
use std::sync::LazyLock;

/// Headers of the response that are forwarded to the client; all others concern only the connection.
const RESPONSE_HEADERS: [HeaderName; 5] = [
    header::CONTENT_TYPE,
    header::RETRY_AFTER,
    header::WWW_AUTHENTICATE,
    HeaderName::from_static("x-accel-buffering"),
    RUN_ID,
];

static CLIENT: LazyLock<Result<reqwest::Client, String>> = LazyLock::new(|| {
    let tls = client_tls().map_err(|error| error.to_string())?;
    let builder = reqwest::Client::builder().connect_timeout(CONNECT_TIMEOUT).redirect(Policy::none()).no_proxy();
    builder.tls_backend_preconfigured(tls).build().map_err(|error| error.to_string())
});

/// Forwards a request to another server and streams the response's body.
///
/// # Errors
/// 503 if that server does not respond.
pub(crate) async fn forward(
    app: &App,
    peer: &Peer,
    (method, path): (Method, &str),
    headers: &ForwardHeaders,
    body: Bytes,
) -> Result<Response, ApiError> {
    let client = CLIENT.as_ref().map_err(ApiError::internal)?;
    let request = client.request(method, peer.address(path)?).headers(headers.forwarded_headers(app)?).body(body);
    let answer = request.send().await.map_err(|error| peer.unreachable(&root_cause(&error)))?;
    let mut response = Response::builder().status(answer.status());
    for name in RESPONSE_HEADERS {
        if let Some(value) = answer.headers().get(&name) {
            response = response.header(name, value);
        }
    }
    response.body(Body::from_stream(answer.bytes_stream())).map_err(ApiError::internal)
}
