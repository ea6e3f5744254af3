//! Configuration: flags, then environment, then configuration file, then defaults, validated once.
//!
//! [`flags`] holds the parsed command line, [`Config`] the validated result that the rest of the program reads. Nothing
//! else validates a value again.

mod adapters;
mod cache;
mod chat_templates;
mod cluster;
mod control;
mod defaults;
mod encoder;
mod engine;
mod error;
mod flag_values;
pub mod flags;
mod gpu;
pub mod hub;
mod images;
mod limits;
mod log;
mod mods;
mod request_defaults;
mod routes;
mod security;
mod speculation;
mod tls;
mod tuning;
mod vertex;

use flags::{DataFlags, EngineFlags, ServerFlags};
use request_defaults::RequestDefaults;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

pub use adapters::{AdapterFlags, ScaledFile};
pub use cache::{CacheConfig, CacheTypeFlag, ContextPolicy};
pub use chat_templates::{CHAT_TEMPLATES, is_chat_template_name};
pub use cluster::{ClusterConfig, ClusterFlags};
pub use control::{ControlConfig, ControlFlags};
pub use defaults::bundled_model;
pub use encoder::{EncoderFlags, HeadFlag, PoolingFlag};
pub use engine::EngineConfig;
pub use error::ConfigError;
pub use flag_values::Size;
pub use gpu::{GpuConfig, GpuFlags, GpuLayersFlag, SplitModeFlag, TensorOverride};
pub use images::{ImageConfig, ImageFlags, ImageUrlConfig, UrlHost};
pub use limits::{LimitFlags, RateConfig, RunTimeoutConfig, SocketConfig};
pub use mods::{ModFlags, ModSandbox, ModsConfig};
pub use routes::RouteConfig;
pub use security::{KeyHash, LOCALHOST, Rights, SecurityConfig};
pub use speculation::{DraftModelConfig, SpecTypeFlag, SpeculationConfig, SpeculationFlags};
pub use tls::{TlsConfig, TlsError, TlsFlags, certificates};
pub use tuning::{LoadMode, NumaFlag, OverrideValue, RopeScalingFlag, TuningFlags};
pub use vertex::VertexConfig;

/// Default port of the server.
pub const DEFAULT_PORT: u16 = 6767;
/// Default address of the server.
pub const DEFAULT_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), DEFAULT_PORT);
/// Default context per slot in tokens, for models that were trained with it or a larger one.
pub const DEFAULT_SLOT_CONTEXT: u32 = 8192;

/// A validated configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// The model and its settings.
    pub engine: EngineConfig,
    /// Data directory, database and retention.
    pub data: DataConfig,
    /// Listener, access and limits of the server.
    pub server: ServerConfig,
}

/// Data directory, database and retention.
#[derive(Clone)]
pub struct DataConfig {
    /// Directory of the embedded database and caches.
    pub dir: PathBuf,
    /// URL of an external PostgreSQL. May hold a password: not shown by `Debug`.
    pub database_url: Option<String>,
    /// The same database without a pooler. May hold a password, too.
    pub database_direct_url: Option<String>,
    /// Days after which runs are removed; `None` for never.
    pub keep_days: Option<u32>,
    /// Maximum bytes of all runs before the oldest are removed; `None` for unlimited.
    pub keep_bytes: Option<u64>,
}

/// Listener, access and limits of the server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// One or more addresses.
    pub listen: Vec<SocketAddr>,
    /// Access control and certificate at the start; the server's current ones may have been reloaded.
    pub credentials: Credentials,
    /// Prefix of every path: empty, or a path such as `/llm`.
    pub prefix: String,
    /// True if the dashboard is served.
    pub dashboard: bool,
    /// True if the default model answers requests that name an unknown model; false for a 404.
    pub any_model_name: bool,
    /// Models besides the default one.
    pub models: ModelsConfig,
    /// Maximum size of a request body in bytes.
    pub max_body_bytes: usize,
    /// Timeout for the headers of a request and for idle connections; `None` for unlimited.
    pub header_timeout: Option<Duration>,
    /// Time that runs may continue after a stop signal.
    pub shutdown_grace: Duration,
    /// Maximum bytes of attention data in a response or a message.
    pub max_attention_bytes: usize,
    /// Silence after which a stream sends a comment line; `None` for never.
    pub sse_ping_interval: Option<Duration>,
    /// Limits of a WebSocket.
    pub sockets: SocketConfig,
    /// Timeouts of runs of the streaming protocol.
    pub run_timeouts: RunTimeoutConfig,
    /// Maximum run requests per minute.
    pub rates: RateConfig,
    /// Maximum tokens of an answer; `None` for as many as fit.
    pub max_tokens: Option<u32>,
    /// Default fields of requests.
    pub request_defaults: Map<String, Value>,
    /// Flags that set these defaults, by field.
    pub request_default_flags: HashMap<String, &'static str>,
    /// Routes of llama-server.
    pub routes: RouteConfig,
    /// Routes for Vertex AI, if it runs the server.
    pub vertex: Option<VertexConfig>,
    /// Several servers on one database.
    pub cluster: ClusterConfig,
    /// True if authorized clients may upload mods, and uploaded mods may run.
    pub allow_mod_upload: bool,
}

