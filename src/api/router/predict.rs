//! Vertex AI's predictions: one body with several requests to any routes, which run concurrently.

use crate::api::shared;
use crate::api::shared::error::{LlamaError, LlamaErrorResponse};
use crate::api::shared::fields::{Fields, abbreviate, invalid_value};
use crate::config::VertexConfig;
use crate::server::{ApiError, App};
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, Uri, header};
use axum::middleware::map_request;
use axum::routing::post;
use axum::{Json, Router};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::sync::Arc;
use tower::ServiceExt;

/// Maximum number of instances in a request.
const MAX_INSTANCES: usize = 128;

/// Path of predictions; [`with_configured_paths`] adds the configured one.
const PATH: &str = "/predict";

/// Routes that stream unless `stream` is false.
const STREAMED_BY_DEFAULT: [&str; 2] = ["/api/chat", "/api/generate"];

/// The routes that instances can name.
#[derive(Clone)]
struct Targets {
    routes: Router,
    /// Paths, by their names in `@requestFormat`.
    paths: Arc<HashMap<String, String>>,
}

/// The responses to the instances, in order.
#[derive(Debug, Serialize)]
struct PredictionsResponse {
    predictions: Vec<Prediction>,
}

/// The response to an instance.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Prediction {
    Json(Box<RawValue>),
    /// A body that is not JSON.
    Text(String),
    Error(LlamaErrorResponse),
}

/// Returns the route of predictions, which sends instances to `routes`; `paths` are the paths that accept `POST`.
pub(super) fn router<'a>(routes: Router, paths: impl Iterator<Item = &'a str>) -> Router<App> {
    let mut named = HashMap::new();
    for target in paths {
        named.entry(format_name(target)).or_insert_with(|| target.to_owned());
        named.insert(target.to_owned(), target.to_owned());
    }
    let targets = Targets { routes, paths: Arc::new(named) };
    Router::new().route(PATH, post(move |request: Request| predict(targets.clone(), request)))
}

/// Serves predictions and health at the configured paths, instead of other routes with the same path and method. The paths
/// are not patterns of routes, because they may contain braces or equal an existing route. The access log and `/metrics`
/// show the route that serves a request, like the patterns of other routes.
pub(super) fn with_configured_paths(config: VertexConfig, routes: Router) -> Router {
    let map = move |mut request: Request| {
        let path = request.uri().path();
        let target = match *request.method() {
            Method::POST if path == config.predict => Some(PATH),
            Method::GET | Method::HEAD if config.health.as_deref() == Some(path) => Some("/health"),
            _ => None,
        };
        if let Some(target) = target {
            let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
            if let Ok(uri) = format!("{target}{query}").parse() {
                *request.uri_mut() = uri;
            }
        }
        std::future::ready(request)
    };
    Router::new().fallback_service(routes).layer(map_request(map))
}

async fn predict(targets: Targets, request: Request) -> Result<Json<PredictionsResponse>, LlamaError> {
    let (head, body) = request.into_parts();
    let body = Bytes::from_request(Request::from_parts(head.clone(), body), &()).await.map_err(ApiError::from)?;
    let body = shared::parse_json(&body)?;
    let expected = format!("a list of at most {MAX_INSTANCES} requests, each with @requestFormat");
    let instances = match Fields::new(&body)?.list("instances")? {
        Some(list) if list.len() <= MAX_INSTANCES => list,
        Some(list) => {
            let detail = format!("`instances` must be {expected}, got {}", list.len());
            return Err(ApiError::invalid("instances", detail).into());
        }
        None => return Err(ApiError::invalid("instances", format!("`instances` is missing; send {expected}")).into()),
    };
    let answers = instances.iter().enumerate().map(|(index, instance)| targets.answer(&head, index, instance));
    Ok(Json(PredictionsResponse { predictions: futures::future::join_all(answers).await }))
}

