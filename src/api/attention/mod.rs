//! The attention API under `/api/v1`: tokens in, tokens out, each with the attention that it was drawn with.
//!
//! Positions are indices of the sequence: value `i` of a row says how much the model looked at token `i` of `input_ids`, or of
//! the answer behind it. [`ask`] reads a request, [`telling`] follows its runs, [`shape`] makes of a row what was asked for,
//! [`event`] writes it; [`rest`] and [`socket`] carry it. Rows are put into their shape and coded away from the decode thread
//! and from the async threads, while the next token is computed; a client that does not read pauses its own runs.

mod ask;
mod describe;
mod error;
mod event;
mod info;
mod pruning;
mod rest;
mod shape;
mod socket;
mod telling;
mod text;

pub(super) use ask::{Answer, Asked, Dialect, free_ids, in_their_words, read, renamed, token_ids};
pub(super) use describe::describe;
pub use error::AttentionError;
pub(super) use event::{Carrier, Writer, error_message};
pub(super) use telling::{Said, Telling};

use super::App;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes.
pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(info::show))
        .routes(routes!(text::tokenize))
        .routes(routes!(text::detokenize))
        .routes(routes!(rest::generate))
        .routes(routes!(socket::open))
}

/// Whether the path's clients expect this API's errors.
pub(super) fn is_route(path: &str) -> bool {
    const EXACT: [&str; 5] =
        ["/api/v1/model/info", "/api/v1/tokenize", "/api/v1/detokenize", "/api/v1/generate", "/api/v1/generate/stream"];
    EXACT.contains(&path)
}
