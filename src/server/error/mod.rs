//! The error type of all HTTP APIs. Only this type maps errors to status codes.
//!
//! Handlers return [`ApiError`], which is rendered as `application/problem+json`. A protocol with its own error format
//! wraps it in a newtype, such as `OpenAiError` or `LlamaError`. The cause of a 500 is logged once, here, and the
//! client receives the request id to find it in the log.

mod code;
mod deserialization;
mod kind;
mod store;

pub use code::ErrorCode;
pub use kind::ErrorKind;

use self::deserialization::Failure;
use crate::events::RunId;
use axum::extract::Query;
use axum::extract::path::ErrorKind as PathErrorKind;
use axum::extract::rejection::{BytesRejection, JsonRejection, PathRejection, QueryRejection};
use axum::http::{HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::fmt::Display;
use utoipa::ToSchema;

/// Header with the id of a response's run.
pub(super) const RUN_ID: HeaderName = HeaderName::from_static(RunId::HEADER);

tokio::task_local! {
    /// Id of the current request.
    static REQUEST_ID: String;
}

/// Runs a request's handler with the request id that its errors report.
pub async fn with_request_id<F: Future>(id: String, request: F) -> F::Output {
    REQUEST_ID.scope(id, request).await
}

/// Returns the id of the current request, if any.
#[must_use]
pub fn request_id() -> Option<String> {
    REQUEST_ID.try_with(Clone::clone).ok()
}

/// Returns the innermost cause of an error, which names the reason of a failed connection.
#[must_use]
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// An error of an HTTP API.
#[derive(Debug, Clone)]
pub struct ApiError {
    kind: ErrorKind,
    detail: String,
    pointer: Option<Box<str>>,
    /// True if `pointer` is the client's name of the field.
    has_client_name: bool,
    did_you_mean: Option<Box<str>>,
    retry_after_s: Option<u64>,
    code: Option<ErrorCode>,
    /// Tokens of a prompt that does not fit, and size of the context.
    exceeded: Option<(u32, u32)>,
    /// Context size at which memory ran out.
    context: Option<u32>,
    /// The run that failed.
    run: Option<Box<RunId>>,
}

/// An error in the format of RFC 9457.
#[derive(Debug, Serialize, ToSchema)]
pub struct Problem {
    /// `/problems/` and the kind of error, e.g. `/problems/not-found`.
    pub r#type: String,
    /// Title of the HTTP status.
    pub title: &'static str,
    /// HTTP status.
    pub status: u16,
    /// Cause of the error, and the expected value.
    pub detail: String,
    /// The invalid field or position, e.g. `$.events[3].step` or `max_tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pointer: Option<String>,
    /// An existing name similar to the unknown one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub did_you_mean: Option<String>,
    /// Id of this request in the server's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

impl ApiError {
    /// Creates an error. `detail` names the subject, the expected value and the value received.
    pub fn new(kind: ErrorKind, detail: impl Into<String>) -> Self {
        Self {
            kind,
            detail: detail.into(),
            pointer: None,
            has_client_name: false,
            did_you_mean: None,
            retry_after_s: None,
            code: None,
            exceeded: None,
            context: None,
            run: None,
        }
    }

    /// Creates a 400 error for an invalid request.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::BadRequest, detail)
    }

    /// Creates a 400 error for one invalid field.
    pub fn invalid(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::BadRequest, detail).at(pointer)
    }

    /// Creates a 404 error, e.g. `ApiError::not_found("run", id)`.
    pub fn not_found(kind: &str, name: impl Display) -> Self {
        Self::new(ErrorKind::NotFound, format!("no {kind} '{name}' exists"))
    }

    /// Creates a 409 error for a conflict with existing state.
    pub fn conflict(detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::Conflict, detail)
    }

    /// Creates a 501 error; `detail` states what the feature requires.
    pub fn not_supported(detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotSupported, detail)
    }

    /// Creates a 503 error for a part of the server that is not ready.
    pub fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, detail)
    }

    /// Creates a 500 error. `cause` is logged when the error is rendered, and never sent.
    pub fn internal(cause: impl Display) -> Self {
        Self::new(ErrorKind::Internal, format!("{cause:#}"))
    }

    /// Sets the invalid field or position.
    #[must_use]
    pub fn at(mut self, pointer: impl Into<String>) -> Self {
        self.pointer = Some(pointer.into().into_boxed_str());
        self
    }

    /// Marks the invalid field as named like in the client's body, so [`Self::rename_field`] has no effect.
    #[must_use]
    pub const fn with_client_name(mut self) -> Self {
        self.has_client_name = true;
        self
    }

    /// Sets an existing name that is similar to the unknown one.
    #[must_use]
    pub fn did_you_mean(mut self, name: Option<impl Into<String>>) -> Self {
        self.did_you_mean = name.map(|name| name.into().into_boxed_str());
        self
    }

    /// Sets the delay in seconds after which the client should retry.
    #[must_use]
    pub const fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after_s = Some(seconds);
        self
    }

    /// Sets the machine-readable code.
    #[must_use]
    pub const fn code(mut self, code: ErrorCode) -> Self {
        self.code = Some(code);
        self
    }

    /// Marks a prompt that has more tokens than the context.
    #[must_use]
    pub const fn exceeds_context(mut self, prompt_tokens: usize, context: usize) -> Self {
        self.exceeded = Some((prompt_tokens as u32, context as u32));
        self.code(ErrorCode::ContextLengthExceeded)
    }

    /// Sets the context size at which memory ran out.
    #[must_use]
    pub const fn at_context(mut self, tokens: u32) -> Self {
        self.context = Some(tokens);
        self
    }

    /// Sets the run that failed. The response has its id in a header, because failed runs are recorded too.
    #[must_use]
    pub fn in_run(mut self, run: RunId) -> Self {
        self.run = Some(Box::new(run));
        self
    }

    /// Returns the invalid field or position.
    #[must_use]
    pub fn pointer(&self) -> Option<&str> {
        self.pointer.as_deref()
    }

    /// Returns the delay in seconds after which the client should retry.
    #[must_use]
    pub const fn retry_after_s(&self) -> Option<u64> {
        self.retry_after_s
    }

    /// Returns the machine-readable code.
    #[must_use]
    pub const fn error_code(&self) -> Option<ErrorCode> {
        self.code
    }

    /// Returns the tokens of a prompt that does not fit, and the size of the context.
    #[must_use]
    pub const fn exceeded(&self) -> Option<(u32, u32)> {
        self.exceeded
    }

    /// Returns the context size at which memory ran out.
    #[must_use]
    pub const fn context(&self) -> Option<u32> {
        self.context
    }

    /// Replaces the name of the invalid field by the client's.
    #[must_use]
    pub fn rename_field(mut self, name: &str) -> Self {
        if self.has_client_name {
            return self;
        }
        self.has_client_name = true;
        if let Some(pointer) = self.pointer.replace(name.into()) {
            self.detail = self.detail.replace(&format!("`{pointer}`"), &format!("`{name}`"));
        }
        self
    }

    /// Returns the kind of the error.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the HTTP status.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        self.kind.status()
    }

    /// Prepends a text to the detail.
    #[must_use]
    pub(crate) fn prefixed(mut self, text: &str) -> Self {
        self.detail.insert_str(0, text);
        self
    }

    /// Returns the detail with the cause of an internal error. Only for the log.
    pub(crate) fn log_detail(&self) -> &str {
        &self.detail
    }

    /// Returns the detail to send or to store. The cause of an internal error is logged instead.
    pub(crate) fn public_detail(&self) -> String {
        if self.kind != ErrorKind::Internal {
            return self.detail.clone();
        }
        let id = request_id();
        tracing::error!(request.id = id.as_deref(), error = %self.detail, "request failed");
        match id {
            Some(id) => format!("the cause is in the server's log under request id {id}"),
            None => "the cause is in the server's log".to_owned(),
        }
    }

    /// Returns the error in the format of RFC 9457. Logs the cause of an internal error.
    #[must_use]
    pub fn problem(&self) -> Problem {
        Problem {
            r#type: format!("/problems/{}", self.kind.slug()),
            title: self.kind.title(),
            status: self.status().as_u16(),
            detail: self.public_detail(),
            pointer: self.pointer.as_deref().map(str::to_owned),
            did_you_mean: self.did_you_mean.as_deref().map(str::to_owned),
            request_id: request_id(),
        }
    }

    pub(crate) fn respond(&self, content_type: &'static str, body: Vec<u8>) -> Response {
        let mut response = (self.status(), body).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.kind == ErrorKind::Unauthorized {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        match &self.run {
            Some(run) => with_run_id(response, **run),
            None => response,
        }
    }
}

