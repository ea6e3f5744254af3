//! Connections: taken, served and ended.
//!
//! A client has a limited time for the headers of a request, and a limited size, so that connections that send them byte by
//! byte hold nothing. What comes behind them, bodies, streams and sockets, may take any time; a peer that is gone without
//! a word is found by TCP's own probes. The same time, once more, is there for the handshake of TLS.

use super::{ApiError, App, security};
use axum::Router;
use axum::extract::{Extension, Request, connect_info::ConnectInfo};
use axum::http::{HeaderValue, header};
use axum::middleware::map_request;
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

/// Maximum size of a request's head, and of the part of a body that is read ahead.
const MAX_HEAD_BYTES: usize = 128 << 10;
/// The same on a server with API keys: the head is read before the key in it can be checked.
const MAX_HEAD_BYTES_WITH_KEYS: usize = 16 << 10;
/// How long a connection is silent before the peer is asked whether it is there, how often, and how many times.
const SILENCE: Duration = Duration::from_mins(1);
const PROBES_EVERY: Duration = Duration::from_secs(15);
const PROBES: u32 = 4;
/// How long to wait when the system has no more descriptors.
const NO_DESCRIPTORS: Duration = Duration::from_secs(1);

/// What every connection of a listener has in common.
#[derive(Clone)]
struct Door {
    builder: Builder,
    /// Where https is served.
    tls: Option<TlsAcceptor>,
    app: App,
}

/// The routes as a connection calls them.
type Service = TowerToHyperService<<Extension<ConnectInfo<SocketAddr>> as Layer<Router>>::Service>;

/// How a connection to a port of https begins.
enum Begun {
    Tls(Box<TlsStream<TcpStream>>),
    /// With http.
    Plain(TcpStream),
}

/// Serves a listener until the app is told to stop, and then what still goes on.
pub(super) async fn accept(listener: TcpListener, routes: Router, app: App) {
    let server = &app.config().server;
    let mut builder = Builder::new();
    let max_head_bytes = if server.security.keys.is_empty() { MAX_HEAD_BYTES } else { MAX_HEAD_BYTES_WITH_KEYS };
    builder.timer(TokioTimer::new()).header_read_timeout(server.header_timeout).max_buf_size(max_head_bytes);
    let tls = server.tls.as_ref().map(|tls| TlsAcceptor::from(tls.server()));
    let routes = if tls.is_some() { routes.layer(map_request(over_tls)) } else { routes };
    let door = Door { builder, tls, app: app.clone() };
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = app.stopping() => break,
        };
        while open.try_join_next().is_some() {}
        match accepted {
            Ok((stream, peer)) => {
                prepare(&stream);
                open.spawn(door.clone().take(stream, peer, routes.clone()));
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::error!(%error, "a connection cannot be taken");
                tokio::time::sleep(NO_DESCRIPTORS).await;
            }
        }
    }
    drop(listener);
    while open.join_next().await.is_some() {}
}

impl Door {
    /// A connection from its first byte to its last.
    async fn take(self, stream: TcpStream, peer: SocketAddr, routes: Router) {
        let service = |routes| TowerToHyperService::new(Extension(ConnectInfo(peer)).layer(routes));
        let Some(tls) = &self.tls else { return self.serve(stream, service(routes)).await };
        let begun = tokio::select! {
            begun = within(self.app.config().server.header_timeout, begin(tls, stream)) => begun,
            () = self.app.stopping() => return,
        };
        match begun {
            Ok(Begun::Tls(stream)) => self.serve(stream, service(routes)).await,
            Ok(Begun::Plain(stream)) => self.serve(stream, service(Router::new().fallback(wrong_scheme))).await,
            Err(error) => tracing::debug!(%error, %peer, "a connection ended before it was one of TLS"),
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
            () = self.app.stopping() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended");
        }
    }
}

/// Begins a connection to a port of https. Handshakes begin with the byte 22, requests with the letters of a method.
async fn begin(tls: &TlsAcceptor, stream: TcpStream) -> io::Result<Begun> {
    let mut first = [0];
    if stream.peek(&mut first).await? > 0 && first[0].is_ascii_uppercase() {
        return Ok(Begun::Plain(stream));
    }
    tls.accept(stream).await.map(|stream| Begun::Tls(Box::new(stream)))
}

async fn within<T>(limit: Option<Duration>, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match limit {
        Some(limit) => tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
        None => work.await,
    }
}

/// What a client that speaks http to a port of https is told, whatever it asked for.
async fn wrong_scheme(request: Request) -> Response {
    let error = ApiError::bad_request(
        "this server speaks https, and the request came over plain http: use an address that begins with https://",
    );
    let mut response = security::in_dialect(request.uri().path(), error);
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Tells the routes, as a proxy would, that the client speaks https.
async fn over_tls(mut request: Request) -> Request {
    request.headers_mut().insert("x-forwarded-proto", HeaderValue::from_static("https"));
    request
}

/// Tokens are small and must not wait for the next one, and a peer that is gone must be noticed.
fn prepare(stream: &TcpStream) {
    let keep_alive = TcpKeepalive::new().with_time(SILENCE).with_interval(PROBES_EVERY).with_retries(PROBES);
    let set = stream.set_nodelay(true).and_then(|()| SockRef::from(stream).set_tcp_keepalive(&keep_alive));
    if let Err(error) = set {
        tracing::debug!(%error, "a connection cannot be set up as wanted");
    }
}

/// Whether an error says nothing of the next connection.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
