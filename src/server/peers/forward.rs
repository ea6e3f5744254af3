//! Forwards HTTP requests to another server.

use super::{CONNECT_TIMEOUT, ForwardHeaders, Peer};
use crate::server::error::RUN_ID;
use crate::server::{ApiError, App, client_tls, root_cause};
use axum::body::{Body, Bytes};
use axum::http::{HeaderName, Method, header};
use axum::response::Response;
use reqwest::RequestBuilder;
use reqwest::redirect::Policy;
use std::sync::LazyLock;
use std::time::Duration;

/// Maximum time until the other server has sent its whole response. It may have to decode a batch first.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

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

/// Forwards a short request to another server and streams the response's body.
///
/// # Errors
/// 503 if that server does not respond within [`RESPONSE_TIMEOUT`].
pub(crate) async fn forward(
    app: &App,
    peer: &Peer,
    (method, path): (Method, &str),
    headers: &ForwardHeaders,
    body: Bytes,
) -> Result<Response, ApiError> {
    let client = CLIENT.as_ref().map_err(ApiError::internal)?;
    let request = client.request(method, peer.address(path)?).headers(headers.forwarded_headers(app)?).body(body);
    let answer = send(peer, request, RESPONSE_TIMEOUT).await?;
    let mut response = Response::builder().status(answer.status());
    for name in RESPONSE_HEADERS {
        if let Some(value) = answer.headers().get(&name) {
            response = response.header(name, value);
        }
    }
    response.body(Body::from_stream(answer.bytes_stream())).map_err(ApiError::internal)
}

/// Sends a request, whose response must be complete within `time`.
async fn send(peer: &Peer, request: RequestBuilder, time: Duration) -> Result<reqwest::Response, ApiError> {
    request.timeout(time).send().await.map_err(|error| peer.unreachable(&root_cause(&error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn server_that_does_not_answer_is_unreachable() {
        // Connections are accepted by the system and never read.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = Peer(format!("http://{}", listener.local_addr().unwrap()).parse().unwrap());
        let request = CLIENT.as_ref().unwrap().post(peer.address("/cancel").unwrap());
        let error = send(&peer, request, Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(error.status(), 503);
        let detail = error.problem().detail;
        assert!(detail.contains(peer.0.as_str()) && detail.contains("timed out"), "{detail}");
    }
}
