//! What can be said on the command line, each flag with its environment variable. llama-server's spellings are
//! accepted for the flags it shares.

use super::cache::CacheFlags;
use super::gpu::GpuFlags;
use super::llama_server::{LogFlags, RequestFlags, RouteFlags};
use super::vertex::VertexFlags;
use super::{
    AdapterFlags, ControlFlags, EncoderFlags, KeyHash, LimitFlags, ModFlags, SecurityConfig, Size, TlsFlags,
    TuningFlags,
};
use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The model and how it runs.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct EngineFlags {
    /// GGUF file to run; without it the bundled demo model
    #[arg(short, long, env = "THUNDER_MODEL", value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Name of the model in requests and answers, again or after a comma for more; without it the file's name
    #[arg(short, long, env = "THUNDER_ALIAS", value_name = "NAME", value_delimiter = ',')]
    pub alias: Vec<String>,
    /// Words about the model that lists of models show, again or after a comma for more
    #[arg(long, env = "THUNDER_TAGS", value_name = "WORD", value_delimiter = ',')]
    pub tags: Vec<String>,
    /// Context in tokens; with --parallel divided evenly among the slots, else the whole of it for each. Without it each slot
    /// gets what the model was trained with, but at most 8192
    #[arg(short, long, env = "THUNDER_CTX_SIZE", value_name = "TOKENS")]
    pub ctx_size: Option<u32>,
    /// Runs that are generated at the same time; without it, or with -1, 4, or fewer where --ctx-size is so large that the
    /// slots would have more than 32768 tokens together [also: -np]
    #[arg(long, env = "THUNDER_PARALLEL", value_name = "SLOTS", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i32).range(-1..))]
    pub parallel: Option<i32>,
    /// Threads that compute tokens; without it one less than the machine's physical cores
    #[arg(short, long, env = "THUNDER_THREADS", value_name = "N")]
    pub threads: Option<u16>,
    /// Threads that compute prompts; without it as many as --threads [also: -tb]
    #[arg(long, env = "THUNDER_THREADS_BATCH", value_name = "N")]
    pub threads_batch: Option<u16>,
    /// Most tokens in one decode
    #[arg(short, long, env = "THUNDER_BATCH_SIZE", value_name = "TOKENS", default_value_t = 2048)]
    pub batch_size: u32,
    /// Most tokens computed at once within a decode [also: -ub]
    #[arg(long, env = "THUNDER_UBATCH_SIZE", value_name = "TOKENS", default_value_t = 512)]
    pub ubatch_size: u32,
    /// Read the model into memory instead of mapping its file
    #[arg(long, env = "THUNDER_NO_MMAP", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_mmap: bool,
    /// Keep the model's weights from being swapped out
    #[arg(long, env = "THUNDER_MLOCK", value_parser = clap::builder::FalseyValueParser::new())]
    pub mlock: bool,
    /// Whether runs can capture attention, which flash attention cannot; without it on, unless --flash-attn is
    #[arg(long, env = "THUNDER_ATTENTION", value_name = "on|off")]
    pub attention: Option<OnOff>,
    /// Flash attention: long prompts are faster with it, generation on a CPU is slower [also: -fa]
    #[arg(long, env = "THUNDER_FLASH_ATTN", value_name = "on|off|auto", default_missing_value = "on", num_args = 0..=1)]
    pub flash_attn: Option<OnOffAuto>,
    /// Chat template instead of the model's own: Jinja text, or a name that llama.cpp knows, e.g. llama3
    #[arg(long, env = "THUNDER_CHAT_TEMPLATE", value_name = "JINJA", conflicts_with = "chat_template_file")]
    pub chat_template: Option<String>,
    /// File with such a template
    #[arg(long, env = "THUNDER_CHAT_TEMPLATE_FILE", value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// LoRA adapters.
    #[command(flatten)]
    pub adapters: AdapterFlags,
    /// Control vectors.
    #[command(flatten)]
    pub control: ControlFlags,
    /// GPUs.
    #[command(flatten)]
    pub gpu: GpuFlags,
    /// The KV cache.
    #[command(flatten)]
    pub cache: CacheFlags,
    /// How models are computed.
    #[command(flatten)]
    pub tuning: TuningFlags,
    /// Embeddings and scores.
    #[command(flatten)]
    pub encoder: EncoderFlags,
    /// Mods.
    #[command(flatten)]
    pub mods: ModFlags,
}

