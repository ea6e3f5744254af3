//! Health of the server: `/health`, `/healthz` and llama-server's `/v1/health`, without an API key.

use crate::api::shared::error::{LlamaError, LlamaErrorBody};
use crate::server::{Access, ApiError, App, Protocol, ServerState};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Health of the server.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// `ok`, `loading`, `stopping`, `unavailable`, or `failed`, which requires a restart.
    pub status: &'static str,
    /// The reason, unless the status is `ok`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The reason in llama-server's format, unless the status is `ok`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<LlamaErrorBody>,
    /// Always `thunder`, so that clients can identify the server.
    pub server: &'static str,
    /// Version of the server.
    pub version: &'static str,
}

/// Returns the health routes.
pub(super) fn protocols() -> [Protocol; 2] {
    let native = OpenApiRouter::new().routes(routes!(healthz));
    let llama = OpenApiRouter::new().route("/health", get(healthz)).route("/v1/health", get(healthz));
    [
        Protocol::native(&["/healthz"]).routes(Access::Public, native),
        Protocol::new(LlamaError::render, &[]).routes(Access::Public, llama),
    ]
}

/// Returns 200 if model and database are ready, otherwise 503 with the reason. Also at `/health`.
#[utoipa::path(get, path = "/healthz", tag = "health",
    responses((status = 200, body = Health), (status = 503, body = Health)))]
async fn healthz(State(app): State<App>) -> (StatusCode, Json<Health>) {
    let (status, reason) = match app.state() {
        ServerState::Loading(activity) => ("loading", Some(activity)),
        ServerState::Stopping | ServerState::Stopped => ("stopping", Some("the server is stopping".into())),
        ServerState::Ready if app.models().default_model().is_some_and(|loaded| !loaded.is_running()) => {
            ("failed", Some("the decode thread has stopped; restart the server".into()))
        }
        ServerState::Ready => match app.store() {
            Ok(store) => match store.ready().await {
                Ok(()) => ("ok", None),
                Err(error) => ("unavailable", Some(error.to_string())),
            },
            Err(_) => ("loading", Some("the database is starting".into())),
        },
    };
    let code = if reason.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let error = reason.clone().map(|reason| ApiError::unavailable(reason).llama().error);
    (code, Json(Health { status, reason, error, server: "thunder", version: env!("CARGO_PKG_VERSION") }))
}
