//! A client of a running server, used by the other commands.

use super::given_flags::GivenFlags;
use super::trust;
use crate::config::flags::Secret;
use crate::events::RunId;
use crate::server::root_cause;
use anyhow::{Context as _, anyhow, bail};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum time until a server on the default address responds to a health check.
const DEFAULT_ADDRESS_TIMEOUT: Duration = Duration::from_millis(1500);
/// Time between health checks of a server that is starting.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Number of health checks before a message reports the wait.
const SILENT_CHECKS: u32 = 5;
/// Maximum time until a named server responds to a health check.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Flags that select a server.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// Address of the server, e.g. `http://127.0.0.1:6767` or `https://llm.example/prefix`; default: a server on the default address, if one runs
    #[arg(long, env = "THUNDER_SERVER", value_name = "URL")]
    pub server: Option<String>,
    /// PEM file of certificates to trust over https: that of the server or of its certificate authority; default: the system's
    #[arg(long, env = "THUNDER_SERVER_CA", value_name = "FILE")]
    pub server_ca: Option<PathBuf>,
    /// API key for the server; of several, as `thunder serve` takes them, the first
    #[arg(
        long = "api-key",
        env = "THUNDER_API_KEY",
        value_name = "KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    pub api_keys: Vec<Secret>,
}

/// A client of one server.
#[derive(Debug, Clone)]
pub struct Server {
    http: reqwest::Client,
    base: String,
    key: Option<Secret>,
}

/// An error response of a server.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct ErrorResponse {
    /// The status code.
    pub status: StatusCode,
    message: String,
}

impl ServerArgs {
    /// Returns the named server, which must respond, else the one on the default address, if any.
    pub async fn find(&self) -> anyhow::Result<Option<Server>> {
        match &self.server {
            Some(url) => Server::at(url, self.server_ca.as_deref(), self.key(), RESPONSE_TIMEOUT).await.map(Some),
            None => Ok(self.on_default_address().await),
        }
    }

    /// Returns the server like [`Self::find`], for a command that needs one.
    pub async fn require(&self) -> anyhow::Result<Server> {
        let address = crate::config::DEFAULT_ADDRESS;
        let found = self.find().await?;
        found.with_context(|| {
            format!("no server runs at {address}; start one with `thunder serve`, or name one with --server URL")
        })
    }

    /// Returns the server like [`Self::find`], or `None` if the command line has a flag for this process, `local_flag`.
    pub async fn find_unless(&self, local_flag: Option<&str>, given: &GivenFlags) -> anyhow::Result<Option<Server>> {
        match local_flag {
            None => self.find().await,
            Some(flag) if given.server => {
                bail!("{flag} is for this process and cannot be combined with --server; remove one of them")
            }
            Some(_) => Ok(None),
        }
    }

    /// Returns the server on the default address, if one runs.
    pub async fn on_default_address(&self) -> Option<Server> {
        let url = format!("http://{}", crate::config::DEFAULT_ADDRESS);
        Server::at(&url, None, self.key(), DEFAULT_ADDRESS_TIMEOUT).await.ok()
    }

    fn key(&self) -> Option<Secret> {
        self.api_keys.first().cloned()
    }
}

impl Server {
    /// Creates a client for a server in this process.
    pub fn new(base: String, key: Option<Secret>) -> anyhow::Result<Self> {
        Ok(Self { http: trust::client(&base, None)?, base, key })
    }

    /// Connects to the server at an address and waits until its model is ready. The database may be unavailable, because
    /// runs do not need it. `timeout` limits each health check.
    async fn at(url: &str, authority: Option<&Path>, key: Option<Secret>, timeout: Duration) -> anyhow::Result<Self> {
        let url = url.trim_end_matches('/');
        let base = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        if !base.starts_with("http://") && !base.starts_with("https://") {
            bail!("the server address {base} is invalid; it must begin with http:// or https://");
        }
        let http = trust::client(&base, authority).with_context(|| format!("{base} cannot be reached"))?;
        let server = Self { http, base, key };
        let mut checks = 0;
        loop {
            let health = server.http.get(format!("{}/healthz", server.base)).timeout(timeout).send().await;
            let response = health.map_err(|error| unreachable(&server.base, &root_cause(&error)))?;
            let text = response.text().await.unwrap_or_default();
            let health: Value = serde_json::from_str(&text).unwrap_or_default();
            if health["server"] != "thunder" {
                match error_message(&text) {
                    Some(message) => bail!("the server at {} reported an error: {message}", server.base),
                    None => bail!("the server at {} is not Thunder", server.base),
                }
            }
            match health["status"].as_str() {
                Some("ok" | "unavailable") => return Ok(server),
                Some("loading") => {
                    checks += 1;
                    if checks == SILENT_CHECKS {
                        let reason = health["reason"].as_str().unwrap_or("?");
                        eprintln!("thunder: waiting for the server at {}, which is starting: {reason}", server.base);
                    }
                    tokio::time::sleep(CHECK_INTERVAL).await;
                }
                _ => bail!("the server at {} is not ready: {}", server.base, health["reason"].as_str().unwrap_or("?")),
            }
        }
    }