/// Where things are kept.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Data")]
pub struct DataFlags {
    /// Folder of the embedded database and of caches; without it the user's data folder, for root /var/lib/thunder
    #[arg(long, env = "THUNDER_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// PostgreSQL to record into, 14 or newer; without it Thunder runs its own in the data folder
    #[arg(long, env = "DATABASE_URL", value_name = "URL", hide_env_values = true)]
    pub database_url: Option<String>,
    /// Remove runs that began more than so many days ago; without it they stay
    #[arg(long, env = "THUNDER_KEEP_DAYS", value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_days: Option<u32>,
    /// Remove the oldest days of runs while all take more than this, e.g. 20G; today's stay
    #[arg(long, env = "THUNDER_KEEP_SIZE", value_name = "SIZE")]
    pub keep_size: Option<Size>,
}

/// Where and whom to serve.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerFlags {
    /// Address to listen on, again for more; without it 127.0.0.1:6767
    #[arg(long, env = "THUNDER_LISTEN", value_name = "ADDR", value_delimiter = ',')]
    pub listen: Vec<SocketAddr>,
    /// Host to listen on, together with --port, after a comma for more; as llama-server spells it
    #[arg(long, env = "THUNDER_HOST", value_name = "HOST")]
    pub host: Option<String>,
    /// Port to listen on, together with --host; as llama-server spells it
    #[arg(long, env = "THUNDER_PORT", value_name = "PORT")]
    pub port: Option<u16>,
    /// Key that clients must send as "Authorization: Bearer KEY", "X-Api-Key: KEY" or "X-User-Api-Key: KEY", again for more
    #[arg(
        long = "api-key",
        env = "THUNDER_API_KEY",
        value_name = "KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    pub api_keys: Vec<Secret>,
    /// File with such keys, one a line, so that they do not show in the list of processes; behind a key may stand mods, if
    /// its owner may change mods, and name=NAME
    #[arg(long, env = "THUNDER_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Such a key whose owner may also upload mods, switch them off and remove them, again for more
    #[arg(
        long = "mod-key",
        env = "THUNDER_MOD_KEY",
        value_name = "KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    pub mod_keys: Vec<Secret>,
    /// Key for sending traces to /ingest and for nothing else, again for more; the other keys are good for that, too
    #[arg(
        long = "ingest-key",
        env = "THUNDER_INGEST_KEY",
        value_name = "KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    pub ingest_keys: Vec<Secret>,
    /// Take traces at /ingest without a key, also where other routes need one; only with addresses of this machine
    #[arg(long, env = "THUNDER_INGEST_OPEN", value_parser = clap::builder::FalseyValueParser::new())]
    pub ingest_open: bool,
    /// Take mods that are uploaded to /v1/mods with such a key, and run those taken before
    #[arg(long, env = "THUNDER_ALLOW_MOD_UPLOAD", value_parser = clap::builder::FalseyValueParser::new())]
    pub allow_mod_upload: bool,
    /// Serve other machines without a key
    #[arg(long, env = "THUNDER_ALLOW_UNAUTHENTICATED", value_parser = clap::builder::FalseyValueParser::new())]
    pub allow_unauthenticated: bool,
    /// Web origin whose pages may call the API, e.g. `https://app.example`, again for more, localhost, or * for all
    #[arg(
        long = "cors-origin",
        alias = "cors-origins",
        env = "THUNDER_CORS_ORIGIN",
        value_name = "ORIGIN",
        value_delimiter = ','
    )]
    pub cors_origins: Vec<String>,
    /// Name under which browsers may reach the server, besides localhost and its addresses, again for more
    #[arg(long = "trusted-host", env = "THUNDER_TRUSTED_HOST", value_name = "HOST", value_delimiter = ',')]
    pub trusted_hosts: Vec<String>,
    /// TLS.
    #[command(flatten)]
    pub tls: TlsFlags,
    /// Refuse requests that name an unknown model; without it a server of one model answers them with that model
    #[arg(long, env = "THUNDER_STRICT_MODEL_NAMES", value_parser = clap::builder::FalseyValueParser::new(),
          conflicts_with = "any_model_name")]
    pub strict_model_names: bool,
    /// Answer requests that name an unknown model with the default model, also with --models-dir
    #[arg(long, env = "THUNDER_ANY_MODEL_NAME", value_parser = clap::builder::FalseyValueParser::new())]
    pub any_model_name: bool,
    /// Folder of GGUF files that may be loaded by the names of their files, besides --model
    #[arg(long, env = "THUNDER_MODELS_DIR", value_name = "DIR")]
    pub models_dir: Option<PathBuf>,
    /// Most models that are loaded at once: one more takes the place of the one used least recently; 0 for any number
    #[arg(long, env = "THUNDER_MODELS_MAX", value_name = "N", default_value_t = 4)]
    pub models_max: u32,
    /// Whether a request loads the model it names, when that is in --models-dir [also: --no-models-autoload]
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
    /// Largest request body, e.g. 256M
    #[arg(long, env = "THUNDER_MAX_BODY", value_name = "SIZE", default_value = "256M")]
    pub max_body: Size,
    /// Seconds that runs may go on after the server was told to stop
    #[arg(long, env = "THUNDER_SHUTDOWN_GRACE", value_name = "SECONDS", default_value_t = 10)]
    pub shutdown_grace: u64,
    /// What a client may ask of the server.
    #[command(flatten)]
    pub limits: LimitFlags,
    /// What a request gets when it does not say.
    #[command(flatten)]
    pub requests: RequestFlags,
    /// Which of llama-server's routes there are.
    #[command(flatten)]
    pub routes: RouteFlags,
    /// Vertex AI.
    #[command(flatten)]
    pub vertex: VertexFlags,
    /// What is logged, and where.
    #[command(flatten)]
    pub log: LogFlags,
}

