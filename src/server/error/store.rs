//! Conversion of store errors to API errors.

use super::ApiError;
use crate::store::{Error, IngestError};

/// Seconds after which clients should retry while the database is unavailable.
const RETRY_AFTER_S: u64 = 2;

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        match error {
            Error::BadFilter(bad) => {
                let detail = format!("{} (at character {} of the filter)", bad.message, bad.at + 1);
                Self::invalid("q", detail).did_you_mean(bad.did_you_mean)
            }
            Error::StillRunning(_) => Self::conflict(error.to_string()),
            Error::TooManyTags(..) => Self::invalid("add", error.to_string()),
            Error::TooManyNotes(..) => Self::bad_request(error.to_string()),
            Error::NotStored(_) => Self::unavailable(error.to_string()).retry_after(RETRY_AFTER_S),
            Error::Unavailable(_) => {
                tracing::warn!(%error, "database unavailable");
                Self::unavailable("the database cannot be reached").retry_after(RETRY_AFTER_S)
            }
            error => Self::internal(error),
        }
    }
}

impl From<IngestError> for ApiError {
    fn from(error: IngestError) -> Self {
        match &error {
            IngestError::Conflict { .. } => Self::conflict(error.to_string()).at("$.request.request_id"),
            IngestError::Unavailable { retry_after_s } => {
                Self::unavailable(error.to_string()).retry_after(u64::from(*retry_after_s))
            }
            IngestError::Refused(_) => Self::bad_request(error.to_string()),
            IngestError::Database(_) => Self::internal(error),
        }
    }
}
