//! The one error of every machine surface, and the only type that knows status codes.
//!
//! A handler answers with [`ApiError`], which renders as `application/problem+json`; a dialect wraps it in its own
//! newtype ([`OpenAiError`], [`LlamaError`]) and renders the same error in its shape. The cause of a 5xx is logged once, here,
//! and the client gets the request id to ask for it.

mod dialects;
mod kind;

pub use dialects::{AnthropicError, LlamaError, OpenAiError, StreamError};
pub use kind::Kind;

use axum::extract::rejection::{BytesRejection, JsonRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::fmt::Display;
use utoipa::ToSchema;

tokio::task_local! {
    /// The id of the request that is being answered.
    static REQUEST_ID: String;
}

/// Runs a request with its id, so that every error in it can name the id.
pub async fn with_request_id<F: Future>(id: String, request: F) -> F::Output {
    REQUEST_ID.scope(id, request).await
}

/// The id of the request that is being answered, where there is one.
#[must_use]
pub fn request_id() -> Option<String> {
    REQUEST_ID.try_with(Clone::clone).ok()
}

/// An error of a machine surface.
#[derive(Debug, Clone)]
pub struct ApiError {
    kind: Kind,
    detail: String,
    pointer: Option<String>,
    did_you_mean: Option<Box<str>>,
    retry_after_s: Option<u64>,
    code: Option<&'static str>,
    /// Tokens of a prompt that does not fit, and of the context.
    exceeded: Option<(u32, u32)>,
    /// Tokens of the context at which memory ran out.
    context: Option<u32>,
}

/// An error in the shape of RFC 9457.
#[derive(Debug, Serialize, ToSchema)]
pub struct Problem {
    /// `/problems/` and the sort of error, e.g. `/problems/not-found`.
    pub r#type: String,
    /// The sort of error in words.
    pub title: &'static str,
    /// HTTP status.
    pub status: u16,
    /// What was wrong, where, and what would be right.
    pub detail: String,
    /// The field or place that was wrong, e.g. `$.events[3].step` or `max_tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pointer: Option<String>,
    /// A name that exists and is close to the one that does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub did_you_mean: Option<String>,
    /// The id of this request, as it stands in the server's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

impl ApiError {
    /// An error of that sort. `detail` says what was wrong, where, and what would be right.
    pub fn new(kind: Kind, detail: impl Into<String>) -> Self {
        Self {
            kind,
            detail: detail.into(),
            pointer: None,
            did_you_mean: None,
            retry_after_s: None,
            code: None,
            exceeded: None,
            context: None,
        }
    }

    /// 400: the request is wrong.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(Kind::BadRequest, detail)
    }

    /// 400: one field of the request is wrong.
    pub fn invalid(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(Kind::BadRequest, detail).at(pointer)
    }

    /// 404: there is no such thing, e.g. `ApiError::not_found("run", id)`.
    pub fn not_found(what: &str, name: impl Display) -> Self {
        Self::new(Kind::NotFound, format!("there is no {what} '{name}'"))
    }

    /// 409: it contradicts what is there.
    pub fn conflict(detail: impl Into<String>) -> Self {
        Self::new(Kind::Conflict, detail)
    }

    /// 501: the server was started without it, or the model cannot do it; `detail` says what would be needed.
    pub fn not_supported(detail: impl Into<String>) -> Self {
        Self::new(Kind::NotSupported, detail)
    }

    /// 503: a part of the server is not there (yet).
    pub fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(Kind::Unavailable, detail)
    }

    /// 500. `cause` is logged when the error is rendered, and never sent.
    pub fn internal(cause: impl Display) -> Self {
        Self::new(Kind::Internal, format!("{cause:#}"))
    }

    /// Names the field or place that was wrong.
    #[must_use]
    pub fn at(mut self, pointer: impl Into<String>) -> Self {
        self.pointer = Some(pointer.into());
        self
    }

    /// Names something that exists and is close to what was asked for.
    #[must_use]
    pub fn did_you_mean(mut self, name: Option<impl Into<String>>) -> Self {
        self.did_you_mean = name.map(|name| name.into().into_boxed_str());
        self
    }

    /// Says when trying again makes sense.
    #[must_use]
    pub const fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after_s = Some(seconds);
        self
    }

    /// A word for programs, e.g. `context_length_exceeded`.
    #[must_use]
    pub const fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The prompt has more tokens than the context holds.
    #[must_use]
    pub const fn exceeds_context(mut self, prompt_tokens: usize, context: usize) -> Self {
        self.exceeded = Some((prompt_tokens as u32, context as u32));
        self.code("context_length_exceeded")
    }

    /// How many tokens the context had when memory ran out.
    #[must_use]
    pub const fn at_context(mut self, tokens: u32) -> Self {
        self.context = Some(tokens);
        self
    }

    /// The field or place that was wrong.
    #[must_use]
    pub fn pointer(&self) -> Option<&str> {
        self.pointer.as_deref()
    }

    /// The word for programs.
    #[must_use]
    pub const fn coded(&self) -> Option<&'static str> {
        self.code
    }

    /// Tokens of a prompt that does not fit, and of the context.
    #[must_use]
    pub const fn exceeded(&self) -> Option<(u32, u32)> {
        self.exceeded
    }

    /// Tokens of the context at which memory ran out.
    #[must_use]
    pub const fn context(&self) -> Option<u32> {
        self.context
    }

    /// The same error of a field that this dialect's clients call otherwise.
    #[must_use]
    pub fn renamed(mut self, ours: &str, theirs: &str) -> Self {
        self.detail = self.detail.replace(ours, theirs);
        self.pointer = Some(theirs.to_owned());
        self
    }

    /// What sort it is.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The HTTP status.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        self.kind.status()
    }

    /// The detail as a client may see it; the cause of an internal error is logged in its stead.
    pub(in crate::api) fn public_detail(&self) -> String {
        if self.kind != Kind::Internal {
            return self.detail.clone();
        }
        let id = request_id();
        tracing::error!(request.id = id.as_deref(), error = %self.detail, "request failed");
        match id {
            Some(id) => format!("the cause is in the server's log under request id {id}"),
            None => "the cause is in the server's log".to_owned(),
        }
    }

    /// As RFC 9457 has it. Logs the cause of an internal error.
    #[must_use]
    pub fn problem(&self) -> Problem {
        Problem {
            r#type: format!("/problems/{}", self.kind.slug()),
            title: self.kind.title(),
            status: self.status().as_u16(),
            detail: self.public_detail(),
            pointer: self.pointer.clone(),
            did_you_mean: self.did_you_mean.as_deref().map(str::to_owned),
            request_id: request_id(),
        }
    }

    pub(in crate::api) fn respond(&self, content_type: &'static str, body: Vec<u8>) -> Response {
        let mut response = (self.status(), body).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.kind == Kind::Unauthorized {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = serde_json::to_vec(&self.problem()).unwrap_or_default();
        self.respond("application/problem+json", body)
    }
}

