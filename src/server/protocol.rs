//! Protocols: groups of routes with the access that they require and the format of their errors.

use super::{ApiError, App};
use axum::http::{HeaderMap, Uri};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use std::sync::Arc;
use utoipa_axum::router::OpenApiRouter;

/// The access that a route requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// No key.
    Public,
    /// A key for traces, if keys are configured and `--ingest-open` is not set.
    Ingest,
    /// A key, if keys are configured.
    Key,
    /// Like `Key`, but a request without a key is admitted without a [`Caller`](super::Caller).
    OptionalKey,
    /// Like `Key`; each `POST` starts a run and counts toward the rate limits.
    Run,
    /// Like `Key` for a WebSocket, which may send the key in its first message.
    Socket,
}

/// A function that renders an error in the format of a protocol.
pub type ErrorFormat = fn(ApiError) -> Response;

/// The error with which the guard rejects a request, as a request extension.
#[derive(Debug, Clone)]
pub(crate) struct GuardRejection(pub(crate) ApiError);

/// Routes with the same access class and error format.
pub struct RouteGroup {
    /// The access that all of its routes require.
    pub access: Access,
    /// The format of errors that occur before a handler runs.
    pub format: ErrorFormat,
    /// The routes.
    pub routes: OpenApiRouter<App>,
}

/// The routes of one protocol.
pub struct Protocol {
    format: ErrorFormat,
    prefixes: &'static [&'static str],
    groups: Vec<RouteGroup>,
}

impl Protocol {
    /// Creates a protocol without routes. Errors of unknown paths that equal one of `prefixes`, or are below one, are
    /// rendered in its format.
    #[must_use]
    pub const fn new(format: ErrorFormat, prefixes: &'static [&'static str]) -> Self {
        Self { format, prefixes, groups: Vec::new() }
    }

    /// Creates a protocol whose errors are problem documents.
    #[must_use]
    pub const fn native(prefixes: &'static [&'static str]) -> Self {
        Self::new(ApiError::into_response, prefixes)
    }

    /// Adds routes that require `access`.
    #[must_use]
    pub fn routes(mut self, access: Access, routes: impl Into<OpenApiRouter<App>>) -> Self {
        self.groups.push(RouteGroup { access, format: self.format, routes: routes.into() });
        self
    }

    /// Returns the groups of routes.
    #[must_use]
    pub fn groups(&self) -> &[RouteGroup] {
        &self.groups
    }

    /// Returns the groups of routes.
    #[must_use]
    pub fn into_groups(self) -> Vec<RouteGroup> {
        self.groups
    }
}

/// The error formats of paths by their prefix.
#[derive(Clone)]
pub struct ErrorFormats {
    prefixes: Arc<[(&'static str, ErrorFormat)]>,
    default: ErrorFormat,
}

impl ErrorFormats {
    /// Returns the formats of the protocols' prefixes. All other paths have the format `default`.
    #[must_use]
    pub fn new(protocols: &[Protocol], default: ErrorFormat) -> Self {
        let prefixes =
            protocols.iter().flat_map(|protocol| protocol.prefixes.iter().map(|&prefix| (prefix, protocol.format)));
        Self { prefixes: prefixes.collect(), default }
    }

    /// Returns the format of the longest prefix that matches a path.
    #[must_use]
    pub fn for_path(&self, path: &str) -> ErrorFormat {
        let below =
            |prefix: &str| path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let longest = self.prefixes.iter().filter(|(prefix, _)| below(prefix)).max_by_key(|(prefix, _)| prefix.len());
        longest.map_or(self.default, |(_, format)| *format)
    }
}

impl From<ErrorFormat> for ErrorFormats {
    fn from(format: ErrorFormat) -> Self {
        Self { prefixes: Arc::new([]), default: format }
    }
}

/// The dashboard's pages, which are served in addition to the APIs.
#[derive(Clone, Copy)]
pub struct Pages {
    /// Returns the routes of pages and assets; the parameter is the `OpenAPI` document.
    pub protocol: fn(Bytes) -> Protocol,
    /// Returns the page for an unknown path.
    pub not_found: fn(&HeaderMap, &Uri) -> Response,
    /// Returns the login page.
    pub login: LoginPage,
}

/// Renders the login page.
pub type LoginPage = fn(&HeaderMap, LoginForm<'_>) -> Response;

/// The content of the login page.
#[derive(Debug, Clone, Copy)]
pub struct LoginForm<'a> {
    /// Path of the page to open after the login.
    pub next: &'a str,
    /// The reason why the last attempt failed; empty without one.
    pub error: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::StatusCode;

    #[test]
    fn error_format_of_longest_prefix_wins() {
        fn outer(_: ApiError) -> Response {
            StatusCode::CREATED.into_response()
        }
        fn inner(_: ApiError) -> Response {
            StatusCode::ACCEPTED.into_response()
        }
        let formats = ErrorFormats::new(
            &[Protocol::new(inner, &["/v1/messages"]), Protocol::new(outer, &["/v1"])],
            ApiError::into_response,
        );
        for (path, status) in
            [("/v1", 201), ("/v1/x", 201), ("/v1/messages/x", 202), ("/v1/messagesx", 201), ("/v10", 400)]
        {
            assert_eq!(formats.for_path(path)(ApiError::bad_request("x")).status(), status, "{path}");
        }
    }
}
