//! Starts runs for validated requests and converts their results, for all protocols.

mod probabilities;
pub(crate) mod runs;
pub(crate) mod stream;

pub(crate) use probabilities::ProbabilityFormatter;
pub(crate) use runs::{Runs, SentTokens, repeat_request};

use crate::engine::{PromptProgress, PromptTiming, Request, SubmitError};
use crate::events::{EndCause, Fault, Finish, FinishReason, RunEnd, RunId, Surface, Usage};
use crate::model::grammar;
use crate::server::{ApiError, App, Caller, ErrorKind};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use serde_json::{Value, json};
use std::time::Duration;

/// Maximum wait for the lookup of a request id, so that a busy database does not delay the first token.
const LOOKUP_TIMEOUT: Duration = Duration::from_millis(250);

const RUN_ID: HeaderName = HeaderName::from_static("x-thunder-run-id");
/// `thunder run` sends this header, so that its runs can be distinguished from those of other programs.
const CLIENT: HeaderName = HeaderName::from_static("x-thunder-client");

/// Makes the client's tenant the owner of the run, sets the request's user label to the key's label unless the client named
/// a user, and marks requests of `thunder run`.
pub(crate) fn set_client(request: &mut Request, headers: &HeaderMap, caller: &Caller) {
    if headers.get(CLIENT).is_some_and(|client| client == "cli") {
        request.surface = Surface::Cli;
    }
    caller.sign(request);
}

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
            if finish.cause == Some(EndCause::OutOfMemory) {
                return Some(ApiError::new(ErrorKind::NoRoom, message).code("out_of_memory"));
            }
            let kind =
                if finish.fault == Some(Fault::QuoteMod) { ErrorKind::BadRequest } else { ErrorKind::Unprocessable };
            Some(ApiError::new(kind, message).code("run_failed"))
        }
    }
}

/// Adds the header with the run's id. Failed runs get it too because they are recorded.
pub(crate) fn with_run_id(mut response: Response, run: RunId) -> Response {
    if let Ok(run_id) = HeaderValue::from_str(&run.to_string()) {
        response.headers_mut().insert(RUN_ID, run_id);
    }
    response
}

/// Returns llama-server's `timings` of a run, with the messages evicted because the context was full.
pub(crate) fn timings(finish: &Finish) -> Value {
    timings_with(finish, finish.usage.completion_tokens)
}

/// Returns the timings with `predicted` as the number of generated tokens, including the one that ended the answer.
pub(crate) fn timings_with(finish: &Finish, predicted: u32) -> Value {
    let usage = Usage { completion_tokens: predicted, ..finish.usage };
    let mut timings = timings_from_counts(usage, finish.prompt_decoded, finish.prompt_us, finish.generation_us);
    if finish.evicted_tokens > 0 {
        timings["evicted_n"] = finish.evicted_tokens.into();
        timings["evicted"] = json!(finish.evicted);
    }
    // The finish reason alone does not tell that a time limit was reached or a mod was switched off.
    if let Some(message) = &finish.message {
        timings["message"] = message.as_str().into();
    }
    timings
}

/// Returns the timings for these counts and times in microseconds. The first token is produced with the prompt, so the
/// rate covers only the tokens after it.
fn timings_from_counts(usage: Usage, prompt: u32, prompt_us: u64, generation_us: u64) -> Value {
    let (prompt_ms, predicted_ms) = (prompt_us as f64 / 1e3, generation_us as f64 / 1e3);
    let per_second = |count: u32, ms: f64| if ms > 0.0 { f64::from(count) * 1e3 / ms } else { 0.0 };
    let per_token = |count: u32, ms: f64| if count > 0 { ms / f64::from(count) } else { 0.0 };
    let steps = usage.completion_tokens.saturating_sub(1);
    json!({
        "cache_n": usage.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": per_token(prompt, prompt_ms),
        "prompt_per_second": per_second(prompt, prompt_ms),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": per_token(steps, predicted_ms),
        "predicted_per_second": per_second(steps, predicted_ms),
    })
}

/// Returns the timings of an active run that has generated `generated` tokens.
pub(crate) fn partial_timings(prompt: &PromptTiming, generated: u32) -> Value {
    let usage = Usage { prompt_tokens: prompt.tokens, cached_tokens: prompt.cached, completion_tokens: generated };
    let decoded = prompt.tokens.saturating_sub(prompt.cached);
    timings_from_counts(usage, decoded, prompt.elapsed_us, prompt.at.elapsed().as_micros() as u64)
}

/// Returns prompt progress in llama-server's `prompt_progress` format.
pub(crate) fn prompt_progress(progress: PromptProgress) -> Value {
    json!({
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": progress.elapsed_us as f64 / 1e3,
    })
}

/// Returns the timings while the prompt is evaluated; all are 0 before the first decode.
pub(crate) fn prompt_timings(progress: PromptProgress) -> Value {
    let usage = Usage { prompt_tokens: progress.total, cached_tokens: progress.cached, completion_tokens: 0 };
    let decoded = progress.processed.saturating_sub(progress.cached);
    timings_from_counts(usage, decoded, if decoded > 0 { progress.elapsed_us } else { 0 }, 0)
}

/// Returns the number of tokens removed by context shifts. Whole messages are usually evicted before the prompt is
/// counted.
pub(crate) fn shifted_tokens(finish: &Finish) -> u32 {
    if finish.evicted.is_empty() { finish.evicted_tokens } else { 0 }
}

/// Rejects a request id that belongs to another run. If the database is unavailable or slow, the request is accepted.
pub(crate) async fn check_request_id(app: &App, request_id: Option<&str>) -> Result<(), ApiError> {
    if let Some(id) = request_id
        && request_id_exists(app, id).await?
    {
        return Err(
            ApiError::conflict(format!("`request_id` '{id}' belongs to another run; choose a new id")).at("request_id")
        );
    }
    Ok(())
}

/// Returns true if an earlier run has this request id, as far as the database answers within [`LOOKUP_TIMEOUT`].
///
/// # Errors
/// 503 while the database is starting.
pub(crate) async fn request_id_exists(app: &App, id: &str) -> Result<bool, ApiError> {
    let found = tokio::time::timeout(LOOKUP_TIMEOUT, app.store()?.has_id(id)).await;
    Ok(matches!(found, Ok(Ok(true))))
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
            SubmitError::EmptyPrompt => Self::invalid("prompt", message),
            SubmitError::AttentionOff | SubmitError::AttentionUnsupported { .. } => {
                Self::invalid("attention", message).code("attention_unavailable")
            }
            SubmitError::ModConfig { .. } => Self::invalid("mods", message),
            SubmitError::Constraint { error: grammar::GrammarError::Busy, .. } => {
                Self::new(ErrorKind::Busy, message).retry_after(1)
            }
            SubmitError::Constraint { field, .. } => Self::invalid(field, message),
            SubmitError::Busy { .. } => Self::new(ErrorKind::Busy, message).retry_after(1),
            SubmitError::RequestIdInUse { .. } => Self::conflict(message).at("request_id"),
            SubmitError::Stopped => Self::unavailable(message),
        }
    }
}
