use axum::http::StatusCode;

/// The kind of an error; determines HTTP status and title.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is invalid.
    BadRequest,
    /// The key is missing or unknown.
    Unauthorized,
    /// The key lacks the right, or the host or origin is not trusted.
    Forbidden,
    /// The resource does not exist.
    NotFound,
    /// The route exists, but not for this method.
    MethodNotAllowed,
    /// The body did not arrive in time; the client can retry.
    RequestTimeout,
    /// The request conflicts with existing state.
    Conflict,
    /// The body exceeds the route's limit.
    TooLarge,
    /// The body's content type or encoding is not supported.
    UnsupportedMediaType,
    /// A valid request failed: a mod ended the run with an error before its first token.
    Unprocessable,
    /// Storage, memory or the maximum number of uploaded mods is exhausted.
    NoRoom,
    /// Too many requests; the client can retry later.
    Busy,
    /// The server failed.
    Internal,
    /// The server was started without the feature, or the model does not support it.
    NotSupported,
    /// A part of the server is not ready.
    Unavailable,
}

impl ErrorKind {
    /// Returns the HTTP status.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        match self {
            Self::BadRequest => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::Conflict => StatusCode::CONFLICT,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Unprocessable => StatusCode::UNPROCESSABLE_ENTITY,
            Self::NoRoom => StatusCode::INSUFFICIENT_STORAGE,
            Self::Busy => StatusCode::TOO_MANY_REQUESTS,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::NotSupported => StatusCode::NOT_IMPLEMENTED,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    pub(super) const fn slug(self) -> &'static str {
        match self {
            Self::BadRequest => "bad-request",
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not-found",
            Self::MethodNotAllowed => "method-not-allowed",
            Self::RequestTimeout => "request-timeout",
            Self::Conflict => "conflict",
            Self::TooLarge => "too-large",
            Self::UnsupportedMediaType => "unsupported-media-type",
            Self::Unprocessable => "unprocessable",
            Self::NoRoom => "no-room",
            Self::Busy => "busy",
            Self::Internal => "internal",
            Self::NotSupported => "not-supported",
            Self::Unavailable => "unavailable",
        }
    }

    pub(super) fn title(self) -> &'static str {
        self.status().canonical_reason().unwrap_or("Error")
    }
}
