//! The streaming protocol: `WS /generate` and `POST /v1/generate`.
//!
//! A configuration becomes a run, which goes on by itself in [`run`] and keeps what it says in [`log`]; who hears it, a
//! connection or a response, follows from any point on. So a client that comes back hears what it missed and nothing twice, and
//! one that does not read makes its own run wait.

mod begin;
mod control;
mod describe;
mod feedback;
mod loading;
mod log;
mod message;
mod read;
mod registry;
mod remote;
mod rest;
mod run;
mod session;
mod stored;

pub(super) use describe::describe;
pub(super) use registry::Streams;
pub(super) use rest::is_route;

use super::App;
use super::socket::Upgrade;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes.
pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(rest::generate)).route("/generate", get(connect))
}

async fn connect(State(app): State<App>, upgrade: Upgrade) -> Response {
    upgrade.serve(|error| error.streaming().to_string(), move |socket| session::serve(app, socket))
}
