//! How much a client may ask of the server: messages, idle sockets, runs that rest, runs a minute.

use super::Size;
use clap::Args;
use std::num::NonZeroU32;
use std::time::Duration;

/// What a client may ask of the server.
#[derive(Debug, Clone, Default, Args)]
pub struct LimitFlags {
    /// Seconds that a client has for the headers of a request, and for the handshake of TLS before them, and that a connection may
    /// stay open without one; 0 for any time
    #[arg(long, env = "THUNDER_HEADER_TIMEOUT", value_name = "SECONDS", default_value_t = 75)]
    pub header_timeout: u64,
    /// Largest message on a WebSocket, e.g. 8M
    #[arg(long, env = "THUNDER_MAX_MESSAGE", value_name = "SIZE", default_value = "8M")]
    pub max_message: Size,
    /// Most attention in one answer of the attention API, and in one message of its WebSocket, e.g. 1G; a request for more ends
    /// with the error OOM
    #[arg(long, env = "THUNDER_MAX_ATTENTION", value_name = "SIZE", default_value = "1G")]
    pub max_attention: Size,
    /// Seconds between pings on a WebSocket; a client that shows no life for three of them, and for a minute, is cut off;
    /// 0 for no pings
    #[arg(long, env = "THUNDER_SOCKET_PING", value_name = "SECONDS", default_value_t = 20)]
    pub socket_ping: u64,
    /// Seconds after which a WebSocket without messages and runs is closed; 0 for never
    #[arg(long, env = "THUNDER_SOCKET_IDLE", value_name = "SECONDS", default_value_t = 3600)]
    pub socket_idle: u64,
    /// Seconds for which a run that a client has paused keeps its slot; then the slot goes to others until it goes on
    #[arg(long, env = "THUNDER_PAUSE_TIMEOUT", value_name = "SECONDS", default_value_t = 30)]
    pub pause_timeout: u64,
    /// Seconds for which a run on WS /generate goes on, and is known after its end, when its client has gone
    #[arg(long, env = "THUNDER_STREAM_KEEP", value_name = "SECONDS", default_value_t = 60)]
    pub stream_keep: u64,
    /// Most seconds that a run on WS /generate, POST /v1/generate or the attention API may take; a request may ask for less; 0
    /// for any time
    #[arg(long, env = "THUNDER_RUN_TIMEOUT", value_name = "SECONDS", default_value_t = 0)]
    pub run_timeout: u64,
    /// Most tokens that an answer may have, whatever a request asks for; one that asks for more is refused; 0 for as many
    /// as the context holds
    #[arg(long, env = "THUNDER_MAX_TOKENS_LIMIT", value_name = "TOKENS", default_value_t = 0)]
    pub max_tokens_limit: u32,
    /// Most requests that begin runs that each key may make in a minute; 0 for any number
    #[arg(long, env = "THUNDER_RATE_LIMIT", value_name = "RUNS", default_value_t = 0)]
    pub rate_limit: u32,
    /// Most requests that begin runs that may come from each address in a minute; 0 for any number
    #[arg(long, env = "THUNDER_RATE_LIMIT_ADDRESS", value_name = "RUNS", default_value_t = 0)]
    pub rate_limit_address: u32,
    /// Most of them at once; 0 for as many as in a minute
    #[arg(long, env = "THUNDER_RATE_BURST", value_name = "RUNS", default_value_t = 0)]
    pub rate_burst: u32,
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

/// How long runs of the streaming protocol wait for their client.
#[derive(Debug, Clone, Copy)]
pub struct RunTimeoutConfig {
    /// How long a paused run keeps its slot.
    pub pause: Duration,
    /// How long a run goes on without its client.
    pub keep: Duration,
    /// Most time that a run may take; `None` for any.
    pub longest: Option<Duration>,
}

/// How many runs may be begun in a minute.
#[derive(Debug, Clone, Copy)]
pub struct RateConfig {
    /// By each key; `None` for any number.
    pub per_key: Option<NonZeroU32>,
    /// From each address; `None` for any number.
    pub per_address: Option<NonZeroU32>,
    /// At once; `None` for as many as in a minute.
    pub burst: Option<NonZeroU32>,
}

impl LimitFlags {
    /// How long runs wait for their client.
    pub(super) fn runs(&self) -> RunTimeoutConfig {
        RunTimeoutConfig {
            pause: Duration::from_secs(self.pause_timeout),
            keep: Duration::from_secs(self.stream_keep),
            longest: (self.run_timeout > 0).then(|| Duration::from_secs(self.run_timeout)),
        }
    }

    /// Most tokens that an answer may have; `None` for as many as fit.
    pub(super) fn max_tokens(&self) -> Option<u32> {
        (self.max_tokens_limit > 0).then_some(self.max_tokens_limit)
    }

    /// How long a client may take for the headers of a request; `None` for ever.
    pub(super) fn header_timeout(&self) -> Option<Duration> {
        (self.header_timeout > 0).then(|| Duration::from_secs(self.header_timeout))
    }

    /// How many runs may be begun.
    pub(super) fn rates(&self) -> RateConfig {
        RateConfig {
            per_key: NonZeroU32::new(self.rate_limit),
            per_address: NonZeroU32::new(self.rate_limit_address),
            burst: NonZeroU32::new(self.rate_burst),
        }
    }

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
