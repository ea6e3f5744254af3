//! The HTTP and WebSocket APIs, one folder per protocol. Each converts its request bodies into a
//! [`crate::engine::Request`] and the engine's outputs into responses.
//!
//! [`App`] is the state shared by all handlers, [`ApiError`] the only type that maps errors to status codes.
//! [`Listeners`] serves all APIs behind the access checks of `security`.

mod anthropic;
mod app;
mod asyncapi;
mod attention;
mod body_key;
mod catalogue;
mod chat;
mod connections;
mod error;
pub mod extract;
mod generation;
mod health;
mod ingest;
mod kobold;
mod llama;
mod mods;
mod native;
pub mod openai;
mod openapi;
mod peers;
mod predict;
mod prefix;
mod rates;
mod responses;
mod security;
mod server;
mod session;
mod shared;
mod socket;
mod stream;

pub use app::{App, State};
pub use attention::AttentionError;
pub use catalogue::{Catalogue, Entry, LoadStep, Loaded, ModelState};
pub use error::{
    AnthropicError, ApiError, ErrorKind, LlamaError, OpenAiError, Problem, StreamError, request_id, with_request_id,
};
pub use health::Health;
pub use kobold::KoboldError;
pub use llama::sleep_when_idle;
pub use mods::{
    MAX_BODY_BYTES as MAX_UPLOAD_BYTES, ModSync, register_upload, require_upload_rights, source_of,
    store_used_versions, used_files, versions_of,
};
pub use peers::announce;
pub use prefix::base;
pub use security::Caller;
pub use server::{BindError, Listeners};
pub use session::share_logins;

use crate::ui;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State as Shared};
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::get;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::set_header::SetResponseHeaderLayer;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

#[derive(OpenApi)]
#[openapi(info(
    title = "Thunder",
    description = "Runs, their events, and the actions of mods. Errors are RFC 9457 problems; the OpenAI-compatible \
                   routes use OpenAI's format, llama-server's routes llama-server's."
))]
struct Document;

/// Returns all routes with the shared middleware.
pub fn router(app: &App) -> Router {
    let (routes, declared) = OpenApiRouter::with_openapi(Document::openapi())
        .merge(health::router())
        .merge(ingest::router())
        .merge(native::router())
        .merge(mods::router())
        .merge(openai::router())
        .merge(anthropic::router())
        .merge(responses::router())
        .merge(llama::router())
        .merge(attention::router().merge(kobold::router()).layer(axum::Extension(kobold::Genkeys::default())))
        .merge(stream::router())
        .split_for_parts();
    let server = &app.config().server;
    let posts = declared.paths.paths.iter().filter(|(path, item)| item.post.is_some() && !path.contains('{'));
    let posts: Vec<String> = posts.map(|(path, _)| path.clone()).collect();
    let document = openapi::document(declared, &server.prefix);
    let sockets = asyncapi::document(&server.prefix);
    let dashboard = if server.routes.dashboard { ui::router(document.clone()) } else { Router::new() };
    let routes = routes
        .route(openapi::PATH, get(move || std::future::ready(([(header::CONTENT_TYPE, "application/json")], document))))
        .route(asyncapi::PATH, get(move || std::future::ready(([(header::CONTENT_TYPE, "application/json")], sockets))))
        .merge(session::router())
        .merge(dashboard);
    let routes = match &server.vertex {
        Some(vertex) => {
            let targets = layered(app, routes.clone()).with_state(app.clone());
            let routes = routes.merge(predict::router(&vertex.predict, targets, posts.iter().map(String::as_str)));
            match &vertex.health {
                Some(path) => routes.merge(health::router_at(path)),
                None => routes,
            }
        }
        None => routes,
    };
    prefix::below(&server.prefix, layered(app, routes).with_state(app.clone()))
}

/// Adds the shared middleware to routes.
fn layered(app: &App, routes: Router<App>) -> Router<App> {
    let server = &app.config().server;
    routes
        .fallback(unknown_path)
        .method_not_allowed_fallback(unknown_method)
        .layer(DefaultBodyLimit::max(server.max_body_bytes))
        .layer(RequestDecompressionLayer::new())
        .layer(CompressionLayer::new())
        .layer(from_fn_with_state(app.clone(), rates::limit))
        .layer(from_fn_with_state(app.clone(), security::guard))
        .layer(security::cors(&server.security))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(SetResponseHeaderLayer::if_not_present(
            header::X_CONTENT_TYPE_OPTIONS,
            HeaderValue::from_static("nosniff"),
        ))
        .layer(SetResponseHeaderLayer::if_not_present(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")))
        .layer(SetResponseHeaderLayer::if_not_present(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")))
        .layer(from_fn(identify))
}

/// Assigns a request id, the client's own if it is valid, and returns it with the response.
async fn identify(request: Request, next: Next) -> Response {
    let sent = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let id = match sent.filter(|id| (1..=128).contains(&id.len())) {
        Some(id) => id.to_owned(),
        None => Uuid::now_v7().to_string(),
    };
    let mut response = with_request_id(id.clone(), next.run(request)).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

async fn unknown_path(app: Shared<App>, request: Request) -> Response {
    let path = request.uri().path();
    if security::wants_page(&request) {
        return ui::not_found(app, request.headers().clone(), request.uri().clone()).await;
    }
    security::in_dialect(path, ApiError::new(ErrorKind::NotFound, format!("no route exists at {path}")))
}

async fn unknown_method(request: Request) -> Response {
    let path = request.uri().path();
    let detail = format!("{path} does not accept {}", request.method());
    security::in_dialect(path, ApiError::new(ErrorKind::MethodNotAllowed, detail))
}

#[expect(clippy::needless_pass_by_value, reason = "the layer hands the panic over")]
fn panicked(panic: Box<dyn std::any::Any + Send>) -> Response {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    axum::response::IntoResponse::into_response(ApiError::internal(format!("a handler panicked: {message}")))
}
