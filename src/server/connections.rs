//! Accepts, serves and closes connections.
//!
//! Time and size of a request's headers are limited, so that slow clients do not occupy resources. Bodies, streams and
//! sockets are not limited in time; TCP keep-alive probes detect peers that disappeared. The TLS handshake has the same
//! time limit as the headers.

use super::protocol::GuardRejection;
use super::{ApiError, App};
use axum::Router;
use axum::extract::{Extension, Request, connect_info::ConnectInfo};
use axum::http::{HeaderValue, header};
use axum::middleware::{Next, from_fn, map_request};
use axum::response::Response;
use hyper::server::conn::http1::Builder;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tower::Layer;

/// Maximum size of a request's header, and of the part of a body that is buffered.
const MAX_HEADER_BYTES: usize = 128 << 10;
/// Same maximum on a server with API keys; lower, because the header is read before the key is checked.
const MAX_HEADER_BYTES_WITH_KEYS: usize = 16 << 10;
/// Idle time before the first TCP keep-alive probe.
const KEEPALIVE_IDLE: Duration = Duration::from_mins(1);
/// Interval between keep-alive probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Number of unanswered probes after which a connection is closed.
const MAX_KEEPALIVE_PROBES: u32 = 4;
/// Delay after a failed accept, e.g. when no file descriptor is free.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// State shared by the connections of a listener.
#[derive(Clone)]
struct ListenerState {
    builder: Builder,
    app: App,
}

/// The routes as a service of one connection.
type Service = TowerToHyperService<<Extension<ConnectInfo<SocketAddr>> as Layer<Router>>::Service>;

/// The start of a connection to an https port.
enum ConnectionStart {
    Tls(Box<TlsStream<TcpStream>>),
    /// A plain http request.
    Plain(TcpStream),
}

/// Accepts connections until the server stops, then waits for the active ones.
pub(super) async fn accept(listener: TcpListener, routes: Router, app: App) {
    let server = &app.config().server;
    let mut builder = Builder::new();
    let max_head_bytes =
        if app.credentials().security.keys.is_empty() { MAX_HEADER_BYTES } else { MAX_HEADER_BYTES_WITH_KEYS };
    builder.timer(TokioTimer::new()).header_read_timeout(server.header_timeout).max_buf_size(max_head_bytes);
    let routes = if app.credentials().tls.is_some() { routes.layer(map_request(mark_as_https)) } else { routes };
    let listener_state = ListenerState { builder, app: app.clone() };
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = app.wait_until_stopping() => break,
        };
        while open.try_join_next().is_some() {}
        match accepted {
            Ok((stream, peer)) => {
                set_socket_options(&stream);
                open.spawn(listener_state.clone().serve_connection(stream, peer, routes.clone()));
            }
            Err(error) if affects_one_connection(&error) => {}
            Err(error) => {
                tracing::error!(%error, "accepting a connection failed");
                tokio::time::sleep(RETRY_DELAY).await;
            }
        }
    }
    drop(listener);
    while open.join_next().await.is_some() {}
}

impl ListenerState {
    /// Serves a connection, including the TLS handshake.
    async fn serve_connection(self, stream: TcpStream, peer: SocketAddr, routes: Router) {
        let service = |routes| TowerToHyperService::new(Extension(ConnectInfo(peer)).layer(routes));
        let tls = self.app.credentials().tls.as_ref().map(|tls| TlsAcceptor::from(tls.server()));
        let Some(tls) = &tls else { return self.serve(stream, service(routes)).await };
        let start = tokio::select! {
            start = with_time_limit(self.app.config().server.header_timeout, start_connection(tls, stream)) => start,
            () = self.app.wait_until_stopping() => return,
        };
        match start {
            Ok(ConnectionStart::Tls(stream)) => self.serve(stream, service(routes)).await,
            Ok(ConnectionStart::Plain(stream)) => {
                self.serve(stream, service(routes.layer(from_fn(reject_plain_http)))).await;
            }
            Err(error) => tracing::debug!(%error, %peer, "TLS handshake failed"),
        }
    }

    async fn serve<S>(&self, stream: S, service: Service)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let connection = self.builder.serve_connection(TokioIo::new(stream), service).with_upgrades();
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = self.app.wait_until_stopping() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "connection closed with error");
        }
    }
}

/// Starts a connection to an https port. A TLS handshake starts with byte 22, an http request with a letter.
async fn start_connection(tls: &TlsAcceptor, stream: TcpStream) -> io::Result<ConnectionStart> {
    let mut first = [0];
    if stream.peek(&mut first).await? > 0 && first[0].is_ascii_uppercase() {
        return Ok(ConnectionStart::Plain(stream));
    }
    tls.accept(stream).await.map(|stream| ConnectionStart::Tls(Box::new(stream)))
}

async fn with_time_limit<T>(limit: Option<Duration>, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match limit {
        Some(limit) => tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
        None => work.await,
    }
}

/// Rejects a plain http request to an https port.
async fn reject_plain_http(mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(GuardRejection(ApiError::bad_request(
        "this port accepts https only, got a plain http request: use a URL that starts with https://",
    )));
    let mut response = next.run(request).await;
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Marks a request as https, as a proxy would.
async fn mark_as_https(mut request: Request) -> Request {
    request.headers_mut().insert("x-forwarded-proto", HeaderValue::from_static("https"));
    request
}

/// Disables Nagle's algorithm because tokens are small, and enables keep-alive probes.
fn set_socket_options(stream: &TcpStream) {
    let keep_alive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(MAX_KEEPALIVE_PROBES);
    let set = stream.set_nodelay(true).and_then(|()| SockRef::from(stream).set_tcp_keepalive(&keep_alive));
    if let Err(error) = set {
        tracing::debug!(%error, "setting socket options failed");
    }
}

/// Returns true if an error affects only one connection.
fn affects_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