    /// Returns the server's base address.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Returns the address of a run's replay.
    pub fn replay(&self, run_id: &str) -> String {
        format!("{}/runs/{run_id}", self.base)
    }

    /// Creates a request to the server.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base)).header("x-thunder-client", "cli");
        match &self.key {
            Some(key) => request.bearer_auth(key.reveal()),
            None => request,
        }
    }

    /// Sends a request. A response without success is an error with the server's message.
    pub async fn send(&self, request: RequestBuilder) -> anyhow::Result<Response> {
        let sent = request.send().await;
        let response = sent.map_err(|error| anyhow!("{} does not answer: {}", self.base, root_cause(&error)))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let text = response.text().await.unwrap_or_default();
        let message = error_message(&text).unwrap_or_else(|| format!("{} answered {status}", self.base));
        if status == StatusCode::UNAUTHORIZED && self.key.is_none() {
            bail!("the server at {} requires an API key; set it with --api-key", self.base);
        }
        Err(ErrorResponse { status, message }.into())
    }
}

fn unreachable(base: &str, reason: &str) -> anyhow::Error {
    if reason.contains("certificate") {
        return anyhow!(
            "the certificate of the server at {base} is not trusted: {reason}; trust it with --server-ca FILE"
        );
    }
    anyhow!("no server answers at {base}: {reason}")
}

/// Returns a path that ends with a name or an id, escaped as one segment.
pub fn path_with_name(path: &str, name: &str) -> anyhow::Result<String> {
    // A URL has no segments with these texts: they would select another path.
    if matches!(name, "." | "..") {
        bail!("the name '{name}' is not one of a run or a mod; give the id of a run or the name of a mod");
    }
    // Only the path of this URL is used.
    let mut url = reqwest::Url::parse(&format!("http://server{path}"))?;
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.push(name);
    }
    Ok(url.path().to_owned())
}

/// Returns the id of the run that a response belongs to.
pub fn run_id_of(response: &Response) -> Option<String> {
    response.headers().get(RunId::HEADER)?.to_str().ok().map(str::to_owned)
}

/// Returns the message of an error response, in any protocol's format.
pub fn error_message(body: &str) -> Option<String> {
    let body: Value = serde_json::from_str(body).ok()?;
    let message = body.pointer("/error/message").or_else(|| body.get("detail"))?.as_str()?;
    Some(match body.get("pointer").and_then(Value::as_str) {
        Some(pointer) if !message.contains(pointer) => format!("{pointer}: {message}"),
        _ => message.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::{Server, ServerArgs, path_with_name};
    use axum::{Json, Router, http::StatusCode, routing::get};
    use clap::Parser;
    use std::time::Duration;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        server: ServerArgs,
    }

    #[test]
    fn name_is_one_segment_of_the_path() {
        assert_eq!(path_with_name("/api/v1/runs", "req/1 a").unwrap(), "/api/v1/runs/req%2F1%20a");
        for name in [".", ".."] {
            let error = path_with_name("/v1/mods", name).unwrap_err().to_string();
            assert!(error.starts_with(&format!("the name '{name}' is not")), "{error}");
        }
    }

    #[tokio::test]
    async fn server_without_its_database_is_ready_and_failed_one_is_not() {
        for (status, is_ready) in [("unavailable", true), ("failed", false), ("stopping", false)] {
            let health = serde_json::json!({"server": "thunder", "status": status, "reason": "the reason"});
            let answer = get(move || async move { (StatusCode::SERVICE_UNAVAILABLE, Json(health)) });
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            tokio::spawn(async { axum::serve(listener, Router::new().route("/healthz", answer)).await });
            let found = Server::at(&address, None, None, Duration::from_mins(1)).await;
            assert_eq!(found.is_ok(), is_ready, "{status}: {:?}", found.err());
        }
    }

    #[test]
    fn first_of_several_keys_is_used() {
        let line = Line::parse_from(["thunder", "--api-key", "first,second", "--api-key", "third"]);
        assert_eq!(line.server.key().unwrap().reveal(), "first");
    }
}