/// Models besides the default one.
#[derive(Debug, Clone, Default)]
pub struct ModelsConfig {
    /// Folder of GGUF files that can be loaded by name.
    pub dir: Option<PathBuf>,
    /// True if a request loads the model it names.
    pub autoload: bool,
    /// Maximum number of loaded models, 1 or more; `None` for unlimited.
    pub max_loaded: Option<usize>,
    /// Idle time after which a model is unloaded until its next request; `None` for never.
    pub sleep_after: Option<Duration>,
}

impl std::fmt::Debug for DataConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let url = self.database_url.as_ref().map(|_| "(hidden)");
        f.debug_struct("DataConfig")
            .field("dir", &self.dir)
            .field("database_url", &url)
            .field("database_direct_url", &self.database_direct_url.as_ref().map(|_| "(hidden)"))
            .field("keep_days", &self.keep_days)
            .field("keep_bytes", &self.keep_bytes)
            .finish()
    }
}

/// Access control and certificate: what a running server can reload.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    /// Keys, origins and host names.
    pub security: SecurityConfig,
    /// Certificate and key for HTTPS; `None` for plain HTTP.
    pub tls: Option<TlsConfig>,
}

impl Credentials {
    /// Reads the key file and the certificate that the flags name, for a server on the addresses `listen`.
    ///
    /// # Errors
    /// [`ConfigError`] names the invalid flag or file.
    pub fn read(server: &ServerFlags, listen: &[SocketAddr], cluster: &ClusterConfig) -> Result<Self, ConfigError> {
        let mut security = server.security(listen)?;
        security.trusted_hosts.extend(cluster.host());
        Ok(Self { security, tls: server.tls.config()? })
    }
}

impl Config {
    /// Validates all flags and fills in the defaults.
    ///
    /// # Errors
    /// [`ConfigError`] names the invalid flag and the valid values.
    pub fn new(engine: EngineFlags, data: DataFlags, server: &ServerFlags) -> Result<Self, ConfigError> {
        let listen = server.addresses()?;
        let cluster = server.cluster.config()?;
        let credentials = Credentials::read(server, &listen, &cluster)?;
        let mut request_defaults = engine.cache.defaults();
        request_defaults.extend(engine.speculation.defaults());
        let RequestDefaults { fields, flags: request_default_flags } = server.requests.defaults()?;
        request_defaults.extend(fields);
        if server.log.shows_verbose() {
            request_defaults.entry("verbose").or_insert(true.into());
        }
        let max_tokens = server.limits.max_tokens();
        if let (Some(max), Some(predict)) = (max_tokens, request_defaults.get_mut("n_predict"))
            && predict.as_i64().is_some_and(|predict| predict > i64::from(max))
        {
            *predict = max.into();
        }
        Ok(Self {
            engine: engine.config()?,
            data: data.config()?,
            server: ServerConfig {
                credentials,
                prefix: server.prefix()?,
                dashboard: !server.no_ui,
                routes: server.routes.config(&listen)?,
                listen,
                any_model_name: server.accepts_any_model_name(),
                models: server.models()?,
                max_body_bytes: server.max_body.0,
                header_timeout: server.limits.header_timeout(),
                shutdown_grace: Duration::from_secs(server.shutdown_grace),
                max_attention_bytes: server.limits.max_attention.0,
                sse_ping_interval: server.sse_ping_interval(),
                sockets: server.limits.sockets(),
                run_timeouts: server.limits.run_timeouts(),
                rates: server.limits.rates(),
                max_tokens,
                request_defaults,
                request_default_flags,
                vertex: server.vertex.config(),
                cluster,
                allow_mod_upload: server.allow_mod_upload,
            },
        })
    }
}

impl DataFlags {
    /// Validates the flags and fills in the defaults.
    ///
    /// # Errors
    /// [`ConfigError`] names the invalid flag.
    pub fn config(self) -> Result<DataConfig, ConfigError> {
        let database_url = self.database_url.filter(|url| !url.is_empty());
        let database_direct_url = self.database_direct_url.filter(|url| !url.is_empty());
        let is_address = |url: &String| url.starts_with("postgres://") || url.starts_with("postgresql://");
        if ![&database_url, &database_direct_url].into_iter().flatten().all(is_address) {
            return Err(ConfigError::DatabaseUrl);
        }
        let dir = match self.data_dir {
            Some(dir) => std::path::absolute(&dir).unwrap_or(dir),
            None => defaults::data_dir().ok_or(ConfigError::NoHome)?,
        };
        let keep_bytes = self.keep_size.map(|size| size.0 as u64);
        Ok(DataConfig { dir, database_url, database_direct_url, keep_days: self.keep_days, keep_bytes })
    }
}

#[cfg(test)]
mod tests;
