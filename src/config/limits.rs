//! Limits for clients: message sizes, timeouts and rates.

use super::Size;
use clap::Args;
use std::num::NonZeroU32;
use std::time::Duration;

/// Limits for clients.
#[derive(Debug, Clone, Args)]
pub struct LimitFlags {
    /// Seconds to receive the headers of a request (and the TLS handshake before), and to keep an idle connection open;
    /// 0 for unlimited
    #[arg(long, env = "THUNDER_HEADER_TIMEOUT", value_name = "SECONDS", default_value_t = 75)]
    pub header_timeout: u64,
    /// Maximum size of a WebSocket message, e.g. 8M
    #[arg(long, env = "THUNDER_MAX_MESSAGE", value_name = "SIZE", default_value = "8M")]
    pub max_message: Size,
    /// Maximum attention data in one response of the attention API, or one message of its WebSocket, e.g. 1G; with more,
    /// a request fails with the error OOM
    #[arg(long, env = "THUNDER_MAX_ATTENTION", value_name = "SIZE", default_value = "1G")]
    pub max_attention: Size,
    /// Seconds between pings on a WebSocket; clients that send nothing for three pings, and for a minute or more, or no
    /// complete frame for 10 minutes are disconnected; 0 for no pings and no such limits
    #[arg(long, env = "THUNDER_SOCKET_PING", value_name = "SECONDS", default_value_t = 20)]
    pub socket_ping: u64,
    /// Seconds after which a WebSocket without messages and runs is closed; 0 for never
    #[arg(long, env = "THUNDER_SOCKET_IDLE", value_name = "SECONDS", default_value_t = 3600)]
    pub socket_idle: u64,
    /// Seconds that a run paused by its client keeps its slot; then other runs can take the slot until the run resumes
    #[arg(long, env = "THUNDER_PAUSE_TIMEOUT", value_name = "SECONDS", default_value_t = 30)]
    pub pause_timeout: u64,
    /// Seconds that a run on WS /generate continues without its client, and that it can still be queried after its end
    #[arg(long, env = "THUNDER_STREAM_KEEP", value_name = "SECONDS", default_value_t = 60)]
    pub stream_keep: u64,
    /// Maximum seconds of a run on WS /generate and POST /v1/generate, where requests may set less, and of the attention
    /// API; 0 for unlimited
    #[arg(long, env = "THUNDER_RUN_TIMEOUT", value_name = "SECONDS", default_value_t = 0)]
    pub run_timeout: u64,
    /// Maximum tokens of an answer; requests for more are rejected; 0 for the size of the context
    #[arg(long, env = "THUNDER_MAX_TOKENS_LIMIT", value_name = "TOKENS", default_value_t = 0)]
    pub max_tokens_limit: u32,
    /// Maximum run requests per minute and key; 0 for unlimited
    #[arg(long, env = "THUNDER_RATE_LIMIT", value_name = "RUNS", default_value_t = 0)]
    pub rate_limit: u32,
    /// Maximum run requests per minute and client address; 0 for unlimited
    #[arg(long, env = "THUNDER_RATE_LIMIT_ADDRESS", value_name = "RUNS", default_value_t = 0)]
    pub rate_limit_address: u32,
    /// Burst size of the rate limits; 0 for the requests of one minute
    #[arg(long, env = "THUNDER_RATE_BURST", value_name = "RUNS", default_value_t = 0)]
    pub rate_burst: u32,
}

/// Limits of a WebSocket.
#[derive(Debug, Clone, Copy)]
pub struct SocketConfig {
    /// Maximum size of a message in bytes.
    pub max_message_bytes: usize,
    /// Interval between pings; `None` for no pings.
    pub ping: Option<Duration>,
    /// Time without messages and runs after which it is closed; `None` for never.
    pub idle: Option<Duration>,
}

/// Timeouts of runs of the streaming protocol and of the attention API.
#[derive(Debug, Clone, Copy)]
pub struct RunTimeoutConfig {
    /// Time that a paused run keeps its slot.
    pub paused_slot: Duration,
    /// Time that a run continues without its client.
    pub disconnected: Duration,
    /// Maximum duration of a run; `None` for unlimited.
    pub max_duration: Option<Duration>,
}

/// Maximum run requests per minute.
#[derive(Debug, Clone, Copy)]
pub struct RateConfig {
    /// Per key; `None` for unlimited.
    pub per_key: Option<NonZeroU32>,
    /// Per client address; `None` for unlimited.
    pub per_address: Option<NonZeroU32>,
    /// Burst size; `None` for the requests of one minute.
    pub burst: Option<NonZeroU32>,
}

impl LimitFlags {
    /// Returns the timeouts of runs.
    pub(super) fn run_timeouts(&self) -> RunTimeoutConfig {
        RunTimeoutConfig {
            paused_slot: Duration::from_secs(self.pause_timeout),
            disconnected: Duration::from_secs(self.stream_keep),
            max_duration: (self.run_timeout > 0).then(|| Duration::from_secs(self.run_timeout)),
        }
    }

    /// Returns the maximum tokens of an answer; `None` for as many as fit.
    pub(super) fn max_tokens(&self) -> Option<u32> {
        (self.max_tokens_limit > 0).then_some(self.max_tokens_limit)
    }

    /// Returns the time to receive the headers of a request; `None` for unlimited.
    pub(super) fn header_timeout(&self) -> Option<Duration> {
        (self.header_timeout > 0).then(|| Duration::from_secs(self.header_timeout))
    }

    /// Returns the rate limits.
    pub(super) fn rates(&self) -> RateConfig {
        RateConfig {
            per_key: NonZeroU32::new(self.rate_limit),
            per_address: NonZeroU32::new(self.rate_limit_address),
            burst: NonZeroU32::new(self.rate_burst),
        }
    }

    /// Returns the limits of a WebSocket.
    pub(super) fn sockets(&self) -> SocketConfig {
        let seconds = |count: u64| (count > 0).then(|| Duration::from_secs(count));
        SocketConfig {
            max_message_bytes: self.max_message.0,
            ping: seconds(self.socket_ping),
            idle: seconds(self.socket_idle),
        }
    }
}
