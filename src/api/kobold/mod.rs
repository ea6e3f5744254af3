//! `KoboldCPP`'s API: `/api/v1/generate` with a `prompt`, `/api/extra/…`, and the routes that report the model and
//! its limits.
//!
//! A body with `input_ids` instead of a `prompt` uses the attention API's format, sent as server-sent events. A
//! generation with a `genkey` can be polled and aborted from other connections.

mod asyncapi;
mod bans;
mod error;
mod generate;
mod genkeys;
mod info;
mod logprobs;
mod perf;
mod request;
mod response;
mod socket;
mod stream;
mod tokens;

pub(super) use asyncapi::describe;
pub use error::KoboldError;
pub(super) use generate::generate;
pub(super) use genkeys::Genkeys;

use crate::server::{Access, Protocol};
use axum::Extension;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns `KoboldCPP`'s routes. The router dispatches `POST /api/v1/generate`, which the attention API shares.
pub(super) fn protocol(genkeys: &Genkeys) -> Protocol {
    let genkeys = || Extension(genkeys.clone());
    let routes = OpenApiRouter::new()
        .merge(info::router())
        .routes(routes!(generate::check, generate::check_without_key))
        .routes(routes!(generate::abort))
        .routes(routes!(logprobs::last_logprobs, logprobs::last_logprobs_without_key))
        .routes(routes!(perf::perf))
        .routes(routes!(tokens::count))
        .routes(routes!(tokens::text));
    let runs = OpenApiRouter::new().routes(routes!(stream::generate)).routes(routes!(generate::generate_latest));
    Protocol::new(KoboldError::render, &["/api/extra", "/api/v1/config", "/api/latest"])
        .routes(Access::Public, info::version_router())
        .routes(Access::OptionalKey, info::model_router())
        .routes(Access::Key, routes.layer(genkeys()))
        .routes(Access::Run, runs.layer(genkeys()))
        .routes(Access::Socket, OpenApiRouter::new().routes(routes!(socket::open)).layer(genkeys()))
}
