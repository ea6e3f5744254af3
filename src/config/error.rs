use super::{CacheTypeFlag, TlsError};
use std::net::SocketAddr;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A number is out of its range.
    #[error("{flag} must be {range}, got {value}")]
    Range {
        /// The flag.
        flag: &'static str,
        /// What it takes.
        range: &'static str,
        /// What was given.
        value: u64,
    },
    /// The model is not there.
    #[error("there is no model file at {path}; --model takes the path of a GGUF file")]
    NoModel {
        /// Path given.
        path: String,
    },
    /// The LoRA adapter is not there.
    #[error("there is no LoRA adapter at {path}; --lora takes the path of a GGUF file")]
    NoAdapter {
        /// Path given.
        path: String,
    },
    /// The control vector is not there.
    #[error("there is no control vector at {path}; --control-vector takes the path of a GGUF file")]
    NoControlVector {
        /// Path given.
        path: String,
    },
    /// A range that ends before it begins.
    #[error("--control-vector-layer-range takes the first and the last layer, got {first} and {last}")]
    LayerRange {
        /// The first.
        first: u32,
        /// The last.
        last: u32,
    },
    /// The folder of mods is not there.
    #[error("there is no folder {path}; --mods-dir takes a folder of Python files")]
    NoModsDir {
        /// Path given.
        path: String,
    },
    /// None, and some.
    #[error("--device takes names of GPUs, or none, not both")]
    DeviceNone,
    /// The folder of models is not there.
    #[error("there is no folder {path}; --models-dir takes a folder of GGUF files")]
    NoModelsDir {
        /// Path given.
        path: String,
    },
    /// A folder is not there.
    #[error("there is no folder {path}; {flag} takes a folder that exists")]
    NoFolder {
        /// The flag.
        flag: &'static str,
        /// Path given.
        path: String,
    },
    /// A file cannot be read.
    #[error("cannot read {path}, which {flag} names: {source}")]
    File {
        /// The flag.
        flag: &'static str,
        /// Path given.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Not a parameter.
    #[error(
        "'{text}' is not what {flag} takes: JSON, for --parameter behind a name and =, e.g. min_keep=2, for \
         --chat-template-kwargs an object"
    )]
    Parameter {
        /// The flag.
        flag: &'static str,
        /// What was given.
        text: String,
    },
    /// Flash attention does not show what it attends to.
    #[error(
        "--flash-attn on and --attention on exclude each other: flash attention never holds what could be captured"
    )]
    FlashAttention,
    /// A name that no chat template has.
    #[error(
        "--chat-template takes Jinja text or a name that llama.cpp knows, got '{name}'; the names are: {}",
        super::chat_templates::CHAT_TEMPLATES.join(", ")
    )]
    ChatTemplate {
        /// What was given.
        name: String,
    },
    /// The host has no address.
    #[error("cannot find the host '{host}': {source}")]
    Host {
        /// Host given.
        host: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The host has no address.
    #[error("the host '{host}' has no address")]
    NoAddress {
        /// Host given.
        host: String,
    },
    /// The key file cannot be read.
    #[error("cannot read the keys in {path}: {source}")]
    KeyFile {
        /// Path given.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The key file holds none.
    #[error("there is no key in {path}; it takes one key a line")]
    NoKeyInFile {
        /// Path given.
        path: String,
    },
    /// A line of the key file says something unknown.
    #[error("{path}, line {line}: '{word}' is not known; behind a key may stand mods, and name=NAME")]
    KeyLine {
        /// Path given.
        path: String,
        /// Counted from 1.
        line: usize,
        /// The word.
        word: String,
    },
    /// Nobody could upload.
    #[error(
        "--allow-mod-upload needs a key whose owner may do so: give one with --mod-key KEY, or write mods behind one in the key file"
    )]
    NoModKey,
    /// An empty key would let everybody in.
    #[error("an API key must not be empty")]
    EmptyKey,
    /// Other machines could reach a server without a key.
    #[error(
        "{address} can be reached from other machines, and no API key is set; give --api-key KEY, or say --allow-unauthenticated if everybody who reaches it may use it"
    )]
    Unauthenticated {
        /// The address.
        address: SocketAddr,
    },
    /// Other machines could send traces without a key.
    #[error(
        "{address} can be reached from other machines, and --ingest-open takes traces without a key; listen on addresses of this machine only, or give --ingest-key KEY instead"
    )]
    IngestOpen {
        /// The address.
        address: SocketAddr,
    },
    /// Not an origin.
    #[error(
        "'{origin}' is not a web origin; --cors-origin takes scheme and host, e.g. https://app.example, localhost, or *"
    )]
    Origin {
        /// What was given.
        origin: String,
    },
    /// Values cannot be quantised without flash attention.
    #[error(
        "--cache-type-v {cache_type} needs flash attention, which is off while attention can be captured; add --attention off, or take f16, bf16 or f32"
    )]
    QuantisedValues {
        /// The type.
        cache_type: CacheTypeFlag,
    },
    /// Not a path.
    #[error("--api-prefix takes a path of letters, digits and - . _ ~ that begins with /, e.g. /llm, got '{prefix}'")]
    Prefix {
        /// What was given.
        prefix: String,
    },
    /// Certificate and key.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Not a share.
    #[error("--slot-prompt-similarity must be between 0 and 1, got {value}")]
    Similarity {
        /// What was given.
        value: f32,
    },
    /// No folder to keep data in.
    #[error("there is no home folder to keep data in; give --data-dir DIR")]
    NoHome,
    /// Not a PostgreSQL address.
    #[error("the database URL must begin with postgres:// or postgresql://")]
    DatabaseUrl,
}
