//! The streaming protocol: `WS /generate` and `POST /v1/generate`.
//!
//! A configuration starts a run, which continues independently of the connection in [`run`] and stores its output in
//! [`log`]. A connection or HTTP response follows it from any point, so that a client that reconnects receives what it
//! missed exactly once. A client that stops reading pauses its own run.

mod asyncapi;
mod config;
mod connection;
mod control;
mod feedback;
mod loading;
mod log;
mod message;
mod registry;
mod remote;
mod rest;
mod run;
mod start;
mod stored;

pub(super) use asyncapi::describe;
pub(super) use registry::Streams;
pub(super) use rest::is_route;

use super::App;
use super::socket::Upgrade;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the routes.
pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(rest::generate)).route("/generate", get(connect))
}

async fn connect(State(app): State<App>, upgrade: Upgrade) -> Response {
    upgrade.serve(|error| error.streaming().to_string(), move |socket| connection::serve(app, socket))
}
