//! Command-line flags, each with its environment variable. Flags shared with llama-server accept its spellings.

use super::cache::CacheFlags;
use super::gpu::GpuFlags;
use super::hub::HubFlags;
use super::request_defaults::RequestFlags;
use super::routes::RouteFlags;
use super::vertex::VertexFlags;
use super::{
    AdapterFlags, ClusterFlags, ConfigError, ControlFlags, EncoderFlags, ImageFlags, LimitFlags, ModFlags,
    ModelsConfig, Size, SpeculationFlags, TlsFlags, TuningFlags,
};
use clap::{Args, Command, FromArgMatches};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use super::flag_values::{OnOff, OnOffAuto, Secret};
pub use super::log::LogFlags;

/// The model and its settings.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct EngineFlags {
    /// GGUF file to run; default: the bundled demo model
    #[arg(short, long, env = "THUNDER_MODEL", value_name = "PATH", conflicts_with_all = ["hf_repo", "hf_file", "model_url"])]
    pub model: Option<PathBuf>,
    /// Name of the model in requests and responses; repeat or separate with commas; default: the file's name
    #[arg(short, long, env = "THUNDER_ALIAS", value_name = "NAME", value_delimiter = ',')]
    pub alias: Vec<String>,
    /// Tags of the model in model lists; repeat or separate with commas
    #[arg(long, env = "THUNDER_TAGS", value_name = "WORD", value_delimiter = ',')]
    pub tags: Vec<String>,
    /// Context size in tokens: the total of all slots with --parallel, else the size of each slot; default: the model's
    /// training context, up to 8192 per slot
    #[arg(short, long, env = "THUNDER_CTX_SIZE", value_name = "TOKENS")]
    pub ctx_size: Option<u32>,
    /// Number of slots, and so of runs generated at the same time; default and -1: as many as fit into 32768 tokens, 1
    /// to 4 [also: -np]
    #[arg(long, env = "THUNDER_PARALLEL", value_name = "SLOTS", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i32).range(-1..))]
    pub parallel: Option<i32>,
    /// Threads for generation; default: the number of physical cores
    #[arg(short, long, env = "THUNDER_THREADS", value_name = "N")]
    pub threads: Option<u16>,
    /// Threads for prompt processing; default: same as --threads [also: -tb]
    #[arg(long, env = "THUNDER_THREADS_BATCH", value_name = "N")]
    pub threads_batch: Option<u16>,
    /// Maximum tokens per decode call; at least one for each slot
    #[arg(short, long, env = "THUNDER_BATCH_SIZE", value_name = "TOKENS", default_value_t = 2048)]
    pub batch_size: u32,
    /// Maximum tokens computed at once within a decode call [also: -ub]
    #[arg(long, env = "THUNDER_UBATCH_SIZE", value_name = "TOKENS", default_value_t = 512)]
    pub ubatch_size: u32,
    /// Model read into memory instead of mapped, same as `--load-mode none`; --load-mode overrides `THUNDER_NO_MMAP`
    #[arg(long, env = "THUNDER_NO_MMAP", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_mmap: bool,
    /// Weights locked in memory, in addition to --load-mode
    #[arg(long, env = "THUNDER_MLOCK", value_parser = clap::builder::FalseyValueParser::new())]
    pub mlock: bool,
    /// Capture mode for runs that request attention. on: flash attention is off. off: no capture. auto (default): flash
    /// attention is on, except with a 32-bit cache or `--flash-attn off`
    #[arg(long, env = "THUNDER_ATTENTION", value_name = "auto|on|off")]
    pub attention: Option<OnOffAuto>,
    /// Flash attention; on cannot be combined with `--attention on` [also: -fa]
    #[arg(long, env = "THUNDER_FLASH_ATTN", value_name = "on|off|auto", default_missing_value = "on", num_args = 0..=1)]
    pub flash_attn: Option<OnOffAuto>,
    /// Chat template that replaces the model's: Jinja text, or the name of a built-in template, e.g. llama3
    #[arg(long, env = "THUNDER_CHAT_TEMPLATE", value_name = "JINJA", conflicts_with = "chat_template_file")]
    pub chat_template: Option<String>,
    /// File with a chat template that replaces the model's
    #[arg(long, env = "THUNDER_CHAT_TEMPLATE_FILE", value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// LoRA adapters.
    #[command(flatten)]
    pub adapters: AdapterFlags,
    /// Control vectors.
    #[command(flatten)]
    pub control: ControlFlags,
    /// Models to download.
    #[command(flatten)]
    pub hub: HubFlags,
    /// Images.
    #[command(flatten)]
    pub images: ImageFlags,
    /// GPUs.
    #[command(flatten)]
    pub gpu: GpuFlags,
    /// The KV cache.
    #[command(flatten)]
    pub cache: CacheFlags,
    /// Speculative decoding.
    #[command(flatten)]
    pub speculation: SpeculationFlags,
    /// Compute settings.
    #[command(flatten)]
    pub tuning: TuningFlags,
    /// Embeddings and scores.
    #[command(flatten)]
    pub encoder: EncoderFlags,
    /// Mods.
    #[command(flatten)]
    pub mods: ModFlags,
}

