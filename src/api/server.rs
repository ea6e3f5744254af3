//! Listening, and the life of a server: from the first connection to the last.

use super::{App, State, connections, router};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// How long cut-off connections get to send their last bytes.
const LAST_BYTES: Duration = Duration::from_millis(500);

/// Why an address cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}{}", hint(*address, source))]
pub struct BindError {
    address: SocketAddr,
    source: std::io::Error,
}

fn hint(address: SocketAddr, error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => format!(
            "; another program listens there, perhaps another Thunder; choose another address, e.g. --listen {}:{}",
            address.ip(),
            address.port().wrapping_add(1)
        ),
        _ => String::new(),
    }
}

/// Addresses that are listened on; connections wait until [`Listeners::serve`].
#[derive(Debug)]
pub struct Listeners(Vec<TcpListener>);

impl Listeners {
    /// Listens on all addresses.
    ///
    /// # Errors
    /// The first address that cannot be listened on.
    pub async fn bind(addresses: &[SocketAddr]) -> Result<Self, BindError> {
        let mut listeners = Vec::with_capacity(addresses.len());
        for &address in addresses {
            listeners.push(TcpListener::bind(address).await.map_err(|source| BindError { address, source })?);
        }
        Ok(Self(listeners))
    }

    /// The addresses, with the ports that the system chose for port 0.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.0.iter().filter_map(|listener| listener.local_addr().ok()).collect()
    }

    /// Serves every surface on every address until the app is told to stop; then waits for what goes on, and cuts
    /// it off after the configured time.
    pub async fn serve(self, app: App) {
        let grace = app.config().server.shutdown_grace;
        let routes = router(&app);
        let mut servers = JoinSet::new();
        for listener in self.0 {
            servers.spawn(connections::accept(listener, routes.clone(), app.clone()));
        }
        app.stopping().await;
        let all_ended = async {
            while servers.join_next().await.is_some() {}
            app.sockets().all_closed().await;
        };
        tokio::pin!(all_ended);
        if tokio::time::timeout(grace, &mut all_ended).await.is_err() {
            tracing::warn!(grace_s = grace.as_secs(), "runs are still going on and are cut off");
            app.set_state(State::Stopped);
            if tokio::time::timeout(LAST_BYTES, all_ended).await.is_err() {
                tracing::debug!("connections are left open");
            }
        }
        app.set_state(State::Stopped);
    }
}
