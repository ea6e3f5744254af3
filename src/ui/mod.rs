//! The dashboard: one file per page, assets embedded in the binary.
//!
//! Pages are rendered on the server and readable without JavaScript; scripts are plain modules without a bundler. Scripts
//! load data from the public API, so that the dashboard has no private features, and parts of pages with the header
//! `X-Fragment`. Text from runs is untrusted: templates escape it, and scripts insert it as text nodes.

mod assets;
mod bundle;
#[cfg(test)]
mod checks;
mod compare;
mod docs;
mod editor;
mod error;
mod experiment;
mod experiment_form;
mod experiments;
mod export;
mod login;
mod mods;
mod playground;
mod run;
mod runs;
mod shell;
mod stats;
mod steering;
#[cfg(test)]
mod testing;

use crate::server::mods::MAX_BODY_BYTES;
use crate::server::{Access, App, Pages, Protocol};
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;

/// Content-Security-Policy of pages and assets: only files of this server, no inline scripts and no inline styles.
const CONTENT_SECURITY_POLICY: &str = "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; \
                      form-action 'self'; frame-ancestors 'none'";

/// Returns the dashboard, which the program adds to the APIs.
#[must_use]
pub const fn pages() -> Pages {
    Pages { protocol, not_found: error::not_found, login: login::page }
}

fn protocol(openapi: Bytes) -> Protocol {
    const PREFIXES: &[&str] =
        &["/runs", "/playground", "/mods", "/stats", "/experiments", "/compare", "/docs", "/assets"];
    let headers = axum::middleware::map_response(|response: Response| std::future::ready(add_headers(response)));
    let pages = router(openapi).layer(headers.clone());
    let assets = assets().layer(headers);
    Protocol::native(PREFIXES).routes(Access::Key, pages).routes(Access::Public, assets)
}

fn router(openapi: Bytes) -> Router<App> {
    Router::new()
        .route("/", get(runs::start))
        .route("/runs", get(runs::page))
        .route("/runs/{id}", get(run::page))
        .route("/runs/{id}/export.html", get(export::page))
        .route("/runs/{id}/older", get(run::older))
        .route("/runs/{id}/newer", get(run::newer))
        .route("/compare", get(compare::page))
        .route("/playground", get(playground::page))
        .route("/stats", get(stats::page))
        .route("/experiments", get(experiments::page))
        .route("/experiments/-new", get(experiment_form::page))
        .route("/experiments/{id}", get(experiment::page))
        .route("/mods", get(mods::page))
        .route("/mods/-new", get(editor::new_page).post(editor::save_new))
        .route("/mods/{name}", get(editor::page).post(editor::save))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .merge(docs::router(openapi))
}

fn assets() -> Router<App> {
    Router::new().route("/assets/{version}/{*path}", get(assets::file)).route("/favicon.ico", get(assets::icon))
}

/// Adds the headers of every page and asset.
fn add_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(HeaderValue::from_static(CONTENT_SECURITY_POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    // Pages change with the runs, and depend on the theme's cookie and the fragment header.
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-cache"));
    headers.entry(header::VARY).or_insert(HeaderValue::from_static("Cookie, X-Fragment"));
    response
}
