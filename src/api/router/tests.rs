use super::*;
use crate::config::flags::{DataFlags, EngineFlags, default_flags};
use crate::config::{Config, KeyHash, VertexConfig};
use crate::mods::ModRegistry;
use axum::body::{Body, to_bytes};
use axum::extract::ConnectInfo;
use axum::http::{Method, StatusCode};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tower::ServiceExt;

/// Returns the state of a server without a model. With `key` it requires an API key.
fn app(key: Option<&str>) -> App {
    app_with(|config| config.server.credentials.security.keys = key.map(KeyHash::new).into_iter().collect())
}

/// Returns the state of a server without a model, with a changed configuration.
fn app_with(change: impl FnOnce(&mut Config)) -> App {
    let data = DataFlags { data_dir: Some(std::env::temp_dir()), ..default_flags() };
    let engine = EngineFlags { parallel: Some(1), batch_size: 1, ubatch_size: 1, ..default_flags() };
    let mut config = Config::new(engine, data, &default_flags()).unwrap();
    change(&mut config);
    App::new(Arc::new(config), Arc::new(ModRegistry::default()), chrono::DateTime::default)
}

const CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1);

async fn send(routes: &Router, method: Method, path: &str, headers: &[(&str, &str)]) -> (StatusCode, String) {
    let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut request = request.body(Body::empty()).unwrap();
    request.extensions_mut().insert(ConnectInfo(CLIENT));
    let response = routes.clone().oneshot(request).await.unwrap();
    let status = response.status();
    (status, String::from_utf8(to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec()).unwrap())
}

const MISSING_KEY: &str =
    "an API key is required, sent as 'Authorization: Bearer KEY', 'X-Api-Key: KEY' or 'X-User-Api-Key: KEY'";

#[tokio::test]
async fn server_without_the_dashboard_has_no_pages() {
    let app = app_with(|config| {
        config.server.dashboard = false;
        config.server.credentials.security.keys = vec![KeyHash::new("secret")];
    });
    let routes = router(&app, &crate::ui::pages());
    for path in ["/", "/login", "/runs"] {
        for (key, expected) in [("", StatusCode::UNAUTHORIZED), ("secret", StatusCode::NOT_FOUND)] {
            let headers = [("accept", "text/html"), ("x-api-key", key)];
            let (status, body) = send(&routes, Method::GET, path, &headers).await;
            assert_eq!((status, body.contains("<html")), (expected, false), "{path} {key:?}: {body}");
        }
    }
}

/// Returns a path that matches a route's pattern.
fn concrete(pattern: &str) -> String {
    pattern.split('/').map(|part| if part.starts_with('{') { "x" } else { part }).collect::<Vec<_>>().join("/")
}

/// Returns the body of an error, without its request id.
async fn rendered(format: ErrorFormat, error: ApiError) -> String {
    let body = to_bytes(format(error).into_body(), usize::MAX).await.unwrap();
    without_id(std::str::from_utf8(&body).unwrap())
}

/// Returns the body without the request id, which differs in every response.
fn without_id(body: &str) -> String {
    let mut value: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    if let Some(fields) = value.as_object_mut() {
        fields.remove("request_id");
    }
    value.to_string()
}

