//! The OpenAI-compatible routes: chat completions, completions and models, with and without the `/v1` prefix.
//!
//! A handler waits for the first output before it responds, so that an invalid request gets a plain 4xx whose `param`
//! names the field. If llama-server and OpenAI differ on the wire, clients of both are supported. Thunder's own data is
//! in `thunder`: the run's id, its replay, and `retract` (below).
//!
//! A mod may remove text that was already sent, and the start of a tool call may turn out to be plain text. The stream
//! then contains a chunk with an empty delta and `"thunder":{"retract":{"chars":n}}`: the last `n` characters of the
//! text so far are void. `reasoning_chars` and `tool_calls` do the same for reasoning and tool calls. Clients that
//! ignore it keep the retracted text; the replay and responses without `stream` are always correct.

mod chat;
mod completions;
mod models;
mod response;

use super::App;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the OpenAI routes.
pub fn router() -> OpenApiRouter<App> {
    use axum::routing::get;
    OpenApiRouter::new()
        .merge(chat::router())
        .routes(routes!(completions::completions))
        .routes(routes!(models::list))
        .routes(routes!(models::show))
        .route("/models", get(models::list))
}

/// Returns true if clients of the path expect OpenAI's error format.
pub(super) fn is_route(path: &str) -> bool {
    (path.starts_with("/v1/") && path != "/v1/ingest")
        || matches!(path, "/v1" | "/models")
        || path.starts_with("/chat/completions")
        || path.starts_with("/responses")
}