impl Targets {
    /// Runs an instance and returns its response or error.
    async fn answer(&self, head: &Parts, index: usize, instance: &Value) -> Prediction {
        let request = match self.request(head, index, instance) {
            Ok(request) => request,
            Err(error) => return Prediction::Error(error.llama()),
        };
        let Ok(response) = self.routes.clone().oneshot(request).await;
        match axum::body::to_bytes(response.into_body(), usize::MAX).await {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(body) => Prediction::Json(body),
                Err(_) => Prediction::Text(String::from_utf8_lossy(&bytes).into_owned()),
            },
            Err(error) => Prediction::Error(ApiError::internal(error).llama()),
        }
    }

    fn request(&self, head: &Parts, index: usize, instance: &Value) -> Result<Request, ApiError> {
        const FORMAT: &str = "@requestFormat";
        let field = format!("instances[{index}]");
        let mut fields = instance.as_object().cloned().ok_or_else(|| invalid_value(&field, "an object", instance))?;
        let format = fields.remove(FORMAT).unwrap_or_default();
        let path = format.as_str().and_then(|name| self.paths.get(name)).ok_or_else(|| {
            let field = format!("{field}.{FORMAT}");
            let detail = format!(
                "`{field}` must be the path of a route or its name, such as \"chatCompletions\", got {}",
                abbreviate(&format)
            );
            ApiError::invalid(field, detail)
        })?;
        // The response contains all instances, so streaming is disabled.
        if fields.contains_key("stream") || STREAMED_BY_DEFAULT.contains(&path.as_str()) {
            fields.insert("stream".to_owned(), false.into());
        }
        let mut request = Request::new(Body::from(Value::Object(fields).to_string()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = path.parse::<Uri>().map_err(ApiError::internal)?;
        *request.extensions_mut() = head.extensions.clone();
        let headers = request.headers_mut();
        headers.extend(head.headers.iter().map(|(name, value)| (name.clone(), value.clone())));
        for name in [
            header::CONTENT_LENGTH,
            header::CONTENT_ENCODING,
            header::TRANSFER_ENCODING,
            header::ACCEPT_ENCODING,
            header::EXPECT,
        ] {
            headers.remove(name);
        }
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(request)
    }
}

/// Returns the name of a path in `@requestFormat`: `/v1/chat/completions` is `chatCompletions`.
fn format_name(path: &str) -> String {
    let path = path.strip_prefix("/v1").unwrap_or(path);
    let words = path.split(['/', '-', '_']).filter(|word| !word.is_empty());
    let mut name = String::new();
    for word in words {
        let mut letters = word.chars();
        match letters.next() {
            Some(first) if !name.is_empty() => name.extend(first.to_uppercase()),
            Some(first) => name.push(first),
            None => {}
        }
        name.push_str(letters.as_str());
    }
    name
}

#[cfg(test)]
mod tests {
    use super::{Body, Method, Request, Router, ServiceExt, Uri, VertexConfig, format_name, with_configured_paths};
    use axum::routing::get;

    #[tokio::test]
    async fn configured_paths_keep_query_and_accept_head() {
        let routes = Router::new().route("/health", get(|uri: Uri| std::future::ready(uri.to_string())));
        let config = VertexConfig { predict: "/p".to_owned(), health: Some("/alive".to_owned()) };
        let routes = with_configured_paths(config, routes);
        let send = |method: Method| {
            let request = Request::builder().method(method).uri("http://localhost/alive?a=%7Bb").body(Body::empty());
            routes.clone().oneshot(request.unwrap())
        };
        let body = axum::body::to_bytes(send(Method::GET).await.unwrap().into_body(), usize::MAX).await.unwrap();
        assert_eq!(body, "/health?a=%7Bb");
        assert_eq!(send(Method::HEAD).await.unwrap().status(), 200);
        assert_eq!(send(Method::POST).await.unwrap().status(), 404);
    }

    #[test]
    fn format_name_is_camel_case() {
        for (path, name) in [
            ("/v1/chat/completions", "chatCompletions"),
            ("/apply-template", "applyTemplate"),
            ("/v1/chat/completions/input_tokens", "chatCompletionsInputTokens"),
            ("/completion", "completion"),
        ] {
            assert_eq!(format_name(path), name);
        }
    }
}
