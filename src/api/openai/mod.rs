//! The OpenAI-compatible routes: chat completions, completions and models, with `/v1` and without.
//!
//! The first result is awaited before an answer begins, so that whatever is wrong with a request is a plain 4xx, the wrong field
//! named in `param`. Where llama-server and OpenAI differ on the wire, clients of both are served. What is ours stands under
//! `thunder`: the run's id, its replay, and `retract` (below).
//!
//! A mod may take back text that was already sent, and what began as a tool call may turn out to be none. The stream then has a
//! chunk with an empty delta and `"thunder":{"retract":{"chars":n}}`: the last `n` characters of the text so far are void, and
//! where they are named the last `reasoning_chars` of the thoughts and the last `tool_calls`. Clients that do not know it keep
//! what was taken back; the replay and the answer without `stream` are always right.

mod chat;
mod completions;
mod models;
mod shape;

use super::App;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes.
pub fn router() -> OpenApiRouter<App> {
    use axum::routing::get;
    OpenApiRouter::new()
        .merge(chat::router())
        .routes(routes!(completions::completions))
        .routes(routes!(models::list))
        .routes(routes!(models::show))
        .route("/models", get(models::list))
}

/// Whether the path's clients expect OpenAI's errors.
pub(super) fn owns(path: &str) -> bool {
    (path.starts_with("/v1/") && path != "/v1/ingest")
        || matches!(path, "/v1" | "/models")
        || path.starts_with("/chat/completions")
        || path.starts_with("/responses")
}