/// Data directory, database and retention.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Data")]
pub struct DataFlags {
    /// Directory of the embedded database and caches; default: `~/.local/share/thunder` or the equivalent of the
    /// system, for root `/var/lib/thunder`
    #[arg(long, env = "THUNDER_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// URL of a PostgreSQL server, version 14 or newer; default: an embedded server in the data directory
    #[arg(long, env = "DATABASE_URL", value_name = "URL", hide_env_values = true)]
    pub database_url: Option<String>,
    /// URL of the same database that bypasses a pooler, for migrations and notifications; default: --database-url
    #[arg(
        long,
        env = "THUNDER_DATABASE_DIRECT_URL",
        value_name = "URL",
        hide_env_values = true,
        requires = "database_url"
    )]
    pub database_direct_url: Option<String>,
    /// Age in days after which runs are removed; default: never
    #[arg(long, env = "THUNDER_KEEP_DAYS", value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_days: Option<u32>,
    /// Maximum size of the events, attention and images of all runs, e.g. 20G; above it the oldest days of runs are
    /// removed, except today's
    #[arg(long, env = "THUNDER_KEEP_SIZE", value_name = "SIZE")]
    pub keep_size: Option<Size>,
}

/// Listener, access and limits of the server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerFlags {
    /// Address to listen on; repeat or separate with commas; default: 127.0.0.1:6767
    #[arg(long, env = "THUNDER_LISTEN", value_name = "ADDR", value_delimiter = ',', conflicts_with_all = ["host", "port"])]
    pub listen: Vec<SocketAddr>,
    /// Host to listen on together with --port, instead of --listen; separate several with commas; same as llama-server's flag
    #[arg(long, env = "THUNDER_HOST", value_name = "HOST")]
    pub host: Option<String>,
    /// Port to listen on together with --host, instead of --listen; same as llama-server's flag
    #[arg(long, env = "THUNDER_PORT", value_name = "PORT")]
    pub port: Option<u16>,
    /// Path prefix of all APIs, sockets and the dashboard, e.g. `/llm`
    #[arg(long, env = "THUNDER_API_PREFIX", value_name = "PATH")]
    pub api_prefix: Option<String>,
    /// APIs without the dashboard
    #[arg(long, alias = "no-webui", env = "THUNDER_NO_UI", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_ui: bool,
    /// API key that clients send as "Authorization: Bearer KEY", "X-Api-Key: KEY" or "X-User-Api-Key: KEY"; repeatable
    #[arg(
        long = "api-key",
        env = "THUNDER_API_KEY",
        value_name = "KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    pub api_keys: Vec<Secret>,
    /// File with API keys, one per line, hidden from process lists; after the key, a line can contain name=NAME (the tenant, which
    /// keys of the same name share), admin (sees the runs of all tenants, may change everything), mods, models, props (rights to
    /// change these) and ingest (only permits sending traces)
    #[arg(long, env = "THUNDER_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// API key that sees the runs of all tenants and may change mods, models and properties; repeatable
    #[arg(
        long = "admin-key",
        env = "THUNDER_ADMIN_KEY",
        value_name = "KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    pub admin_keys: Vec<Secret>,
    /// API key with the right to upload, disable and remove mods; repeatable
    #[arg(
        long = "mod-key",
        env = "THUNDER_MOD_KEY",
        value_name = "KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    pub mod_keys: Vec<Secret>,
    /// Key that only permits sending traces to /ingest; repeatable; API keys permit that, too. The
    /// runs belong to the tenant of the API keys; if there are several tenants, only admin keys see them
    #[arg(
        long = "ingest-key",
        env = "THUNDER_INGEST_KEY",
        value_name = "KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    pub ingest_keys: Vec<Secret>,
    /// Traces at /ingest without a key, even if other routes need one; only on loopback addresses. The runs belong to
    /// the tenant of the API keys; if there are several tenants, only admin keys see them
    #[arg(long, env = "THUNDER_INGEST_OPEN", value_parser = clap::builder::FalseyValueParser::new())]
    pub ingest_open: bool,
    /// Mod uploads at /v1/mods with a --mod-key or --admin-key, and use of mods uploaded earlier
    #[arg(long, env = "THUNDER_ALLOW_MOD_UPLOAD", value_parser = clap::builder::FalseyValueParser::new())]
    pub allow_mod_upload: bool,
    /// Access from other machines without a key
    #[arg(long, env = "THUNDER_ALLOW_UNAUTHENTICATED", value_parser = clap::builder::FalseyValueParser::new())]
    pub allow_unauthenticated: bool,
    /// Web origin whose pages may call the API, e.g. `https://app.example`; repeatable; localhost, or * for all
    #[arg(
        long = "cors-origin",
        alias = "cors-origins",
        env = "THUNDER_CORS_ORIGIN",
        value_name = "ORIGIN",
        value_delimiter = ','
    )]
    pub cors_origins: Vec<String>,
    /// Host name under which browsers may reach the server, besides localhost and its addresses; repeatable
    #[arg(long = "trusted-host", env = "THUNDER_TRUSTED_HOST", value_name = "HOST", value_delimiter = ',')]
    pub trusted_hosts: Vec<String>,
    /// TLS.
    #[command(flatten)]
    pub tls: TlsFlags,
    /// Error 404 for requests that name an unknown model; default: a server with one model answers them with that model
    #[arg(long, env = "THUNDER_STRICT_MODEL_NAMES", value_parser = clap::builder::FalseyValueParser::new(),
          conflicts_with = "any_model_name")]
    pub strict_model_names: bool,
    /// Default model for requests that name an unknown model, even with --models-dir
    #[arg(long, env = "THUNDER_ANY_MODEL_NAME", value_parser = clap::builder::FalseyValueParser::new())]
    pub any_model_name: bool,
    /// Folder of GGUF files that can be loaded by file name, in addition to --model
    #[arg(long, env = "THUNDER_MODELS_DIR", value_name = "DIR")]
    pub models_dir: Option<PathBuf>,
    /// Maximum number of loaded models; loading one more unloads the least recently used; 0 for unlimited
    #[arg(long, env = "THUNDER_MODELS_MAX", value_name = "N", default_value_t = 4)]
    pub models_max: u32,
    /// Loading of models from --models-dir when a request names them [also: --no-models-autoload]
    #[arg(
        long,
        env = "THUNDER_MODELS_AUTOLOAD",
        value_name = "on|off",
        default_value = "on",
        default_missing_value = "on",
        num_args = 0..=1,
        require_equals = true
    )]
    pub models_autoload: OnOff,
    /// Seconds without a run after which a model is unloaded until its next request; -1 or 0 for never
    #[arg(long, env = "THUNDER_SLEEP_IDLE_SECONDS", value_name = "SECONDS", default_value_t = -1,
          allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..=1 << 31))]
    pub sleep_idle_seconds: i64,
    /// Maximum size of a request body, e.g. 256M
    #[arg(long, env = "THUNDER_MAX_BODY", value_name = "SIZE", default_value = "256M")]
    pub max_body: Size,
    /// Seconds of silence after which a stream sends a comment line to keep proxies from closing it; -1 for never
    #[arg(
        long,
        env = "THUNDER_SSE_PING_INTERVAL",
        value_name = "SECONDS",
        default_value_t = 30,
        allow_negative_numbers = true
    )]
    pub sse_ping_interval: i64,
    /// Seconds that runs may continue after the server received a stop signal
    #[arg(long, env = "THUNDER_SHUTDOWN_GRACE", value_name = "SECONDS", default_value_t = 10)]
    pub shutdown_grace: u64,
    /// Limits for clients.
    #[command(flatten)]
    pub limits: LimitFlags,
    /// Default values of requests.
    #[command(flatten)]
    pub requests: RequestFlags,
    /// Routes of llama-server.
    #[command(flatten)]
    pub routes: RouteFlags,
    /// Several servers on one database.
    #[command(flatten)]
    pub cluster: ClusterFlags,
    /// Vertex AI.
    #[command(flatten)]
    pub vertex: VertexFlags,
    /// Logging.
    #[command(flatten)]
    pub log: LogFlags,
}

