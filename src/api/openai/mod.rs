//! The OpenAI-compatible routes: chat completions, completions and models, with and without the `/v1` prefix.
//!
//! A handler waits for the first output before it responds, so that an invalid request gets a plain 4xx whose `param`
//! names the field. If llama-server and OpenAI differ on the wire, clients of both are supported. Thunder's own data is
//! in `thunder`: the run's id, the path of its replay, and `retract`.
//!
//! A mod may remove text that was already sent, and the start of a tool call may turn out to be plain text. The stream
//! then contains a chunk with an empty delta and `"thunder":{"retract":{"chars":n}}`: the last `n` characters of the
//! text so far are retracted. `reasoning_chars` and `tool_calls` do the same for reasoning and tool calls. Clients that
//! ignore it keep the retracted text; the replay and responses without `stream` are always correct.

mod chat;
mod completions;
mod models;
mod response;

use crate::api::shared::error::OpenAiError;
use crate::server::{Access, App, Protocol};
use axum::routing::get;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the OpenAI routes, without `/models`, which llama-server's API shares.
pub(super) fn protocol() -> Protocol {
    let runs = OpenApiRouter::new().merge(chat::router()).routes(routes!(completions::completions));
    let routes =
        OpenApiRouter::new().merge(chat::control_router()).routes(routes!(models::list)).routes(routes!(models::show));
    Protocol::new(OpenAiError::render, &["/v1", "/chat/completions", "/responses"])
        .routes(Access::Run, runs)
        .routes(Access::Key, routes)
}

/// Returns `GET /models`.
pub(super) fn models_router() -> OpenApiRouter<App> {
    OpenApiRouter::new().route("/models", get(models::list))
}
