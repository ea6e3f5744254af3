//! Errors in the streaming protocol's format.

use crate::api::shared::error::{ExceededContext, protocol_error};
use crate::events::{EndCause, Fault};
use crate::server::{ApiError, ErrorKind};
use axum::http::StatusCode;
use serde::Serialize;
use std::time::Duration;
use utoipa::ToSchema;

protocol_error! {
    /// An [`ApiError`] in the streaming protocol's format.
    StreamError, streaming, "application/json"
}

/// An error message of the streaming protocol.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct StreamErrorMessage {
    /// Always `error`.
    r#type: &'static str,
    /// The machine-readable kind: `invalid_request`, `context_length_exceeded`, `content_filter` (a mod ended the run
    /// with an error), `memory_pressure`, `timeout`, `internal_error`, `model_loading_error`, `rate_limited`,
    /// `unavailable`, `unauthorized` or `forbidden`.
    #[schema(value_type = String)]
    error: StreamErrorKind,
    message: String,
    /// True if a retry or a shorter prompt can succeed.
    recoverable: bool,
    /// The action that resolves the error: `retry`, `reduce_prompt` or `authenticate`.
    #[schema(value_type = Option<String>)]
    recovery_action: Option<RecoveryAction>,
    /// The invalid field.
    #[serde(skip_serializing_if = "Option::is_none")]
    parameter: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_seconds: Option<u64>,
    #[serde(flatten)]
    exceeded: ExceededContext,
}

/// The machine-readable kind of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum StreamErrorKind {
    InvalidRequest,
    ContextLengthExceeded,
    ContentFilter,
    MemoryPressure,
    Timeout,
    InternalError,
    ModelLoadingError,
    RateLimited,
    Unavailable,
    Unauthorized,
    Forbidden,
}

/// The client's action that resolves an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum RecoveryAction {
    Retry,
    ReducePrompt,
    Authenticate,
}

impl StreamErrorKind {
    /// Returns the kind of an API error.
    fn from_error(error: &ApiError) -> Self {
        match error.kind() {
            _ if error.exceeded().is_some() => Self::ContextLengthExceeded,
            ErrorKind::Busy => Self::RateLimited,
            ErrorKind::NoRoom => Self::MemoryPressure,
            ErrorKind::Unavailable if error.pointer() == Some("model") => Self::ModelLoadingError,
            ErrorKind::Unavailable => Self::Unavailable,
            ErrorKind::Internal => Self::InternalError,
            ErrorKind::Unauthorized => Self::Unauthorized,
            ErrorKind::Forbidden => Self::Forbidden,
            _ => Self::InvalidRequest,
        }
    }

    const fn recovery_action(self) -> Option<RecoveryAction> {
        match self {
            Self::MemoryPressure | Self::Timeout | Self::RateLimited | Self::Unavailable => Some(RecoveryAction::Retry),
            Self::ContextLengthExceeded => Some(RecoveryAction::ReducePrompt),
            Self::Unauthorized => Some(RecoveryAction::Authenticate),
            Self::InvalidRequest
            | Self::ContentFilter
            | Self::InternalError
            | Self::ModelLoadingError
            | Self::Forbidden => None,
        }
    }

    /// Returns the HTTP status of a run that ended with an error of this kind.
    const fn status(self) -> StatusCode {
        match self {
            Self::ContentFilter | Self::InvalidRequest => StatusCode::UNPROCESSABLE_ENTITY,
            Self::ContextLengthExceeded => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::RateLimited => StatusCode::TOO_MANY_REQUESTS,
            Self::InternalError => StatusCode::INTERNAL_SERVER_ERROR,
            Self::ModelLoadingError | Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
            Self::MemoryPressure => StatusCode::INSUFFICIENT_STORAGE,
        }
    }
}

impl StreamErrorMessage {
    fn new(kind: StreamErrorKind, message: impl Into<String>) -> Self {
        let action = kind.recovery_action();
        Self {
            r#type: "error",
            error: kind,
            message: message.into(),
            recoverable: matches!(action, Some(RecoveryAction::Retry | RecoveryAction::ReducePrompt)),
            recovery_action: action,
            parameter: None,
            retry_after_seconds: None,
            exceeded: ExceededContext::default(),
        }
    }

    /// Returns the error of a failed run.
    pub(super) fn failed(fault: Option<Fault>, cause: Option<EndCause>, message: Option<&str>) -> Self {
        let kind = match (fault, cause) {
            (Some(Fault::Mod | Fault::QuoteMod), _) => StreamErrorKind::ContentFilter,
            (Some(Fault::Request), _) => StreamErrorKind::InvalidRequest,
            (None, Some(EndCause::OutOfMemory)) => StreamErrorKind::MemoryPressure,
            (None, Some(EndCause::NotRecorded)) => StreamErrorKind::Unavailable,
            (None, _) => StreamErrorKind::InternalError,
        };
        Self::new(kind, message.unwrap_or("the run failed"))
    }

    /// Returns the error of a run that exceeded its time limit.
    pub(super) fn timed_out(limit: Option<Duration>) -> Self {
        let message = match limit {
            Some(limit) => format!("the run exceeded its time limit of {} ms", limit.as_millis()),
            None => "the run exceeded its time limit".to_owned(),
        };
        Self::new(StreamErrorKind::Timeout, message)
    }

    /// Returns the error of a run that the server cancelled.
    pub(super) fn cancelled(message: Option<&str>) -> Self {
        Self::new(StreamErrorKind::Unavailable, message.unwrap_or("the run was cancelled"))
    }

    /// Returns the HTTP status of a run that ended with this error.
    pub(super) const fn status(&self) -> StatusCode {
        self.error.status()
    }
}

impl ApiError {
    /// Returns the error in the streaming protocol's format. Logs the cause of an internal error.
    #[must_use]
    pub fn streaming(&self) -> StreamErrorMessage {
        StreamErrorMessage {
            parameter: self.pointer().map(str::to_owned),
            retry_after_seconds: self.retry_after_s(),
            exceeded: self.exceeded_context(),
            ..StreamErrorMessage::new(StreamErrorKind::from_error(self), self.public_detail())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_kind_follows_fault_and_cause() {
        let kind = |fault, cause, message: &str| {
            let error = StreamErrorMessage::failed(fault, cause, Some(message));
            (error.error, error.recoverable)
        };
        let cases = [
            (Some(Fault::Mod), None, "out of memory, says a mod", StreamErrorKind::ContentFilter, false),
            (Some(Fault::Request), None, "no token can be drawn", StreamErrorKind::InvalidRequest, false),
            (None, Some(EndCause::OutOfMemory), "no room", StreamErrorKind::MemoryPressure, true),
            (None, Some(EndCause::DecodeFailed), "out of memory, says a log", StreamErrorKind::InternalError, false),
            (None, Some(EndCause::NotRecorded), "it was not stored", StreamErrorKind::Unavailable, true),
            (None, None, "the KV state is damaged", StreamErrorKind::InternalError, false),
        ];
        for (fault, cause, message, expected, recoverable) in cases {
            assert_eq!(kind(fault, cause, message), (expected, recoverable), "{message}");
        }
    }
}