/// Returns the flags of a command line without flags, which the environment does not affect.
#[must_use]
pub fn default_flags<T: FromArgMatches>() -> T {
    let command = Command::new("thunder").no_binary_name(true);
    let command = ServerFlags::augment_args(DataFlags::augment_args(EngineFlags::augment_args(command)));
    let matches = command.mut_args(|flag| flag.env(None::<&str>)).try_get_matches_from(std::iter::empty::<&str>());
    // No flag is required.
    matches.and_then(|matches| T::from_arg_matches(&matches)).unwrap_or_else(|error| error.exit())
}

impl EngineFlags {
    /// Returns the warnings about flags that have no effect.
    #[must_use]
    pub fn ineffective_flag_notes(&self) -> Vec<String> {
        let speculation = self.speculation.ineffective_flag_note().map(str::to_owned);
        speculation.into_iter().chain(self.images.ineffective_flag_note()).collect()
    }

    /// Returns true if runs can capture attention.
    #[must_use]
    pub fn captures_attention(&self) -> bool {
        self.attention != Some(OnOffAuto::Off)
    }
}

impl ServerFlags {
    /// Returns the addresses to listen on.
    pub(super) fn addresses(&self) -> Result<Vec<SocketAddr>, ConfigError> {
        use std::net::ToSocketAddrs;
        let mut addresses = self.listen.clone();
        if self.host.is_some() || self.port.is_some() || addresses.is_empty() {
            let port = self.port.unwrap_or(super::DEFAULT_PORT);
            for host in self.host.as_deref().unwrap_or("127.0.0.1").split(',').map(str::trim) {
                // llama-server listens on a Unix socket then.
                if std::path::Path::new(host).extension().is_some_and(|extension| extension == "sock") {
                    return Err(ConfigError::UnixSocket { path: host.to_owned() });
                }
                let found = (host, port)
                    .to_socket_addrs()
                    .map_err(|source| ConfigError::Host { host: host.to_owned(), source })?
                    .next()
                    .ok_or_else(|| ConfigError::NoAddress { host: host.to_owned() })?;
                addresses.push(found);
            }
        }
        if let Some(port) = self.vertex.port() {
            addresses.iter_mut().for_each(|address| address.set_port(port));
        }
        let mut seen = std::collections::HashSet::new();
        addresses.retain(|&address| address.port() == 0 || seen.insert(address));
        Ok(addresses)
    }

