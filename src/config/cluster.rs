//! Flags for several servers on one database.

use super::ConfigError;
use clap::Args;
use reqwest::Url;
use std::net::SocketAddr;

/// Several servers on one database.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Several servers")]
pub struct ClusterFlags {
    /// Base URL at which the other servers on the same --database-url reach this one, e.g. `http://10.0.0.5:6767`;
    /// without it the address of --listen, or none if that is a loopback address or 0.0.0.0
    #[arg(long, env = "THUNDER_SERVER_URL", value_name = "URL")]
    pub server_url: Option<String>,
    /// Server without a model, for the dashboard, /ingest and all other routes that need none; the remaining routes
    /// answer 503 and name a server with a model
    #[arg(long, env = "THUNDER_NO_MODEL", value_parser = clap::builder::FalseyValueParser::new(),
          conflicts_with_all = ["model", "models_dir", "hf_repo", "hf_file", "model_url"])]
    pub no_model: bool,
}

/// Several servers on one database.
#[derive(Debug, Clone, Default)]
pub struct ClusterConfig {
    /// True if no model is loaded.
    pub no_model: bool,
    url: Option<Url>,
}

impl ClusterFlags {
    pub(super) fn config(&self) -> Result<ClusterConfig, ConfigError> {
        let url = self.server_url.as_deref().map(|text| server_url(text).ok_or_else(|| text.to_owned())).transpose();
        Ok(ClusterConfig { no_model: self.no_model, url: url.map_err(|url| ConfigError::ServerUrl { url })? })
    }
}

/// Parses a base URL: http or https, with a host, without user, password, query and fragment.
fn server_url(text: &str) -> Option<Url> {
    let url = Url::parse(text).ok()?;
    let is_plain = url.username().is_empty() && url.password().is_none() && url.query().is_none();
    (matches!(url.scheme(), "http" | "https") && url.has_host() && is_plain && url.fragment().is_none()).then_some(url)
}

impl ClusterConfig {
    /// Returns the host of `--server-url`, at which other servers reach this one.
    #[must_use]
    pub fn host(&self) -> Option<String> {
        let host = self.url.as_ref()?.host_str()?;
        Some(host.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase())
    }

    /// Returns the URL at which other servers reach this one: `--server-url`, else the first of the `bound` addresses
    /// that identifies this machine.
    #[must_use]
    pub fn url(&self, bound: &[SocketAddr], scheme: &str, prefix: &str) -> Option<String> {
        if let Some(url) = &self.url {
            return Some(url.as_str().trim_end_matches('/').to_owned());
        }
        let address = bound.iter().find(|address| !address.ip().is_loopback() && !address.ip().is_unspecified())?;
        Some(format!("{scheme}://{address}{prefix}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> Result<ClusterConfig, ConfigError> {
        ClusterFlags { server_url: Some(url.to_owned()), no_model: false }.config()
    }

    #[test]
    fn server_url_has_no_user_query_or_fragment() {
        let of = |url: &str| config(url).unwrap().url(&[], "http", "");
        assert_eq!(of("http://10.0.0.5:6767/"), Some("http://10.0.0.5:6767".into()));
        assert_eq!(of("https://llm.example/a/"), Some("https://llm.example/a".into()));
        assert_eq!(config("http://LLM.Example").unwrap().host(), Some("llm.example".into()));
        for invalid in ["10.0.0.5:6767", "ftp://a", "http://user@a", "http://a/?b=c", "http://", "http://a/#b"] {
            assert!(config(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn listen_address_is_announced_if_others_can_reach_it() {
        let config = ClusterConfig::default();
        let url = |bound: &[&str]| {
            let bound: Vec<_> = bound.iter().map(|address| address.parse().unwrap()).collect();
            config.url(&bound, "https", "/llm")
        };
        assert_eq!(url(&["127.0.0.1:1", "10.0.0.5:2"]), Some("https://10.0.0.5:2/llm".into()));
        assert_eq!(url(&["[fd00::5]:2"]), Some("https://[fd00::5]:2/llm".into()));
        assert_eq!(url(&["127.0.0.1:1", "0.0.0.0:2", "[::]:3"]), None);
    }
}