/// On or off.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    /// On.
    #[default]
    #[value(aliases = ["1", "true", "enabled"])]
    On,
    /// Off.
    #[value(aliases = ["0", "false", "disabled"])]
    Off,
}

/// On, off, or as it fits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum OnOffAuto {
    /// As it fits.
    #[default]
    Auto,
    /// On.
    #[value(alias = "1")]
    On,
    /// Off.
    #[value(alias = "0")]
    Off,
}

impl OnOffAuto {
    /// Whether it is on; `None` where that is to be found out.
    #[must_use]
    pub fn decided(self) -> Option<bool> {
        match self {
            Self::Auto => None,
            Self::On => Some(true),
            Self::Off => Some(false),
        }
    }
}

/// Text that must not show in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub(super) String);

impl std::str::FromStr for Secret {
    type Err = std::convert::Infallible;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

impl Secret {
    /// The text.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(secret)")
    }
}

impl EngineFlags {
    /// Whether runs can capture attention.
    #[must_use]
    pub fn captures_attention(&self) -> bool {
        self.attention.unwrap_or_default() == OnOff::On && self.flash_attn != Some(OnOffAuto::On)
    }
}

impl ServerFlags {
    /// The addresses to listen on.
    pub(super) fn addresses(&self) -> Result<Vec<SocketAddr>, super::ConfigError> {
        use std::net::ToSocketAddrs;
        let mut addresses = self.listen.clone();
        let port = self.vertex.port().or(self.port);
        if self.host.is_some() || port.is_some() {
            let port = port.unwrap_or(super::DEFAULT_PORT);
            for host in self.host.as_deref().unwrap_or("127.0.0.1").split(',').map(str::trim) {
                let found = (host, port)
                    .to_socket_addrs()
                    .map_err(|source| super::ConfigError::Host { host: host.to_owned(), source })?
                    .next()
                    .ok_or_else(|| super::ConfigError::NoAddress { host: host.to_owned() })?;
                addresses.push(found);
            }
        }
        if addresses.is_empty() {
            addresses.push(super::DEFAULT_ADDRESS);
        }
        let mut seen = std::collections::HashSet::new();
        addresses.retain(|&address| address.port() == 0 || seen.insert(address));
        Ok(addresses)
    }

