//! The streaming protocol: `WS /generate` and `POST /v1/generate`.
//!
//! A configuration starts a run, which continues independently of the connection in [`run`] and stores its output in
//! [`log`]. A connection or HTTP response follows it from any point, so that a client that reconnects receives every
//! message exactly once. A client that stops reading pauses its own run.

mod asyncapi;
mod config;
mod connection;
mod connection_run;
mod control;
mod error;
mod feedback;
mod loading;
mod log;
mod message;
mod registry;
mod remote;
mod request;
mod response;
mod rest;
mod run;
mod start;
mod stored;

use crate::api::shared::sse::to_json;
use crate::server::socket::Upgrade;
use crate::server::{Access, App, Protocol};
pub(super) use asyncapi::describe;
use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use error::StreamError;
use registry::StreamedRuns;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the routes over HTTP and over WebSocket, which share the registry of runs.
pub(super) fn protocols() -> [Protocol; 2] {
    let streamed_runs = StreamedRuns::default();
    let http = OpenApiRouter::new().routes(routes!(rest::generate)).layer(Extension(streamed_runs.clone()));
    let socket = OpenApiRouter::new().route("/generate", get(connect)).layer(Extension(streamed_runs));
    [
        Protocol::new(StreamError::render, &[]).routes(Access::Run, http),
        Protocol::native(&["/generate"]).routes(Access::Socket, socket),
    ]
}

async fn connect(State(app): State<App>, streamed_runs: Extension<StreamedRuns>, upgrade: Upgrade) -> Response {
    upgrade.serve(|error| to_json(&error.streaming()), move |socket| connection::serve(app, streamed_runs.0, socket))
}
