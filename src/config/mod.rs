//! Configuration: flags, then environment, then defaults, validated once.
//!
//! [`flags`] holds the parsed command line, [`Config`] the validated result that the rest of the program reads. Nothing
//! else reads the environment or validates a value again.

mod adapters;
mod cache;
mod chat_templates;
mod cluster;
mod control;
mod defaults;
mod encoder;
mod error;
pub mod flags;
mod gpu;
pub mod hub;
mod images;
mod limits;
pub mod llama_server;
mod mods;
mod security;
mod speculation;
mod tls;
mod tuning;
mod vertex;

use flags::{DataFlags, EngineFlags, OnOff, OnOffAuto, ServerFlags};
use serde_json::{Map, Value};
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
pub use error::ConfigError;
pub use gpu::{GpuConfig, GpuFlags, GpuLayersFlag, SplitModeFlag, TensorOverride};
pub use images::{ImageConfig, ImageFlags};
pub use limits::{LimitFlags, RateConfig, RunTimeoutConfig, SocketConfig};
pub use llama_server::RouteConfig;
pub use mods::{ModFlags, ModSandbox, ModsConfig};
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
/// Default number of slots.
const DEFAULT_SLOTS: u32 = 4;
/// Maximum tokens of all slots together, for the default number of slots.
const DEFAULT_CELLS: u32 = DEFAULT_SLOTS * DEFAULT_SLOT_CONTEXT;

/// The ChatML template, which many models share.
const CHATML: &str = "{% for message in messages %}\
    {{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

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

/// The model and its settings.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Path of the GGUF file; `None` for the bundled model.
    pub model: Option<PathBuf>,
    /// Names of the model, the displayed one first; empty for the file's name.
    pub alias: Vec<String>,
    /// Tags of the default model in model lists.
    pub tags: Vec<String>,
    /// Context size in tokens; `None` for the model's.
    pub ctx_size: Option<u32>,
    /// True if `ctx_size` is the total of all slots; false if it is the size of each slot.
    pub ctx_is_shared: bool,
    /// Number of slots, 1 or more.
    pub parallel: u32,
    /// Threads for generation, 1 or more.
    pub threads: i32,
    /// Threads for prompt processing, 1 or more.
    pub threads_batch: i32,
    /// Maximum tokens per decode call.
    pub batch_size: u32,
    /// Maximum tokens computed at once, not above `batch_size`.
    pub ubatch_size: u32,
    /// Placement on GPUs.
    pub gpu: GpuConfig,
    /// True if the model is read into memory instead of mapped.
    pub no_mmap: bool,
    /// True if the weights are locked in memory.
    pub mlock: bool,
    /// Capture of attention: from stored probabilities (on), with flash attention (auto), or none (off).
    pub attention: OnOffAuto,
    /// True if flash attention was requested.
    pub flash_attention: bool,
    /// Chat template that replaces the model's.
    pub chat_template: Option<String>,
    /// LoRA adapters of the default model, each with its default scale.
    pub adapters: Vec<(PathBuf, f32)>,
    /// Control vectors of the default model.
    pub control: ControlConfig,
    /// Image encoder of the default model; `None` for text only.
    pub images: Option<ImageConfig>,
    /// The KV cache.
    pub cache: CacheConfig,
    /// Speculative decoding.
    pub speculation: SpeculationConfig,
    /// Compute settings.
    pub tuning: TuningFlags,
    /// Embeddings and scores.
    pub encoder: EncoderFlags,
    /// Resources and sandbox of mods.
    pub mods: ModsConfig,
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

/// A number of bytes, written as `4096`, `512K`, `256M` or `2G`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub usize);

impl Default for Size {
    /// Returns the default size of a request body: 256 MiB, which fits a trace of some 100 000 tokens.
    fn default() -> Self {
        Self(256 << 20)
    }
}

