//! Settings that Google's Vertex AI passes to a container in environment variables.

use clap::Args;

/// Environment variables of Vertex AI.
#[derive(Debug, Clone, Args)]
pub struct VertexFlags {
    /// `PREDICTION` adds the prediction route.
    #[arg(long, env = "AIP_MODE", hide = true)]
    aip_mode: Option<String>,
    /// Path of the prediction route.
    #[arg(long, env = "AIP_PREDICT_ROUTE", hide = true)]
    aip_predict_route: Option<String>,
    /// Path that responds like `/health`.
    #[arg(long, env = "AIP_HEALTH_ROUTE", hide = true)]
    aip_health_route: Option<String>,
    /// Port to listen on, instead of that of --listen and --port.
    #[arg(long, env = "AIP_HTTP_PORT", hide = true)]
    aip_http_port: Option<u16>,
}

/// Routes that Vertex AI calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VertexConfig {
    /// Path of the prediction route.
    pub predict: String,
    /// Path that responds like `/health`.
    pub health: Option<String>,
}

impl VertexFlags {
    fn is_enabled(&self) -> bool {
        self.aip_mode.as_deref() == Some("PREDICTION")
    }

    /// Returns the port that Vertex AI connects to.
    pub(super) fn port(&self) -> Option<u16> {
        self.aip_http_port.filter(|_| self.is_enabled())
    }

    pub(super) fn config(&self) -> Option<VertexConfig> {
        let path = |route: &Option<String>| {
            let route = route.as_deref().map(str::trim).filter(|path| !path.is_empty())?;
            Some(if route.starts_with('/') { route.to_owned() } else { format!("/{route}") })
        };
        self.is_enabled().then(|| VertexConfig {
            predict: path(&self.aip_predict_route).unwrap_or_else(|| "/predict".to_owned()),
            health: path(&self.aip_health_route),
        })
    }
}