impl From<JsonRejection> for ApiError {
    fn from(rejection: JsonRejection) -> Self {
        match rejection {
            JsonRejection::BytesRejection(rejection) => rejection.into(),
            JsonRejection::MissingJsonContentType(_) => Self::new(
                Kind::UnsupportedMediaType,
                "the body must be JSON, sent with the header 'content-type: application/json'",
            ),
            rejection => Self::bad_request(rejection.body_text()),
        }
    }
}

impl From<BytesRejection> for ApiError {
    fn from(rejection: BytesRejection) -> Self {
        let kind = if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE { Kind::TooLarge } else { Kind::BadRequest };
        Self::new(kind, rejection.body_text())
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        let text = rejection.body_text();
        let wrong = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
        match wrong.split_once(": ") {
            Some((field, _)) if !field.contains(' ') => Self::invalid(field, wrong),
            _ => Self::bad_request(wrong),
        }
    }
}

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> Self {
        Self::bad_request(rejection.body_text())
    }
}

#[cfg(test)]
mod tests {
    use super::{ApiError, with_request_id};

    #[tokio::test]
    async fn an_internal_error_keeps_its_cause_to_itself() {
        let problem =
            with_request_id("r-1".into(), async { ApiError::internal("password is hunter2").problem() }).await;
        assert_eq!(problem.status, 500);
        assert_eq!(problem.detail, "the cause is in the server's log under request id r-1");
        assert_eq!(problem.request_id.as_deref(), Some("r-1"));
    }

    #[test]
    fn a_prompt_that_does_not_fit_says_by_how_much() {
        let error = ApiError::bad_request("too long").exceeds_context(40, 16);
        insta::assert_json_snapshot!(error.llama(), @r#"
        {
          "error": {
            "code": 400,
            "message": "too long",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": 40,
            "n_ctx": 16
          }
        }
        "#);
        assert_eq!(error.openai()["error"]["code"], "context_length_exceeded");
    }

    #[test]
    fn one_error_speaks_both_dialects() {
        let error = ApiError::invalid("top_p", "top_p must be between 0 and 1, got 3").code("out_of_range");
        insta::assert_json_snapshot!(error.problem(), @r#"
        {
          "type": "/problems/bad-request",
          "title": "The request is not valid",
          "status": 400,
          "detail": "top_p must be between 0 and 1, got 3",
          "pointer": "top_p"
        }
        "#);
        insta::assert_json_snapshot!(error.openai(), @r#"
        {
          "error": {
            "message": "top_p must be between 0 and 1, got 3",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "out_of_range"
          }
        }
        "#);
    }
}
