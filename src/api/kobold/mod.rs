//! `KoboldCPP`'s dialect: `/api/v1/generate` with a `prompt`, `/api/extra/…`, and the small routes that its clients look at first.
//!
//! A body with `input_ids` instead of a `prompt` is the attention API's, told as server-sent events. A generation may be named by a
//! `genkey`; it can then be looked at and aborted from other connections.

mod ask;
mod describe;
mod error;
mod generate;
mod genkeys;
mod info;
mod logprobs;
mod socket;
mod stream;
mod tokens;

pub(super) use describe::describe;
pub use error::KoboldError;
pub(super) use generate::generate;
pub(super) use genkeys::Genkeys;

use super::App;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes.
pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(info::router())
        .routes(routes!(stream::open))
        .routes(routes!(socket::open))
        .routes(routes!(generate::check))
        .routes(routes!(generate::abort))
        .routes(routes!(logprobs::last))
        .routes(routes!(tokens::count))
        .routes(routes!(tokens::text))
}

/// Whether the path's clients expect `KoboldCPP`'s errors.
pub(super) fn is_route(path: &str) -> bool {
    const EXACT: [&str; 3] = ["/api/v1/model", "/api/v1/info/version", "/api/latest/model"];
    const BELOW: [&str; 3] = ["/api/extra/", "/api/v1/config/", "/api/latest/"];
    EXACT.contains(&path) || BELOW.iter().any(|start| path.starts_with(start))
}
