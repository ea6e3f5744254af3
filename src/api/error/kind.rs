use axum::http::StatusCode;

/// What sort of error it is; decides status and title.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong.
    BadRequest,
    /// No key, or one that is not known.
    Unauthorized,
    /// Known, but not allowed.
    Forbidden,
    /// There is no such thing.
    NotFound,
    /// The route exists, for another method.
    MethodNotAllowed,
    /// It contradicts what is there.
    Conflict,
    /// The body is larger than the route takes.
    TooLarge,
    /// The body is of another type than the route takes.
    UnsupportedMediaType,
    /// Well formed, and refused: a mod ended the run with an error before its first token.
    Unprocessable,
    /// There is no room to keep it.
    NoRoom,
    /// Too many requests at once; try again later.
    Busy,
    /// Our fault.
    Internal,
    /// The server was started without it, or the model cannot do it.
    NotSupported,
    /// A part of the server is not there (yet).
    Unavailable,
}

impl Kind {
    /// The HTTP status.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        match self {
            Self::BadRequest => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
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

    pub(super) const fn title(self) -> &'static str {
        match self {
            Self::BadRequest => "The request is not valid",
            Self::Unauthorized => "An API key is needed",
            Self::Forbidden => "Not allowed",
            Self::NotFound => "Not found",
            Self::MethodNotAllowed => "Method not allowed",
            Self::Conflict => "It contradicts what is there",
            Self::TooLarge => "The body is too large",
            Self::UnsupportedMediaType => "The body is of a type that is not taken here",
            Self::Unprocessable => "The run was refused",
            Self::NoRoom => "There is no room to keep it",
            Self::Busy => "Too many runs at once",
            Self::Internal => "Something went wrong on the server",
            Self::NotSupported => "This server cannot do that",
            Self::Unavailable => "The server is not ready",
        }
    }
}
