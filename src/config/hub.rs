//! Models from the Hugging Face Hub or another server with its routes, and the folder of downloads.

use super::ConfigError;
use super::flag_values::Secret;
use clap::Args;
use reqwest::Url;
use std::path::PathBuf;

/// Server of models, unless a variable names another one.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// A model to download.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Download")]
pub struct HubFlags {
    /// Hugging Face repository of the model, e.g. `ggml-org/gemma-3-1b-it-GGUF:Q8_0`; without a quantization `Q4_K_M`, else
    /// `Q8_0`, else the first file [also: -hf]
    #[arg(long, env = "THUNDER_HF_REPO", value_name = "USER/MODEL[:QUANT]")]
    pub hf_repo: Option<String>,
    /// File of the repository, in place of a quantization [also: -hff]
    #[arg(long, env = "THUNDER_HF_FILE", value_name = "FILE")]
    pub hf_file: Option<String>,
    /// URL of a GGUF file to download; of a split model, that of the first part [also: -mu]
    #[arg(long, env = "THUNDER_MODEL_URL", value_name = "URL", conflicts_with_all = ["hf_repo", "hf_file"])]
    pub model_url: Option<String>,
    /// Access token of the Hugging Face Hub for private and gated repositories [also: -hft]
    #[arg(long, env = "HF_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    pub hf_token: Option<Secret>,
    /// Only models that are already in the cache, without network access
    #[arg(long, env = "THUNDER_OFFLINE", value_parser = clap::builder::FalseyValueParser::new())]
    pub offline: bool,
}

impl HubFlags {
    /// Returns true if the flags name a model.
    #[must_use]
    pub fn names_model(&self) -> bool {
        self.hf_repo.is_some() || self.model_url.is_some()
    }

    /// Returns the server of models: `MODEL_ENDPOINT` or `HF_ENDPOINT`, as in llama-server.
    ///
    /// # Errors
    /// The variable is not a URL.
    pub fn endpoint() -> Result<Url, ConfigError> {
        let text = variable("MODEL_ENDPOINT").or_else(|| variable("HF_ENDPOINT"));
        let text = text.unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let url = Url::parse(&text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        url.ok_or(ConfigError::HubEndpoint { url: text })
    }

    /// Returns the folder of downloaded models: the cache of Hugging Face's tools and llama.cpp.
    ///
    /// # Errors
    /// No variable names a folder.
    pub fn cache_dir() -> Result<PathBuf, ConfigError> {
        const PLACES: [(&str, &str); 6] = [
            ("LLAMA_CACHE", ""),
            ("HF_HUB_CACHE", ""),
            ("HUGGINGFACE_HUB_CACHE", ""),
            ("HF_HOME", "hub"),
            ("XDG_CACHE_HOME", "huggingface/hub"),
            ("HOME", ".cache/huggingface/hub"),
        ];
        let found = PLACES.iter().find_map(|(name, below)| Some(PathBuf::from(variable(name)?).join(below)));
        found.ok_or(ConfigError::NoModelCache)
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
