//! Starts runs for validated requests and converts their results, for all protocols.

mod client;
mod output_writer;
mod probabilities;
pub(crate) mod runs;
mod thunder;
mod time_limit;
mod timings;
mod tokens;

pub(crate) use crate::server::with_run_id;
pub(crate) use client::RunClient;
pub(crate) use output_writer::{OutputWriter, stream_runs};
pub(crate) use probabilities::{
    LogprobsByText, OPENAI_NO_LOGPROB, ProbabilityFormatter, TokenLogprob, TokenProbabilities, text_or_bytes,
};
pub(crate) use runs::{Runs, check_run_count, repeat_request};
pub(crate) use thunder::ThunderFields;
pub(crate) use time_limit::wait_for_time_limit;
pub(crate) use timings::{PromptProgressResponse, RunTimings};
pub(crate) use tokens::CollectedTokens;

use crate::engine::{RecordPolicy, Request, SubmitError};
use crate::events::{EndCause, Fault, FinishReason, RunEnd, RunId};
use crate::model::grammar;
use crate::server::{ApiError, App, ErrorCode, ErrorKind};
use std::time::Duration;

/// Maximum wait for the lookup of a request id, so that a busy database does not delay the first token.
const LOOKUP_TIMEOUT: Duration = Duration::from_millis(250);

/// Returns the error with which a run ended, if any.
pub(crate) fn failure(end: &RunEnd, run: RunId) -> Option<ApiError> {
    let finish = &end.finish;
    let message = finish.message.clone();
    match finish.reason {
        FinishReason::Stop | FinishReason::Length | FinishReason::ToolCalls => None,
        FinishReason::Cancelled => {
            Some(ApiError::unavailable(message.unwrap_or_else(|| "the run was cancelled".into())).retry_after(1))
        }
        FinishReason::Error => {
            let message = message.unwrap_or_else(|| format!("run {run} failed"));
            match finish.cause {
                Some(EndCause::OutOfMemory) => {
                    return Some(ApiError::new(ErrorKind::NoRoom, message).code(ErrorCode::OutOfMemory));
                }
                Some(EndCause::NotRecorded) => return Some(ApiError::unavailable(message).retry_after(1)),
                _ => {}
            }
            let kind =
                if finish.fault == Some(Fault::QuoteMod) { ErrorKind::BadRequest } else { ErrorKind::Unprocessable };
            Some(ApiError::new(kind, message).code(ErrorCode::RunFailed))
        }
    }
}

/// Rejects a request id that belongs to another run.
///
/// If the database does not answer in time, only requests that must be recorded are rejected. Other runs start, and the
/// recorder assigns a new id if an earlier run has this one.
pub(crate) async fn check_request_id(app: &App, request: &Request) -> Result<(), ApiError> {
    let Some(id) = &request.request_id else { return Ok(()) };
    match request_id_exists(app, id).await? {
        Some(true) => {
            Err(ApiError::conflict(format!("`request_id` '{id}' belongs to another run; choose a new id"))
                .at("request_id"))
        }
        None if request.record == RecordPolicy::Required => {
            let message = format!("the database is too slow to check that `request_id` '{id}' is unused; try again");
            Err(ApiError::unavailable(message).retry_after(1))
        }
        Some(false) | None => Ok(()),
    }
}

/// Returns true if an earlier run has this request id; `None` if the database does not answer within
/// [`LOOKUP_TIMEOUT`].
///
/// # Errors
/// 503 while the database is starting.
pub(crate) async fn request_id_exists(app: &App, id: &str) -> Result<Option<bool>, ApiError> {
    let found = tokio::time::timeout(LOOKUP_TIMEOUT, app.store()?.has_id(id)).await;
    Ok(found.ok().and_then(Result::ok))
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::PromptTooLong { prompt_tokens, context }
            | SubmitError::NothingToDrop { prompt_tokens, context } => {
                Self::bad_request(message).exceeds_context(prompt_tokens, context)
            }
            SubmitError::NoSuchSlot { .. } => Self::invalid("id_slot", message),
            SubmitError::NoGeneration { .. } => Self::not_supported(message),
            SubmitError::TooManyTokens { .. } => Self::invalid("max_tokens", message),
            SubmitError::EmptyPrompt | SubmitError::UnknownToken { .. } => Self::invalid("prompt", message),
            SubmitError::MissingImage | SubmitError::UndividedImage { .. } => Self::bad_request(message),
            SubmitError::Image(_) => Self::new(ErrorKind::Internal, message),
            SubmitError::AttentionOff | SubmitError::AttentionUnsupported { .. } => {
                Self::invalid("attention", message).code(ErrorCode::AttentionUnavailable)
            }
            SubmitError::LensOff | SubmitError::LensUnsupported { .. } => Self::invalid("lens", message),
            SubmitError::NoSuchHead { .. } | SubmitError::HeadRowsTooLarge { .. } => {
                Self::invalid("attention.heads", message)
            }
            SubmitError::ModConfig { .. } => Self::invalid("mods", message),
            SubmitError::Constraint { error: grammar::GrammarError::Busy, .. } => {
                Self::new(ErrorKind::Busy, message).retry_after(1)
            }
            SubmitError::Constraint { field, .. } => Self::invalid(field, message),
            SubmitError::Busy { .. } => Self::new(ErrorKind::Busy, message).retry_after(1),
            SubmitError::RequestIdInUse { .. } => Self::conflict(message).at("request_id"),
            SubmitError::ModDiffers { .. } => Self::conflict(message).at("mods"),
            SubmitError::NotForkable { .. } => Self::conflict(message).at("at"),
            SubmitError::Stopped => Self::unavailable(message),
        }
    }
}