/// Adds the header with the id of a response's run.
#[must_use]
pub fn with_run_id(mut response: Response, run: RunId) -> Response {
    if let Ok(run_id) = HeaderValue::from_str(&run.to_string()) {
        response.headers_mut().insert(RUN_ID, run_id);
    }
    response
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = serde_json::to_vec(&self.problem()).unwrap_or_default();
        self.respond("application/problem+json", body)
    }
}

impl ApiError {
    /// Converts the rejection of a query. `uri` contains the value that the client sent.
    pub(super) fn from_query(rejection: &QueryRejection, uri: &Uri) -> Self {
        let Some(failure) = Failure::find(rejection) else { return Self::bad_request(rejection.body_text()) };
        let parameters = Query::<Vec<(String, String)>>::try_from_uri(uri).ok();
        let received = parameters.iter().flat_map(|Query(all)| all).find(|(name, _)| name == failure.path());
        failure.to_error(received.map(|(_, value)| value.as_str()))
    }
}

impl From<JsonRejection> for ApiError {
    fn from(rejection: JsonRejection) -> Self {
        let failure = Failure::find(&rejection);
        match (rejection, failure) {
            (JsonRejection::BytesRejection(rejection), _) => rejection.into(),
            (JsonRejection::MissingJsonContentType(_), _) => Self::new(
                ErrorKind::UnsupportedMediaType,
                "the body must be JSON, sent with the header 'content-type: application/json'",
            ),
            (JsonRejection::JsonDataError(_), Some(failure)) => failure.to_error(None),
            (rejection, failure) => {
                let cause = failure.map_or_else(|| rejection.body_text(), |failure| failure.message().to_owned());
                Self::bad_request(format!("the body is not JSON: {cause}")).code(ErrorCode::InvalidJson)
            }
        }
    }
}

