//! llama-server's own routes, one file per route with its `router()`. Errors have llama-server's format, and unknown
//! fields are ignored.

mod classify;
mod completion;
mod embeddings;
mod encoding;
mod infill;
mod lora;
mod models;
mod monitor;
mod props;
mod request;
mod rerank;
mod response;
mod sessions;
mod settings;
mod sleep;
mod slot_files;
mod slots;
mod template;
mod text;

pub(super) use infill::{infill_prompt, infill_tokens};
pub(super) use models::status;
pub(super) use request::LlamaResponseOptions;
pub(super) use settings::generation_settings;
pub use sleep::sleep_when_idle;

use super::App;
use utoipa_axum::router::OpenApiRouter;

/// Returns llama-server's routes.
pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(completion::router())
        .merge(infill::router())
        .merge(text::router())
        .merge(template::router())
        .merge(props::router())
        .merge(models::router())
        .merge(monitor::router())
        .merge(lora::router())
        .merge(slots::router())
        .merge(sessions::router())
        .merge(embeddings::router())
        .merge(rerank::router())
        .merge(classify::router())
}

/// Returns true if clients of the path expect llama-server's error format.
pub(super) fn is_route(path: &str) -> bool {
    const EXACT: [&str; 21] = [
        "/completion",
        "/completions",
        "/infill",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/apply-template",
        "/props",
        "/slots",
        "/metrics",
        "/lora-adapters",
        "/embedding",
        "/embeddings",
        "/rerank",
        "/reranking",
        "/v1/rerank",
        "/v1/reranking",
        "/classify",
        "/v1/classify",
        "/sessions",
        "/v1/health",
    ];
    const BELOW: [&str; 4] = ["/slots/", "/v1/slots/", "/sessions/", "/models/"];
    EXACT.contains(&path) || BELOW.iter().any(|start| path.starts_with(start))
}
