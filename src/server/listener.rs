//! Listeners and the lifetime of the server.

use super::{App, ServerState, connections};
use axum::Router;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Maximum time for interrupted connections to send their last bytes.
const LAST_WRITE_TIMEOUT: Duration = Duration::from_secs(3);

/// A failure to listen on an address.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}{}", hint(*address, source))]
pub struct BindError {
    address: SocketAddr,
    source: std::io::Error,
}

fn hint(address: SocketAddr, error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => format!(
            "; another program, perhaps another Thunder, listens there; choose another address, e.g. --listen {}:{}",
            address.ip(),
            address.port().wrapping_add(1)
        ),
        _ => String::new(),
    }
}

/// Bound listeners. Connections are accepted after [`Listeners::serve`] is called.
#[derive(Debug)]
pub struct Listeners(Vec<TcpListener>);

impl Listeners {
    /// Listens on all addresses.
    ///
    /// # Errors
    /// The first address that could not be bound.
    pub async fn bind(addresses: &[SocketAddr]) -> Result<Self, BindError> {
        let mut listeners = Vec::with_capacity(addresses.len());
        for &address in addresses {
            listeners.push(TcpListener::bind(address).await.map_err(|source| BindError { address, source })?);
        }
        Ok(Self(listeners))
    }

    /// Returns the addresses, with the ports that the system chose for port 0.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.0.iter().filter_map(|listener| listener.local_addr().ok()).collect()
    }

    /// Serves routes on every address until the server stops, then waits for active requests and interrupts them
    /// after the configured time.
    pub async fn serve(self, app: App, routes: Router) {
        let grace = app.config().server.shutdown_grace;
        let mut servers = JoinSet::new();
        for listener in self.0 {
            servers.spawn(connections::accept(listener, routes.clone(), app.clone()));
        }
        app.wait_until_stopping().await;
        let all_ended = async {
            while servers.join_next().await.is_some() {}
            app.sockets().all_closed().await;
        };
        tokio::pin!(all_ended);
        if tokio::time::timeout(grace, &mut all_ended).await.is_err() {
            tracing::warn!(grace_s = grace.as_secs(), "grace period over, ending active runs");
            app.models().announce_stop();
            app.set_state(ServerState::Stopped);
            if tokio::time::timeout(LAST_WRITE_TIMEOUT, all_ended).await.is_err() {
                tracing::debug!("connections still open at exit");
            }
        }
        app.set_state(ServerState::Stopped);
    }
}
