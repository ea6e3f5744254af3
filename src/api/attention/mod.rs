//! The attention API under `/api/v1`: generates tokens from token ids, with the attention of each token.
//!
//! [`crate::api::shared::attention`] parses requests and follows their runs; [`rest`] and [`socket`] send the messages. A
//! client that stops reading pauses its own runs.

mod asyncapi;
mod info;
pub(super) mod request;
pub(super) mod rest;
mod socket;
mod tokenize;

pub(super) use asyncapi::describe;

use crate::api::shared::attention::AttentionError;
use crate::server::{Access, Protocol};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the attention routes. The router dispatches `POST /api/v1/generate`, which `KoboldCPP`'s API shares.
pub(super) fn protocol() -> Protocol {
    let routes = OpenApiRouter::new()
        .routes(routes!(info::show))
        .routes(routes!(tokenize::tokenize))
        .routes(routes!(tokenize::detokenize));
    Protocol::new(AttentionError::render, &[])
        .routes(Access::Key, routes)
        .routes(Access::Socket, OpenApiRouter::new().routes(routes!(socket::open)))
}
