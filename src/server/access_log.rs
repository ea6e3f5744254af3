//! Request ids and the access log. After the last byte of each response, one log line and one measurement for
//! `/metrics` are written.

use super::error::RUN_ID;
use super::{App, with_request_id};
use crate::events::{RunId, system};
use axum::body::{Body, Bytes};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Instant;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum length of a client's request id.
const MAX_REQUEST_ID: usize = 128;

/// Logged status if the client disconnected before the response began, as in nginx.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Logged route of requests to unknown paths.
const NO_ROUTE: &str = "other";

/// Routes of health checks.
const HEALTH: [&str; 3] = ["/healthz", "/health", "/v1/health"];

tokio::task_local! {
    /// First run that the current request has started.
    static STARTED_RUN: Arc<OnceLock<RunId>>;
}

/// Notes a run that the current request has started. The log has it even if the client disconnects before the response.
pub(crate) fn note_started_run(run: RunId) {
    // Fails for a further run, and outside of a request.
    let _ = STARTED_RUN.try_with(|started| started.set(run));
}

/// Label of the caller's key; an extension of the response.
#[derive(Debug, Clone)]
pub(super) struct KeyLabel(pub(super) String);

/// Returns the request id that the client sent: 1 to 128 printable ASCII characters without spaces.
pub(crate) fn client_request_id(headers: &HeaderMap) -> Option<&str> {
    let sent = headers.get(REQUEST_ID)?.to_str().ok()?;
    let is_valid = (1..=MAX_REQUEST_ID).contains(&sent.len()) && sent.bytes().all(|byte| byte.is_ascii_graphic());
    is_valid.then_some(sent)
}

/// Assigns a request id (the client's own if it is valid), returns it in the response, and logs the request after the
/// response.
pub(crate) async fn log_request(State(app): State<App>, request: Request, next: Next) -> Response {
    let id = client_request_id(request.headers()).map_or_else(|| system::new_id().to_string(), str::to_owned);
    let mut record = AccessRecord {
        started_at: Instant::now(),
        method: method_name(request.method()),
        route: route(&app, &request),
        request_id: id.clone(),
        app,
        status: None,
        key: None,
        run_id: None,
        started_run: Arc::default(),
        is_complete: request.method() == Method::HEAD,
    };
    let started_run = Arc::clone(&record.started_run);
    let mut response = STARTED_RUN.scope(started_run, with_request_id(id.clone(), next.run(request))).await;
    record.status = Some(response.status().as_u16());
    record.key = response.extensions_mut().remove::<KeyLabel>().map(|KeyLabel(label)| label);
    record.run_id = response.headers().get(RUN_ID).and_then(|id| Some(id.to_str().ok()?.to_owned()));
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response.map(|body| Body::new(LoggedBody { body, record }))
}

/// Returns the template of the request's route, without `--api-prefix`.
fn route(app: &App, request: &Request) -> String {
    let Some(matched) = request.extensions().get::<MatchedPath>() else { return NO_ROUTE.to_owned() };
    let path = matched.as_str();
    path.strip_prefix(app.config().server.prefix.as_str()).unwrap_or(path).to_owned()
}

fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

/// A request that is logged on drop.
struct AccessRecord {
    app: App,
    started_at: Instant,
    method: &'static str,
    route: String,
    request_id: String,
    /// `None` until the response begins.
    status: Option<u16>,
    key: Option<String>,
    /// Run of the response.
    run_id: Option<String>,
    /// First run that the request has started, for a client that disconnects before the response.
    started_run: Arc<OnceLock<RunId>>,
    /// True after the end of the response.
    is_complete: bool,
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        let elapsed = self.started_at.elapsed();
        let status = self.status.unwrap_or(CLIENT_CLOSED_REQUEST);
        let run_id = self.run_id.take().or_else(|| self.started_run.get().map(RunId::to_string));
        self.app.requests().add(&self.route, self.method, status, elapsed);
        macro_rules! log {
            ($level:ident) => {
                tracing::$level!(
                    target: "thunder::access",
                    method = self.method,
                    route = self.route,
                    status,
                    elapsed_ms = elapsed.as_micros() as f64 / 1000.0,
                    key = self.key.as_deref(),
                    run_id = run_id.as_deref(),
                    request_id = self.request_id,
                    complete = self.is_complete,
                    "request"
                )
            };
        }
        // Monitors request the health every few seconds.
        if HEALTH.contains(&&*self.route) && status == 200 { log!(debug) } else { log!(info) }
    }
}

/// A response body that logs its request at the end, or when the client disconnects.
struct LoggedBody {
    body: Body,
    record: AccessRecord,
}

impl HttpBody for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        self.record.is_complete |= matches!(polled, Poll::Ready(None));
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for LoggedBody {
    fn drop(&mut self) {
        self.record.is_complete |= self.body.is_end_stream();
    }
}

#[cfg(test)]
mod tests {
    use super::client_request_id;
    use axum::http::{HeaderMap, HeaderValue};

    #[test]
    fn request_ids_with_spaces_or_beyond_the_maximum_length_are_ignored() {
        let id_of = |value: &str| {
            let headers = HeaderMap::from_iter([(super::REQUEST_ID, HeaderValue::from_str(value).unwrap())]);
            client_request_id(&headers).map(str::to_owned)
        };
        let longest = "x".repeat(128);
        for valid in ["a", "req/1:2-3", &longest] {
            assert_eq!(id_of(valid).as_deref(), Some(valid));
        }
        for invalid in ["", "a b", "a\tb", &format!("{longest}x")] {
            assert_eq!(id_of(invalid), None, "{invalid:?}");
        }
    }
}
