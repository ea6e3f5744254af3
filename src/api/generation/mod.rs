//! From a validated request to a run that has begun, and from its end to an error: the same for every dialect.

mod probabilities;
pub(super) mod runs;
pub(super) mod stream;

pub(in crate::api) use probabilities::Probabilities;
pub(in crate::api) use runs::{Runs, Told, answers};

use super::{ApiError, App, Caller, Kind};
use crate::engine::{OUT_OF_MEMORY, PromptProgress, PromptTiming, Request, SubmitError};
use crate::events::{Fault, Finish, FinishReason, RunEnd, RunId, Surface, Usage};
use crate::model::grammar;
use axum::Extension;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use serde_json::{Value, json};
use std::time::Duration;

/// So long a request waits to hear whether its id is taken: a busy database must not hold up the first token.
const ASKING: Duration = Duration::from_millis(250);

const RUN_ID: HeaderName = HeaderName::from_static("x-thunder-run-id");
/// `thunder run` says so, and its runs are told from those of other programs.
const CLIENT: HeaderName = HeaderName::from_static("x-thunder-client");

/// Writes down who asks: the key's label, unless the request names somebody, and whether it is our own command line.
pub(in crate::api) fn note_client(request: &mut Request, headers: &HeaderMap, caller: Option<Extension<Caller>>) {
    if headers.get(CLIENT).is_some_and(|client| client == "cli") {
        request.surface = Surface::Cli;
    }
    if let Some(Extension(caller)) = caller {
        request.user_label.get_or_insert(caller.label);
    }
}

/// The error that a run ended with, if it did.
pub(in crate::api) fn failure(end: &RunEnd, run: RunId) -> Option<ApiError> {
    let finish = &end.finish;
    let message = finish.message.clone();
    match finish.reason {
        FinishReason::Stop | FinishReason::Length | FinishReason::ToolCalls => None,
        FinishReason::Cancelled => {
            Some(ApiError::unavailable(message.unwrap_or_else(|| "the run was cancelled".into())).retry_after(1))
        }
        FinishReason::Error => {
            let message = message.unwrap_or_else(|| format!("run {run} failed"));
            if message.contains(OUT_OF_MEMORY) {
                return Some(ApiError::new(Kind::NoRoom, message).code("out_of_memory"));
            }
            let kind = if finish.fault == Some(Fault::QuoteMod) { Kind::BadRequest } else { Kind::Unprocessable };
            Some(ApiError::new(kind, message).code("run_failed"))
        }
    }
}

/// The response with the header that leads to the run's replay; a failed run is recorded too.
pub(in crate::api) fn with_run_id(mut response: Response, run: RunId) -> Response {
    if let Ok(run_id) = HeaderValue::from_str(&run.to_string()) {
        response.headers_mut().insert(RUN_ID, run_id);
    }
    response
}

/// Where the time of a run went, as llama-server tells it, and which messages went because the context was full.
pub(in crate::api) fn timings(finish: &Finish) -> Value {
    timings_with(finish, finish.usage.completion_tokens)
}

/// The same where `predicted` tokens count, the one that ended the answer included.
pub(in crate::api) fn timings_with(finish: &Finish, predicted: u32) -> Value {
    let usage = Usage { completion_tokens: predicted, ..finish.usage };
    let mut timings = timings_of(usage, finish.prompt_decoded, finish.prompt_us, finish.generation_us);
    if finish.evicted_tokens > 0 {
        timings["evicted_n"] = finish.evicted_tokens.into();
        timings["evicted"] = json!(finish.evicted);
    }
    // What the reason alone does not say: a limit that was met, a mod that was switched off.
    if let Some(message) = &finish.message {
        timings["message"] = message.as_str().into();
    }
    timings
}

/// The same for these counts and times in microseconds. The first token comes with the prompt, so that the rate is that of
/// the tokens behind it.
fn timings_of(usage: Usage, prompt: u32, prompt_us: u64, generation_us: u64) -> Value {
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

/// The same of a run that goes on, `generated` tokens behind its prompt.
pub(in crate::api) fn timings_so_far(prompt: &PromptTiming, generated: u32) -> Value {
    let usage = Usage { prompt_tokens: prompt.tokens, cached_tokens: prompt.cached, completion_tokens: generated };
    let decoded = prompt.tokens.saturating_sub(prompt.cached);
    timings_of(usage, decoded, prompt.elapsed_us, prompt.at.elapsed().as_micros() as u64)
}

/// The progress of a prompt as llama-server's `prompt_progress`.
pub(in crate::api) fn prompt_progress(progress: PromptProgress) -> Value {
    json!({
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": progress.elapsed_us as f64 / 1e3,
    })
}

/// The timings of a run whose prompt is being decoded: all 0 before the first decode.
pub(in crate::api) fn prompt_timings(progress: PromptProgress) -> Value {
    let usage = Usage { prompt_tokens: progress.total, cached_tokens: progress.cached, completion_tokens: 0 };
    let decoded = progress.processed.saturating_sub(progress.cached);
    timings_of(usage, decoded, if decoded > 0 { progress.elapsed_us } else { 0 }, 0)
}

/// Tokens that a shift of the context let go. What goes as whole messages mostly goes before the prompt is counted.
pub(in crate::api) fn shifted(finish: &Finish) -> u32 {
    if finish.evicted.is_empty() { finish.evicted_tokens } else { 0 }
}

/// A client's id names one run for ever. When the database cannot be asked, or does not say so at once, the run goes on.
pub(in crate::api) async fn refuse_known_id(app: &App, request_id: Option<&str>) -> Result<(), ApiError> {
    if let Some(id) = request_id
        && is_known(app, id).await?
    {
        return Err(ApiError::conflict(format!("request_id '{id}' belongs to another run")).at("request_id"));
    }
    Ok(())
}

/// Whether an earlier run has a client's id, as far as the database can say within [`ASKING`].
///
/// # Errors
/// 503 while the database is being started.
pub(in crate::api) async fn is_known(app: &App, id: &str) -> Result<bool, ApiError> {
    let found = tokio::time::timeout(ASKING, app.store()?.find(id)).await;
    Ok(matches!(found, Ok(Ok(Some(_)))))
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
                Self::new(Kind::Busy, message).retry_after(1)
            }
            SubmitError::Constraint { field, .. } => Self::invalid(field, message),
            SubmitError::Busy { .. } => Self::new(Kind::Busy, message).retry_after(1),
            SubmitError::RequestIdInUse { .. } => Self::conflict(message).at("request_id"),
            SubmitError::Stopped => Self::unavailable(message),
        }
    }
}