impl From<BytesRejection> for ApiError {
    fn from(rejection: BytesRejection) -> Self {
        if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            return Self::new(ErrorKind::TooLarge, "the body exceeds the maximum size of this route");
        }
        let cause = std::error::Error::source(&rejection).map_or_else(|| rejection.body_text(), ToString::to_string);
        Self::bad_request(format!("reading the body failed: {cause}"))
    }
}

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> Self {
        let PathRejection::FailedToDeserializePathParams(failure) = &rejection else {
            return Self::internal(rejection);
        };
        match failure.kind() {
            PathErrorKind::ParseErrorAtKey { value, expected_type, .. }
            | PathErrorKind::ParseErrorAtIndex { value, expected_type, .. }
            | PathErrorKind::ParseError { value, expected_type } => {
                let expected = deserialization::expected_value(expected_type);
                Self::bad_request(format!("a path parameter must be {expected}, got {value:?}"))
            }
            other => Self::bad_request(format!("the path is invalid: {other}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ApiError, with_request_id};

    #[tokio::test]
    async fn internal_error_hides_its_cause() {
        let problem =
            with_request_id("r-1".into(), async { ApiError::internal("password is hunter2").problem() }).await;
        assert_eq!(problem.status, 500);
        assert_eq!(problem.detail, "the cause is in the server's log under request id r-1");
        assert_eq!(problem.request_id.as_deref(), Some("r-1"));
    }
}
