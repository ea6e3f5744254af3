//! The OpenAI-compatible routes: chat completions, completions and models, with `/v1` and without.
//!
//! `wire` makes the one [`crate::engine::Request`] of a body, every wrong field named in `param`; `run` hands it to the
//! engine and waits for the first result, so that whatever is wrong with a request is a plain 4xx; `answer` and `stream` write what comes back. Where llama-server and OpenAI differ on the wire, clients of
//! both are served. What is ours stands under `thunder`: the run's id, its replay, and `retract` (below).
//!
//! A mod may take back text that was already sent. The stream then has a chunk with an empty delta and
//! `"thunder":{"retract":{"chars":n}}`: the last `n` characters of the answer so far are void. Clients that do not know
//! it keep the taken-back text; the replay and the answer without `stream` are always right.

mod answer;
mod completions;
mod models;
mod run;
mod shape;
mod stream;
mod tool_calls;
mod wire;

use super::App;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes.
pub fn router() -> OpenApiRouter<App> {
    use axum::routing::{get, post};
    OpenApiRouter::new()
        .routes(routes!(run::chat_completions))
        .routes(routes!(completions::completions))
        .routes(routes!(models::list))
        .routes(routes!(models::show))
        .route("/chat/completions", post(run::chat_completions))
        .route("/models", get(models::list))
}

/// Whether the path's clients expect OpenAI's errors.
pub(super) fn owns(path: &str) -> bool {
    (path.starts_with("/v1/") && path != "/v1/ingest") || matches!(path, "/v1" | "/chat/completions" | "/models")
}