impl std::str::FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || format!("'{text}' is not a size; expected e.g. 4096, 512K, 256M or 2G");
        let (digits, shift) = match text.as_bytes().last() {
            Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
            Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
            Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
            _ => (text, 0),
        };
        let count: usize = digits.parse().map_err(|_| invalid())?;
        count.checked_mul(1 << shift).filter(|&bytes| bytes > 0).map(Self).ok_or_else(invalid)
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
    /// Reads the key file and the certificate that the flags name.
    ///
    /// # Errors
    /// [`ConfigError`] names the invalid flag or file.
    pub fn read(server: &ServerFlags) -> Result<Self, ConfigError> {
        let mut security = server.security(&server.addresses()?)?;
        security.trusted_hosts.extend(server.cluster.config()?.host());
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
        let credentials = Credentials::read(server)?;
        let mut request_defaults = engine.cache.defaults();
        request_defaults.extend(engine.speculation.defaults());
        request_defaults.extend(server.requests.defaults()?);
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
            engine: engine.try_into()?,
            data: data.try_into()?,
            server: ServerConfig {
                credentials,
                prefix: server.routes.prefix()?,
                routes: server.routes.config(&listen)?,
                listen,
                any_model_name: server.accepts_any_model_name(),
                models: server.models()?,
                max_body_bytes: server.max_body.0,
                header_timeout: server.limits.header_timeout(),
                shutdown_grace: Duration::from_secs(server.shutdown_grace),
                max_attention_bytes: server.limits.max_attention.0,
                sockets: server.limits.sockets(),
                run_timeouts: server.limits.run_timeouts(),
                rates: server.limits.rates(),
                max_tokens,
                request_defaults,
                vertex: server.vertex.config(),
                cluster,
                allow_mod_upload: server.allow_mod_upload,
            },
        })
    }
}

impl TryFrom<EngineFlags> for EngineConfig {
    type Error = ConfigError;
    fn try_from(flags: EngineFlags) -> Result<Self, ConfigError> {
        let check_range = |flag, value: u32, min: u32, max: u32, range| {
            if (min..=max).contains(&value) {
                Ok(value)
            } else {
                Err(ConfigError::Range { flag, range, value: value.into() })
            }
        };
        if let Some(path) = flags.model.as_ref().filter(|path| !path.is_file()) {
            return Err(ConfigError::NoModel { path: path.display().to_string() });
        }
        // As in llama-server, -1 slots means automatic, and a context of 0 the model's.
        let requested = flags.parallel.and_then(|slots| u32::try_from(slots).ok());
        let ctx_size = flags.ctx_size.filter(|&size| size > 0);
        let parallel = match requested {
            Some(slots) => check_range("--parallel", slots, 1, 256, "between 1 and 256")?,
            None => ctx_size.map_or(DEFAULT_SLOTS, |size| (DEFAULT_CELLS / size).clamp(1, DEFAULT_SLOTS)),
        };
        let ctx_is_shared = requested.is_some() && flags.cache.kv_unified != Some(OnOff::On);
        if let Some(size) = ctx_size {
            let slots = if ctx_is_shared { parallel } else { 1 };
            check_range("--ctx-size", size / slots, 16, u32::MAX, "at least 16 tokens for each slot (--parallel)")?;
        }
        let positive = |count: Option<u16>| count.filter(|&count| count > 0).map(i32::from);
        let threads = positive(flags.threads).unwrap_or_else(defaults::threads);
        let batch_size = check_range("--batch-size", flags.batch_size, 1, 1 << 20, "between 1 and 1048576")?;
        let ubatch_size = check_range("--ubatch-size", flags.ubatch_size, 1, 1 << 20, "between 1 and 1048576")?;
        let attention = attention(flags.attention.unwrap_or_default(), flags.flash_attn.unwrap_or_default())?;
        Ok(Self {
            model: flags.model,
            alias: flags.alias.iter().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect(),
            tags: flags.tags.iter().map(|tag| tag.trim().to_owned()).filter(|tag| !tag.is_empty()).collect(),
            ctx_size,
            ctx_is_shared,
            parallel,
            threads,
            threads_batch: positive(flags.threads_batch).unwrap_or(threads),
            batch_size,
            ubatch_size: ubatch_size.min(batch_size),
            gpu: flags.gpu.try_into()?,
            no_mmap: flags.no_mmap || matches!(flags.tuning.load_mode, Some(LoadMode::None | LoadMode::Mlock)),
            mlock: flags.mlock || matches!(flags.tuning.load_mode, Some(LoadMode::Mlock | LoadMode::MmapMlock)),
            attention,
            flash_attention: flags.flash_attn == Some(OnOffAuto::On),
            chat_template: chat_template(flags.chat_template, flags.chat_template_file)?,
            adapters: flags.adapters.config()?,
            control: flags.control.config()?,
            images: flags.images.config()?,
            cache: flags.cache.config(attention == OnOffAuto::On)?,
            speculation: flags.speculation.config()?,
            tuning: flags.tuning,
            encoder: flags.encoder,
            mods: flags.mods.try_into()?,
        })
    }
}

