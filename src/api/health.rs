//! Whether the server can take a run: `/health`, `/healthz` and llama-server's `/v1/health`, open to everybody.

use super::{ApiError, App, State};
use axum::Json;
use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Whether the server can take a run.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// `ok`, `loading`, `stopping`, `unavailable`, or `failed`, which only a restart mends.
    pub status: &'static str,
    /// What it waits for, unless the status is `ok`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The same as llama-server has it, unless the status is `ok`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub error: Option<serde_json::Value>,
    /// Always `thunder`, so that a client knows whom it found.
    pub server: &'static str,
    /// The release.
    pub version: &'static str,
}

/// The health routes.
pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(healthz))
        .route("/health", axum::routing::get(healthz))
        .route("/v1/health", axum::routing::get(healthz))
}

/// The same at another path.
pub(super) fn router_at(path: &str) -> axum::Router<App> {
    axum::Router::new().route(path, axum::routing::get(healthz))
}

/// Says 200 when model and database are ready, 503 with the reason before; `/health` is the same.
#[utoipa::path(get, path = "/healthz", tag = "health",
    responses((status = 200, body = Health), (status = 503, body = Health)))]
async fn healthz(axum::extract::State(app): axum::extract::State<App>) -> (StatusCode, Json<Health>) {
    let (status, reason) = match app.state() {
        State::Loading(doing) => ("loading", Some(doing)),
        State::Stopping | State::Stopped => ("stopping", Some("the server is stopping".into())),
        State::Ready if app.models().default_model().is_some_and(|loaded| !loaded.is_running()) => {
            ("failed", Some("the decode thread has died; restart the server".into()))
        }
        State::Ready => match app.store() {
            Ok(store) => match store.ready().await {
                Ok(()) => ("ok", None),
                Err(error) => ("unavailable", Some(error.to_string())),
            },
            Err(_) => ("loading", Some("the database is being started".into())),
        },
    };
    let code = if reason.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let error = reason.clone().and_then(|reason| ApiError::unavailable(reason).llama().get("error").cloned());
    (code, Json(Health { status, reason, error, server: "thunder", version: env!("CARGO_PKG_VERSION") }))
}
