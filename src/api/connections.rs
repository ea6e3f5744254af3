//! Connections: taken, served and ended.
//!
//! A client has a limited time for the headers of a request, and a limited size, so that connections that send them byte by
//! byte hold nothing. What comes behind them, bodies, streams and sockets, may take any time; a peer that is gone without
//! a word is found by TCP's own probes.

use super::App;
use axum::Router;
use axum::extract::{Extension, connect_info::ConnectInfo};
use hyper::server::conn::http1::Builder;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tower::Layer;

/// Most bytes of a request's head. Also most of a body that is read ahead.
const MOST_HEAD: usize = 128 << 10;
/// How long a connection is silent before the peer is asked whether it is there, how often, and how many times.
const SILENCE: Duration = Duration::from_mins(1);
const PROBES_EVERY: Duration = Duration::from_secs(15);
const PROBES: u32 = 4;
/// How long to wait when the system has no more descriptors.
const NO_DESCRIPTORS: Duration = Duration::from_secs(1);

/// Serves a listener until the app is told to stop, and then what still goes on.
pub(super) async fn accept(listener: TcpListener, routes: Router, app: App) {
    let mut builder = Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(app.config().server.header_timeout).max_buf_size(MOST_HEAD);
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
                let routes = Extension(ConnectInfo::<SocketAddr>(peer)).layer(routes.clone());
                open.spawn(serve(stream, builder.clone(), TowerToHyperService::new(routes), app.clone()));
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

/// The routes as a connection calls them.
type Service = TowerToHyperService<<Extension<ConnectInfo<SocketAddr>> as Layer<Router>>::Service>;

async fn serve(stream: TcpStream, builder: Builder, service: Service, app: App) {
    let connection = builder.serve_connection(TokioIo::new(stream), service).with_upgrades();
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = app.stopping() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended");
    }
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
fn is_of_one_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
