//! llama-server's own routes, one file per route with its `router()`. Errors have llama-server's format, and unknown
//! fields are ignored.

mod body;
mod capabilities;
mod classify;
mod completion;
mod embeddings;
mod exposition;
mod infill;
mod lora;
mod metrics;
mod models;
mod monitor;
mod props;
mod request;
mod rerank;
mod response;
mod sessions;
mod sleep;
mod slot_files;
mod slot_response;
mod slots;
mod template;
mod text;

pub use sleep::sleep_when_idle;

use crate::api::shared::error::{LlamaError, OpenAiError};
use crate::server::{Access, App, Protocol};
use utoipa_axum::router::OpenApiRouter;

/// Returns llama-server's routes.
pub(super) fn protocol() -> Protocol {
    let calls = OpenApiRouter::new()
        .merge(text::router())
        .merge(template::router())
        .merge(props::router())
        .merge(models::router())
        .merge(metrics::router())
        .merge(monitor::router())
        .merge(lora::router())
        .merge(slots::router())
        .merge(sessions::router())
        .merge(embeddings::router())
        .merge(rerank::router())
        .merge(classify::router());
    Protocol::new(LlamaError::render, &["/slots", "/v1/slots", "/sessions", "/models"])
        .routes(Access::Run, completion::router().merge(infill::router()))
        .routes(Access::Key, calls)
}

/// Returns llama-server's routes below OpenAI's paths; their errors have OpenAI's format.
pub(super) fn openai_protocol() -> Protocol {
    Protocol::new(OpenAiError::render, &[])
        .routes(Access::Key, embeddings::openai_router().merge(template::input_tokens_router()))
}

/// Returns `POST /models` and `DELETE /models`.
pub(super) fn models_router() -> OpenApiRouter<App> {
    models::files_router()
}
