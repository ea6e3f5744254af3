//! Routes of encoders: embeddings, reranking and classification.

mod classify;
mod embeddings;
mod rerank;

use crate::server::App;
pub(super) use embeddings::openai_router;
use utoipa_axum::router::OpenApiRouter;

/// Returns the routes whose errors have llama-server's format.
pub(super) fn router() -> OpenApiRouter<App> {
    embeddings::router().merge(rerank::router()).merge(classify::router())
}
