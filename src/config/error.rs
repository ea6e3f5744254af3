//! Errors of the configuration, each with the flag, its value and the expected form.

use super::{CacheTypeFlag, TlsError};
use std::net::SocketAddr;

/// The reason why a configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A number is out of range.
    #[error("{flag} must be {range}, got {value}")]
    Range {
        /// The flag.
        flag: &'static str,
        /// The accepted range.
        range: &'static str,
        /// The value.
        value: u64,
    },
    /// The address for other servers is invalid.
    #[error(
        "--server-url must be a URL such as http://10.0.0.5:6767 without user, query and fragment, got \"{url}\"; it is the \
         address at which the other servers on the database reach this one"
    )]
    ServerUrl {
        /// The address.
        url: String,
    },
    /// The model file does not exist.
    #[error("no model file at {path}; --model takes the path of a GGUF file")]
    NoModel {
        /// The path.
        path: String,
    },
    /// The draft model file does not exist.
    #[error("no draft model file at {path}; --spec-draft-model takes the path of a GGUF file")]
    DraftModelFile {
        /// The path.
        path: String,
    },
    /// Drafts of a draft model are enabled, but there is no draft model.
    #[error("--spec-type draft-simple needs a draft model; set --spec-draft-model to the path of a GGUF file")]
    NoDraftModel,
    /// The probability is not between 0 and 1.
    #[error("--spec-draft-p-min must be between 0 and 1, got {value}")]
    DraftProbability {
        /// The value.
        value: f32,
    },
    /// The server of models is not a URL.
    #[error("MODEL_ENDPOINT or HF_ENDPOINT must be an http or https URL, got \"{url}\"")]
    HubEndpoint {
        /// The value.
        url: String,
    },
    /// No folder for downloaded models is known.
    #[error("there is no folder for downloaded models, because HOME is not set; set HF_HUB_CACHE to a folder")]
    NoModelCache,
    /// The LoRA adapter does not exist.
    #[error("no LoRA adapter at {path}; --lora takes the path of a GGUF file")]
    NoAdapter {
        /// The path.
        path: String,
    },
    /// The control vector does not exist.
    #[error("no control vector at {path}; --control-vector takes the path of a GGUF file")]
    NoControlVector {
        /// The path.
        path: String,
    },
    /// The projector does not exist.
    #[error("no projector at {path}; --mmproj takes the path of the GGUF file with the model's image encoder")]
    NoProjector {
        /// The path.
        path: String,
    },
    /// The minimum exceeds the maximum.
    #[error("--image-min-tokens must not exceed --image-max-tokens, got {min} and {max}")]
    ImageTokens {
        /// Minimum.
        min: u32,
        /// Maximum.
        max: u32,
    },
    /// Private hosts without the fetching of images.
    #[error(
        "--image-url-hosts {host} has no effect without --allow-image-urls; add --allow-image-urls, or remove --image-url-hosts"
    )]
    ImageUrlHosts {
        /// The first host.
        host: String,
    },
    /// The range ends before it begins.
    #[error("--control-vector-layer-range must be FIRST LAST with FIRST <= LAST, got {first} {last}")]
    LayerRange {
        /// First layer.
        first: u32,
        /// Last layer.
        last: u32,
    },
    /// The folder of mods does not exist.
    #[error("--mods-dir must be a folder of Python files, but {path} does not exist or is not a folder")]
    NoModsDir {
        /// The path.
        path: String,
    },
    /// `none` is combined with device names.
    #[error("--device must be names of GPUs or none, got both")]
    DeviceNone,
    /// The folder of models does not exist.
    #[error("--models-dir must be a folder of GGUF files, but {path} does not exist or is not a folder")]
    NoModelsDir {
        /// The path.
        path: String,
    },
    /// A folder does not exist.
    #[error("{flag} must be an existing folder, but {path} does not exist or is not a folder")]
    NoFolder {
        /// The flag.
        flag: &'static str,
        /// The path.
        path: String,
    },
    /// A file cannot be read.
    #[error("{flag}: cannot read {path}: {source}")]
    File {
        /// The flag.
        flag: &'static str,
        /// The path.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A parameter is not JSON of the expected form.
    #[error(
        "{flag}: {text:?} is not valid; --parameter takes NAME=JSON, e.g. min_keep=2, --json-schema takes JSON, and \
         --chat-template-kwargs takes a JSON object"
    )]
    Parameter {
        /// The flag.
        flag: &'static str,
        /// The value.
        text: String,
    },
    /// The default of a request's field is invalid.
    #[error("{flag} sets an invalid default of requests: {reason}")]
    RequestDefault {
        /// The flag.
        flag: &'static str,
        /// The error that a request with this value gets.
        reason: String,
    },
    /// Flash attention and attention capture without it are both required.
    #[error(
        "--flash-attn on and --attention on are mutually exclusive; --attention auto captures attention with flash attention"
    )]
    FlashAttention,
    /// No built-in chat template has the name.
    #[error(
        "--chat-template must be Jinja text or the name of a built-in template, got '{name}'; the names are: {}",
        super::chat_templates::CHAT_TEMPLATES.join(", ")
    )]
    ChatTemplate {
        /// The name.
        name: String,
    },
    /// The host name cannot be resolved.
    #[error("cannot resolve the host '{host}': {source}")]
    Host {
        /// The host.
        host: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The host is the path of a Unix socket.
    #[error(
        "--host must be an IP address or a host name, got the Unix socket '{path}'; Unix sockets are not supported, use \
         --host 127.0.0.1"
    )]
    UnixSocket {
        /// The path.
        path: String,
    },
    /// The host name has no address.
    #[error("the host '{host}' has no address")]
    NoAddress {
        /// The host.
        host: String,
    },
    /// The key file cannot be read.
    #[error("--api-key-file: cannot read {path}: {source}")]
    KeyFile {
        /// The path.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The key file contains no key.
    #[error("--api-key-file: {path} contains no key; expected one key per line")]
    NoKeyInFile {
        /// The path.
        path: String,
    },
    /// A line of the key file contains an unknown word.
    #[error(
        "{path}, line {line}: unknown word '{word}'; after the key, the words admin, mods, models, props, ingest and name=NAME are allowed"
    )]
    KeyLine {
        /// The path.
        path: String,
        /// The line, counted from 1.
        line: usize,
        /// The word.
        word: String,
    },
    /// A key has two names, so its tenant is ambiguous.
    #[error(
        "--api-key-file: the same key has the names '{}' and '{}'; a key has one tenant, so remove one name=NAME",
        names[0],
        names[1]
    )]
    KeyNames {
        /// The names.
        names: [String; 2],
    },
    /// Mod upload is enabled, but no key permits it.
    #[error(
        "--allow-mod-upload needs a key with the right to upload: set --mod-key KEY or --admin-key KEY, or add the word mods after a key in the key file"
    )]
    NoModKey,
    /// A key is empty, so every client could send it.
    #[error("an API key must not be empty")]
    EmptyKey,
    /// The server is reachable from other machines without a key.
    #[error(
        "{address} is reachable from other machines and no API key is set; set --api-key KEY, or --allow-unauthenticated to serve everyone"
    )]
    Unauthenticated {
        /// The address.
        address: SocketAddr,
    },
    /// Ingestion without a key is reachable from other machines.
    #[error(
        "{address} is reachable from other machines, and --ingest-open accepts traces without a key; listen on loopback addresses only, or set --ingest-key KEY instead"
    )]
    IngestOpen {
        /// The address.
        address: SocketAddr,
    },
    /// A web origin is invalid.
    #[error(
        "'{origin}' is not a web origin; --cors-origin must be scheme and host, e.g. https://app.example, or localhost, or *"
    )]
    Origin {
        /// The value.
        origin: String,
    },
    /// Quantized values need flash attention.
    #[error(
        "--cache-type-v {cache_type} needs flash attention, which --attention on and --flash-attn off disable; set --attention auto, or use f16, bf16 or f32"
    )]
    QuantizedValues {
        /// The type.
        cache_type: CacheTypeFlag,
    },
    /// The path prefix is invalid.
    #[error("--api-prefix must be a path of letters, digits and - . _ ~ that begins with /, e.g. /llm, got '{prefix}'")]
    Prefix {
        /// The value.
        prefix: String,
    },
    /// The certificate or the key is invalid.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The share is not between 0 and 1.
    #[error("--slot-prompt-similarity must be between 0 and 1, got {value}")]
    Similarity {
        /// The value.
        value: f32,
    },
    /// `HOME` is not set, so there is no default data directory.
    #[error("there is no default data directory, because HOME is not set; set --data-dir DIR")]
    NoHome,
    /// The database URL is not a PostgreSQL URL.
    #[error("the database URL must begin with postgres:// or postgresql://")]
    DatabaseUrl,
}