    /// Returns the prefix of every path; empty for none.
    pub(super) fn prefix(&self) -> Result<String, ConfigError> {
        let path = self.api_prefix.as_deref().unwrap_or_default();
        let prefix = path.trim_end_matches('/');
        let is_plain = |part: &str| {
            let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
            !part.is_empty() && part.bytes().all(is_known) && !part.bytes().all(|byte| byte == b'.')
        };
        match prefix.strip_prefix('/') {
            None if prefix.is_empty() => Ok(String::new()),
            Some(parts) if parts.split('/').all(is_plain) => Ok(prefix.to_owned()),
            _ => Err(ConfigError::Prefix { prefix: path.to_owned() }),
        }
    }

    /// Returns the silence after which a stream sends a comment line; `None` for never.
    pub(super) fn sse_ping_interval(&self) -> Option<Duration> {
        u64::try_from(self.sse_ping_interval).ok().filter(|&seconds| seconds > 0).map(Duration::from_secs)
    }

    /// Returns true if the default model answers requests that name an unknown model.
    pub(super) fn accepts_any_model_name(&self) -> bool {
        self.any_model_name || (self.models_dir.is_none() && !self.strict_model_names)
    }

    /// Returns the settings for models besides the default one.
    pub(super) fn models(&self) -> Result<ModelsConfig, ConfigError> {
        if let Some(path) = self.models_dir.as_ref().filter(|path| !path.is_dir()) {
            return Err(ConfigError::NoModelsDir { path: path.display().to_string() });
        }
        Ok(ModelsConfig {
            dir: self.models_dir.clone(),
            autoload: self.models_autoload == OnOff::On,
            max_loaded: (self.models_max > 0).then_some(self.models_max as usize),
            sleep_after: u64::try_from(self.sleep_idle_seconds)
                .ok()
                .filter(|&seconds| seconds > 0)
                .map(Duration::from_secs),
        })
    }
}
