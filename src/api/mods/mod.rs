//! `/v1/mods`: the mods that requests can name. Every client can read them. If API keys are configured, changes require
//! a key with the right to change mods; uploads always require such a key and `--allow-mod-upload`.

mod change;
mod check;
mod dry_run;
mod get;
mod upload;

use crate::server::mods::MAX_BODY_BYTES;
use crate::server::{Access, App, Protocol};
use axum::extract::DefaultBodyLimit;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the routes.
pub fn protocol() -> Protocol {
    Protocol::native(&["/v1/mods"]).routes(Access::Key, router())
}

fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(get::list, upload::register))
        .routes(routes!(get::list_native))
        .routes(routes!(check::check))
        .routes(routes!(dry_run::run))
        .routes(routes!(get::show, change::remove))
        .routes(routes!(get::versions))
        .routes(routes!(get::source))
        .routes(routes!(change::enable))
        .routes(routes!(change::disable))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
}
