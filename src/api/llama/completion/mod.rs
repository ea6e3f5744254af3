//! `/completion` and `/infill`: completions with llama-server's details of the generation.

mod infill;
mod request;
mod response;
mod routes;
mod stream;

use crate::server::App;
use utoipa_axum::router::OpenApiRouter;

/// Returns the routes that complete a prompt.
pub(super) fn router() -> OpenApiRouter<App> {
    routes::router().merge(infill::router())
}
