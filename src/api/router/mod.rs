//! Combines the protocols: their routes with the shared middleware, the paths that two protocols share, and the
//! `OpenAPI` and `AsyncAPI` documents.

mod asyncapi;
mod generate;
mod openapi;
mod predict;
#[cfg(test)]
mod tests;

use super::shared::error::{LlamaError, OpenAiError};
use super::shared::sse::NO_BUFFERING;
use super::{anthropic, attention, health, ingest, kobold, llama, mods, native, ollama, openai, responses, stream};
use crate::server::access_log::log_request;
use crate::server::auth::{self, Guard};
use crate::server::{
    Access, ApiError, App, ErrorFormat, ErrorFormats, ErrorKind, Pages, Protocol, RouteGroup, login, prefix,
};
use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, Version, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{DefaultPredicate, Predicate};
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::set_header::SetResponseHeaderLayer;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

#[derive(OpenApi)]
#[openapi(info(
    title = "Thunder",
    description = "Runs, their events, and the actions of mods. Errors are RFC 9457 problems, except on the routes of \
                   another API, such as OpenAI's or llama-server's, which use that API's format."
))]
struct Document;

/// Returns the protocols that the `OpenAPI` document describes.
fn protocols() -> Vec<Protocol> {
    let genkeys = kobold::Genkeys::default();
    let mut protocols = vec![
        ingest::protocol(),
        native::protocol(),
        mods::protocol(),
        openai::protocol(),
        anthropic::protocol(),
        ollama::protocol(),
        responses::protocol(),
        llama::protocol(),
        llama::openai_protocol(),
        attention::protocol(),
        kobold::protocol(&genkeys),
        generate::protocol(genkeys),
        shared_models(),
    ];
    protocols.extend(health::protocols());
    protocols.extend(stream::protocols());
    protocols
}

/// Returns the routes of `/models`: `GET` of OpenAI's API, `POST` and `DELETE` of llama-server's.
fn shared_models() -> Protocol {
    let routes = openai::models_router().merge(llama::models_router());
    Protocol::new(OpenAiError::render, &[]).routes(Access::Key, routes)
}

/// Returns all routes of the APIs and of the dashboard with the shared middleware.
pub fn router(app: &App, pages: &Pages) -> Router {
    let server = &app.config().server;
    let mut protocols = protocols();
    // Only a user of the dashboard logs in.
    let pages = server.dashboard.then_some(pages);
    protocols.extend(pages.map(|pages| login::protocol(pages.login)));
    let description = describe(&protocols);
    let posts = post_paths(&description);
    let document = openapi::document(description, &server.prefix);
    // The document does not describe these.
    protocols.push(documents(document.clone(), asyncapi::document(&server.prefix)));
    protocols.extend(pages.map(|pages| (pages.protocol)(document)));
    let formats = ErrorFormats::new(&protocols, LlamaError::render);
    let not_found = pages.map(|pages| pages.not_found);
    let unknown = {
        let formats = formats.clone();
        move |request: Request| std::future::ready(unknown_path(&formats, not_found, &request))
    };
    let guard = Guard::new(app, Access::Key, formats);
    let mut routes = with_access_layers(&guard, Router::new().fallback(unknown));
    for RouteGroup { access, format, routes: group } in protocols.into_iter().flat_map(Protocol::into_groups) {
        routes = routes.merge(group_routes(app, access, format, group.into()));
    }
    if server.vertex.is_some() {
        let targets = with_headers(app, routes.clone()).with_state(app.clone());
        let predict = predict::router(targets, posts.iter().map(String::as_str));
        routes = routes.merge(group_routes(app, Access::Key, LlamaError::render, predict));
    }
    let routes = with_headers(app, routes).layer(from_fn_with_state(app.clone(), log_request));
    let mut routes = routes.with_state(app.clone());
    if let Some(vertex) = &server.vertex {
        routes = predict::with_configured_paths(vertex.clone(), routes);
    }
    prefix::nest(&server.prefix, routes)
}

/// Returns the description of the protocols' routes.
fn describe(protocols: &[Protocol]) -> utoipa::openapi::OpenApi {
    let mut description = Document::openapi();
    for group in protocols.iter().flat_map(Protocol::groups) {
        description.merge(group.routes.get_openapi().clone());
    }
    description
}

/// Returns the paths without parameters that accept `POST`.
fn post_paths(description: &utoipa::openapi::OpenApi) -> Vec<String> {
    let paths = description.paths.paths.iter().filter(|(path, item)| item.post.is_some() && !path.contains('{'));
    paths.map(|(path, _)| path.clone()).collect()
}

