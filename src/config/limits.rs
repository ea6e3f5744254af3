//! How much a client may ask of the server: messages, idle sockets.

use super::Size;
use clap::Args;
use std::time::Duration;

/// What a client may ask of the server.
#[derive(Debug, Clone, Default, Args)]
pub struct LimitFlags {
    /// Largest message on a WebSocket, e.g. 8M
    #[arg(long, env = "THUNDER_MAX_MESSAGE", value_name = "SIZE", default_value = "8M")]
    pub max_message: Size,
    /// Seconds between pings on a WebSocket; a client that shows no life for three of them, and for a minute, is cut off;
    /// 0 for no pings
    #[arg(long, env = "THUNDER_SOCKET_PING", value_name = "SECONDS", default_value_t = 20)]
    pub socket_ping: u64,
    /// Seconds after which a WebSocket without messages and runs is closed; 0 for never
    #[arg(long, env = "THUNDER_SOCKET_IDLE", value_name = "SECONDS", default_value_t = 3600)]
    pub socket_idle: u64,
}

/// What one WebSocket may do.
#[derive(Debug, Clone, Copy)]
pub struct SocketConfig {
    /// Largest message, in bytes.
    pub max_message_bytes: usize,
    /// Time between pings; `None` for no pings.
    pub ping: Option<Duration>,
    /// How long it may stay open without messages and runs; `None` for ever.
    pub idle: Option<Duration>,
}

impl LimitFlags {
    /// What one WebSocket may do.
    pub(super) fn sockets(&self) -> SocketConfig {
        let seconds = |count: u64| (count > 0).then(|| Duration::from_secs(count));
        SocketConfig {
            max_message_bytes: self.max_message.0,
            ping: seconds(self.socket_ping),
            idle: seconds(self.socket_idle),
        }
    }
}
