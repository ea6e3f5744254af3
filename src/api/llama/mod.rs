//! llama-server's own routes, one file or folder with a `router()` per topic. Errors have llama-server's format, and
//! unknown fields are ignored.

mod completion;
mod encoder;
mod lora;
mod metrics;
mod models;
mod props;
mod request;
mod response;
mod sleep;
mod slots;
mod template;
mod tokenize;

pub use sleep::sleep_when_idle;

use crate::api::shared::error::{LlamaError, OpenAiError};
use crate::server::{Access, App, Protocol};
use utoipa_axum::router::OpenApiRouter;

/// Returns llama-server's routes.
pub(super) fn protocol() -> Protocol {
    let routes = OpenApiRouter::new()
        .merge(tokenize::router())
        .merge(template::router())
        .merge(props::router())
        .merge(models::router())
        .merge(metrics::router())
        .merge(lora::router())
        .merge(slots::router())
        .merge(encoder::router());
    Protocol::new(LlamaError::render, &["/slots", "/v1/slots", "/sessions", "/models"])
        .routes(Access::Run, completion::router())
        .routes(Access::Key, routes)
}

/// Returns the routes of this folder below OpenAI's paths; their errors have OpenAI's format.
pub(super) fn openai_protocol() -> Protocol {
    Protocol::new(OpenAiError::render, &[])
        .routes(Access::Key, encoder::openai_router().merge(template::input_tokens_router()))
}

/// Returns `POST /models` and `DELETE /models`.
pub(super) fn models_router() -> OpenApiRouter<App> {
    models::files_router()
}
