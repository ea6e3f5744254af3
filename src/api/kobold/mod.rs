//! `KoboldCPP`'s API: `/api/v1/generate` with a `prompt`, `/api/extra/…`, and the small routes that its clients query
//! first.
//!
//! A body with `input_ids` instead of a `prompt` uses the attention API's format, sent as server-sent events. A
//! generation with a `genkey` can be polled and aborted from other connections.

mod asyncapi;
mod error;
mod generate;
mod genkeys;
mod info;
mod logprobs;
mod request;
mod socket;
mod stream;
mod tokens;

pub(super) use asyncapi::describe;
pub use error::KoboldError;
pub(super) use generate::generate;
pub(super) use genkeys::Genkeys;

use super::App;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns `KoboldCPP`'s routes.
pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(info::router())
        .routes(routes!(stream::open))
        .routes(routes!(socket::open))
        .routes(routes!(generate::check))
        .routes(routes!(generate::abort))
        .routes(routes!(logprobs::last_logprobs))
        .routes(routes!(tokens::count))
        .routes(routes!(tokens::text))
}

/// Returns true if clients of the path expect `KoboldCPP`'s error format.
pub(super) fn is_route(path: &str) -> bool {
    const EXACT: [&str; 3] = ["/api/v1/model", "/api/v1/info/version", "/api/latest/model"];
    const BELOW: [&str; 3] = ["/api/extra/", "/api/v1/config/", "/api/latest/"];
    EXACT.contains(&path) || BELOW.iter().any(|start| path.starts_with(start))
}
