//! The attention API under `/api/v1`: generates tokens from token ids, with the attention of each token.
//!
//! Value `i` of a row is the attention to token `i` of `input_ids` followed by the answer. [`request`] parses a
//! request, [`stream`] follows its runs, [`shape`] converts rows to the requested format, [`event`] encodes messages;
//! [`rest`] and [`socket`] send them. Rows are converted and encoded on blocking threads while the next token is
//! computed. A client that stops reading pauses its own runs.

mod asyncapi;
mod error;
mod event;
mod info;
mod pruning;
mod request;
mod rest;
mod shape;
mod socket;
mod stream;
mod text;

pub(super) use asyncapi::describe;
pub use error::AttentionError;
pub(super) use event::{AttentionWriter, MessageFormat, error_message};
pub(super) use request::{
    AttentionOptions, AttentionRequest, Transport, apply_aliases, assign_request_ids, parse, restore_client_names,
    token_ids,
};
pub(super) use stream::{AttentionEvent, AttentionStream};

use super::App;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the attention routes.
pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(info::show))
        .routes(routes!(text::tokenize))
        .routes(routes!(text::detokenize))
        .routes(routes!(rest::generate))
        .routes(routes!(socket::open))
}

/// Returns true if clients of the path expect this API's error format.
pub(super) fn is_route(path: &str) -> bool {
    const EXACT: [&str; 5] =
        ["/api/v1/model/info", "/api/v1/tokenize", "/api/v1/detokenize", "/api/v1/generate", "/api/v1/generate/stream"];
    EXACT.contains(&path)
}