/// Returns the capture of attention. Without flash attention, `auto` is the same as `on`.
fn attention(capture: OnOffAuto, flash: OnOffAuto) -> Result<OnOffAuto, ConfigError> {
    match (capture, flash) {
        (OnOffAuto::On, OnOffAuto::On) => Err(ConfigError::FlashAttention),
        (OnOffAuto::Auto, OnOffAuto::Off) => Ok(OnOffAuto::On),
        (capture, _) => Ok(capture),
    }
}

fn chat_template(text: Option<String>, file: Option<PathBuf>) -> Result<Option<String>, ConfigError> {
    if let Some(path) = file {
        let read = std::fs::read_to_string(&path);
        let flag = "--chat-template-file";
        return read.map(Some).map_err(|source| ConfigError::File { flag, path: path.display().to_string(), source });
    }
    match text {
        // llama.cpp has this template, too, but only Jinja text supports tools.
        Some(name) if name.trim() == "chatml" => Ok(Some(CHATML.to_owned())),
        Some(name) if is_chat_template_name(name.trim()) => Ok(Some(name.trim().to_owned())),
        Some(name) if !name.contains('{') => Err(ConfigError::ChatTemplate { name }),
        text => Ok(text),
    }
}

impl EngineConfig {
    /// Returns the maximum tokens of a text that is embedded or scored, for a model trained with `context_train`
    /// tokens. `slots` is true if the model shares the context among slots.
    #[must_use]
    pub fn max_text_tokens(&self, context_train: u32, slots: bool) -> u32 {
        match self.ctx_size {
            Some(all) if !slots => all,
            _ => self.slot_context(context_train),
        }
    }

    /// Returns the context of each slot in tokens, for a model trained with `context_train` tokens.
    #[must_use]
    pub fn slot_context(&self, context_train: u32) -> u32 {
        match self.ctx_size {
            None => context_train.clamp(16, DEFAULT_SLOT_CONTEXT),
            Some(all) if self.ctx_is_shared => all / self.parallel,
            Some(each) => each,
        }
    }
}

impl TryFrom<DataFlags> for DataConfig {
    type Error = ConfigError;
    fn try_from(flags: DataFlags) -> Result<Self, ConfigError> {
        let database_url = flags.database_url.filter(|url| !url.is_empty());
        let database_direct_url = flags.database_direct_url.filter(|url| !url.is_empty());
        let is_address = |url: &String| url.starts_with("postgres://") || url.starts_with("postgresql://");
        if ![&database_url, &database_direct_url].into_iter().flatten().all(is_address) {
            return Err(ConfigError::DatabaseUrl);
        }
        let dir = match flags.data_dir {
            Some(dir) => std::path::absolute(&dir).unwrap_or(dir),
            None => defaults::data_dir().ok_or(ConfigError::NoHome)?,
        };
        let keep_bytes = flags.keep_size.map(|size| size.0 as u64);
        Ok(Self { dir, database_url, database_direct_url, keep_days: flags.keep_days, keep_bytes })
    }
}

#[cfg(test)]
mod tests;