#[tokio::test]
async fn every_route_has_its_access_class_and_its_error_format() {
    let app = app(Some("secret"));
    let routes = router(&app, &crate::ui::pages());
    let mut checked = 0;
    for RouteGroup { access, format, routes: group } in protocols().into_iter().flat_map(Protocol::into_groups) {
        let (_, described) = group.split_for_parts();
        for (pattern, item) in described.paths.paths {
            let methods = [
                (Method::GET, item.get.is_some()),
                (Method::POST, item.post.is_some()),
                (Method::PUT, item.put.is_some()),
                (Method::DELETE, item.delete.is_some()),
            ];
            let path = concrete(&pattern);
            for (method, _) in methods.into_iter().filter(|(_, exists)| *exists) {
                checked += 1;
                let expected = rendered(format, ApiError::new(ErrorKind::Unauthorized, MISSING_KEY)).await;
                let (status, body) = send(&routes, method.clone(), &path, &[]).await;
                if matches!(access, Access::Public | Access::OptionalKey) {
                    assert_ne!(status, StatusCode::UNAUTHORIZED, "{method} {path}");
                } else {
                    assert_eq!((status, without_id(&body)), (StatusCode::UNAUTHORIZED, expected), "{method} {path}");
                }
                let foreign = [("origin", "http://evil.example"), ("upgrade", "websocket")];
                let (status, body) = send(&routes, method.clone(), &path, &foreign).await;
                let detail = "a page of http://evil.example may not send this request; start the server with \
                              --cors-origin to allow it";
                let expected = rendered(format, ApiError::new(ErrorKind::Forbidden, detail)).await;
                assert_eq!((status, without_id(&body)), (StatusCode::FORBIDDEN, expected), "{method} {path}");
            }
            let (status, body) = send(&routes, Method::PATCH, &path, &[("authorization", "Bearer secret")]).await;
            let error = ApiError::new(ErrorKind::MethodNotAllowed, format!("{path} does not accept PATCH"));
            let expected = rendered(format, error).await;
            assert_eq!((status, without_id(&body)), (StatusCode::METHOD_NOT_ALLOWED, expected), "PATCH {path}");
        }
    }
    assert!(checked > 60, "{checked}");
}

#[tokio::test]
async fn discovery_of_koboldcpp_reveals_no_model_without_key() {
    let routes = router(&app(Some("secret")), &crate::ui::pages());
    for path in ["/api/v1/model", "/api/latest/model"] {
        let protected = r#"{"result":"koboldcpp/protected-model"}"#.to_owned();
        assert_eq!(send(&routes, Method::GET, path, &[]).await, (StatusCode::OK, protected));
        let (status, _) = send(&routes, Method::GET, path, &[("authorization", "Bearer wrong")]).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
        let (status, _) = send(&routes, Method::GET, path, &[("authorization", "Bearer secret")]).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "no model is loaded");
    }
    let (status, version) = send(&routes, Method::GET, "/api/extra/version", &[]).await;
    assert!(status == StatusCode::OK && version.contains(r#""protected":true"#), "{version}");
}

#[tokio::test]
async fn configured_paths_of_vertex_replace_other_routes() {
    for (predict, health) in [
        ("/generate", "/healthz"),
        ("/v1/chat/completions", "/v1/health"),
        ("/v1/models", "/v1/models"),
        ("/predict", "/health"),
        ("/:predict/{x}", "/{x}/:y"),
    ] {
        let config = VertexConfig { predict: predict.to_owned(), health: Some(health.to_owned()) };
        let app = app_with(|changed| changed.server.vertex = Some(config));
        let routes = router(&app, &crate::ui::pages());
        let (_, body) = send(&routes, Method::GET, health, &[]).await;
        assert!(body.contains(r#""server":"thunder""#), "GET {health}: {body}");
        let request = Request::post(predict).header("host", "localhost").extension(ConnectInfo(CLIENT));
        let response = routes.clone().oneshot(request.body(Body::from("{}")).unwrap()).await.unwrap();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let body = String::from_utf8_lossy(&body);
        assert!(body.contains("`instances` is missing"), "POST {predict}: {body}");
        let (status, _) = send(&routes, Method::GET, "/v1/mods", &[]).await;
        assert_eq!(status, StatusCode::OK);
    }
}

#[tokio::test]
async fn unknown_path_gets_the_error_format_of_its_prefix() {
    let routes = router(&app(None), &crate::ui::pages());
    for (path, expected) in [
        ("/v1/x", r#"{"error":{"message""#),
        ("/v1/messages/x/y", r#"{"type":"error","error":{"#),
        ("/v1/mods/a/b/c", r#"{"type":"/problems/not-found""#),
        ("/v1/slots/1/x", r#"{"error":{"code":404"#),
        ("/api/x", r#"{"type":"/problems/not-found""#),
        ("/api/extra/x", r#"{"detail":{"msg""#),
        ("/docs/a/b", r#"{"type":"/problems/not-found""#),
        ("/x", r#"{"error":{"code":404"#),
    ] {
        let (status, body) = send(&routes, Method::GET, path, &[]).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{path}");
        assert!(body.starts_with(expected), "{path}: {body}");
    }
    let (status, body) = send(&routes, Method::GET, "/v1/x", &[("accept", "text/html")]).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(body.starts_with("<!doctype html>"), "{body}");
}