    /// Returns true if a request that names an unknown model is answered by the default model.
    pub(super) fn takes_any_model_name(&self) -> bool {
        self.any_model_name || (self.models_dir.is_none() && !self.strict_model_names)
    }

    /// Models besides the default one.
    pub(super) fn models(&self) -> Result<super::ModelsConfig, super::ConfigError> {
        if let Some(path) = self.models_dir.as_ref().filter(|path| !path.is_dir()) {
            return Err(super::ConfigError::NoModelsDir { path: path.display().to_string() });
        }
        Ok(super::ModelsConfig {
            dir: self.models_dir.clone(),
            autoload: self.models_autoload == OnOff::On,
            most: (self.models_max > 0).then_some(self.models_max as usize),
            sleep_after: u64::try_from(self.sleep_idle_seconds)
                .ok()
                .filter(|&seconds| seconds > 0)
                .map(Duration::from_secs),
        })
    }

    /// Who may do what.
    pub(super) fn security(&self, listen: &[SocketAddr]) -> Result<SecurityConfig, super::ConfigError> {
        if self.api_keys.iter().chain(&self.mod_keys).chain(&self.ingest_keys).any(|key| key.0.trim().is_empty()) {
            return Err(super::ConfigError::EmptyKey);
        }
        let mut keys: Vec<KeyHash> = self.mod_keys.iter().map(|key| KeyHash::of(&key.0).with_mods()).collect();
        keys.extend(self.api_keys.iter().map(|key| KeyHash::of(&key.0)));
        if let Some(path) = &self.api_key_file {
            let text = std::fs::read_to_string(path)
                .map_err(|source| super::ConfigError::KeyFile { path: path.display().to_string(), source })?;
            let before = keys.len();
            let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
            for (line, text) in lines.filter(|(_, text)| !text.is_empty() && !text.starts_with('#')) {
                let path = path.display().to_string();
                keys.push(KeyHash::from_line(text).map_err(|word| super::ConfigError::KeyLine { path, line, word })?);
            }
            if keys.len() == before {
                return Err(super::ConfigError::NoKeyInFile { path: path.display().to_string() });
            }
        }
        if self.allow_mod_upload && !keys.iter().any(KeyHash::may_change_mods) {
            return Err(super::ConfigError::NoModKey);
        }
        if let Some(&address) = listen.iter().find(|address| !address.ip().is_loopback()) {
            if keys.is_empty() && !self.allow_unauthenticated {
                return Err(super::ConfigError::Unauthenticated { address });
            }
            if self.ingest_open {
                return Err(super::ConfigError::IngestOpen { address });
            }
        }
        for origin in &self.cors_origins {
            let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
            if origin != "*"
                && origin != super::LOCALHOST
                && !rest.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*']))
            {
                return Err(super::ConfigError::Origin { origin: origin.clone() });
            }
        }
        Ok(SecurityConfig {
            keys,
            ingest_keys: self.ingest_keys.iter().map(|key| KeyHash::of(&key.0)).collect(),
            ingest_open: self.ingest_open,
            cors_origins: self.cors_origins.clone(),
            trusted_hosts: self.trusted_hosts.iter().map(|host| host.to_ascii_lowercase()).collect(),
        })
    }
}