/// Returns the routes that serve the documents.
fn documents(openapi: Bytes, asyncapi: Bytes) -> Protocol {
    let json = |body: Bytes| get(move || std::future::ready(([(header::CONTENT_TYPE, "application/json")], body)));
    let routes = Router::new().route(openapi::PATH, json(openapi)).route(asyncapi::PATH, json(asyncapi));
    Protocol::native(&[]).routes(Access::Key, OpenApiRouter::from(routes))
}

/// Adds the access checks and the error format of a group to its routes.
fn group_routes(app: &App, access: Access, format: ErrorFormat, routes: Router<App>) -> Router<App> {
    let unknown_method = move |request: Request| {
        let detail = format!("{} does not accept {}", request.uri().path(), request.method());
        std::future::ready(format(ApiError::new(ErrorKind::MethodNotAllowed, detail)))
    };
    with_access_layers(&Guard::new(app, access, format), routes.method_not_allowed_fallback(unknown_method))
}

/// Adds the middleware that depends on the access class and the error format.
fn with_access_layers(guard: &Guard, routes: Router<App>) -> Router<App> {
    routes
        .layer(DefaultBodyLimit::max(guard.app().config().server.max_body_bytes))
        .layer(RequestDecompressionLayer::new())
        .layer(CompressionLayer::new().compress_when(DefaultPredicate::new().and(may_be_buffered)))
        .layer(from_fn_with_state(guard.clone(), auth::limit_runs))
        .layer(from_fn_with_state(guard.clone(), check_encoding))
        .layer(from_fn_with_state(guard.clone(), auth::guard))
}

/// Rejects bodies with an encoding that the decompression layer does not support; that layer would answer without an
/// error in the protocol's format.
async fn check_encoding(State(guard): State<Guard>, mut request: Request, next: Next) -> Response {
    if let Some(sent) = request.headers_mut().get_mut(header::CONTENT_ENCODING) {
        let supported = ["gzip", "zstd", "identity"];
        let Some(name) = supported.into_iter().find(|name| sent.as_bytes().eq_ignore_ascii_case(name.as_bytes()))
        else {
            let detail = format!("the header Content-Encoding must be gzip, zstd or identity, got {sent:?}");
            let response = guard.format(request.uri().path())(ApiError::new(ErrorKind::UnsupportedMediaType, detail));
            return ([(header::ACCEPT_ENCODING, "gzip, zstd")], response).into_response();
        };
        // The layer expects the name in lower case.
        *sent = HeaderValue::from_static(name);
    }
    next.run(request).await
}

/// Returns false for a stream of lines, which a compressor would hold back. The default predicate excludes server-sent
/// events.
fn may_be_buffered(_: StatusCode, _: Version, headers: &HeaderMap, _: &Extensions) -> bool {
    !headers.contains_key(NO_BUFFERING.0)
}

/// Adds the headers of all responses, and turns panics into errors.
fn with_headers(app: &App, routes: Router<App>) -> Router<App> {
    routes
        .layer(auth::cors(&app.credentials().security))
        .layer(CatchPanicLayer::custom(panic_response))
        .layer(SetResponseHeaderLayer::if_not_present(
            header::X_CONTENT_TYPE_OPTIONS,
            HeaderValue::from_static("nosniff"),
        ))
        .layer(SetResponseHeaderLayer::if_not_present(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")))
        .layer(SetResponseHeaderLayer::if_not_present(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")))
}

/// Returns the response for a path without a route: a page for a browser, otherwise an error in the format of the
/// protocol whose paths have the same prefix.
fn unknown_path(
    formats: &ErrorFormats,
    not_found: Option<fn(&HeaderMap, &axum::http::Uri) -> Response>,
    request: &Request,
) -> Response {
    if let Some(not_found) = not_found.filter(|_| auth::is_page_request(request)) {
        return not_found(request.headers(), request.uri());
    }
    let path = request.uri().path();
    formats.for_path(path)(ApiError::new(ErrorKind::NotFound, format!("no route exists at {path}")))
}

/// Returns the response for a handler that panicked.
#[expect(clippy::needless_pass_by_value, reason = "the layer passes the panic by value")]
fn panic_response(panic: Box<dyn std::any::Any + Send>) -> Response {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    ApiError::internal(format!("a handler panicked: {message}")).into_response()
}
