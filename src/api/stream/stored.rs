//! Messages for runs that have ended and are read from the database.

use super::error::StreamErrorMessage;
use super::response::{CompletionMessage, InitMessage, RunErrorMessage, StreamMessage};
use crate::events::{EndCause, Fault, FinishReason, RunStatus, Scope, Usage};
use crate::mods::tool_calls_of;
use crate::server::{ApiError, App};
use crate::store::{EndDetails, RunSummary};
use serde_json::Value;

/// Returns the first and last message of a stored run.
///
/// # Errors
/// 404 if the run does not exist; 409 while it is active elsewhere.
pub(super) async fn messages(app: &App, scope: &Scope, id: &str) -> Result<[StreamMessage<'static>; 2], ApiError> {
    let store = app.store()?;
    let run = store.find(scope, id).await?.ok_or_else(|| ApiError::not_found("run", id).at("request_id"))?;
    if run.status == RunStatus::Running {
        let detail = format!("run '{id}' is active but was not started with this protocol on this server");
        return Err(ApiError::conflict(detail).at("request_id"));
    }
    let not_found = || ApiError::not_found("run", id);
    let text = store.answer(scope, run.run_id).await?.ok_or_else(not_found)?;
    let details = store.end_details(scope, run.run_id).await?;
    let init = InitMessage::stored(run.request_id.clone().into(), run.run_id, run.model.clone().map(Into::into));
    Ok([StreamMessage::Init(init), last(run, text, details)])
}

/// Returns the last message, equal to that of [`super::message::last`] for a run in memory.
fn last(run: RunSummary, text: String, details: EndDetails) -> StreamMessage<'static> {
    let usage = Usage {
        prompt_tokens: run.prompt_tokens.max(0).cast_unsigned(),
        cached_tokens: run.cached_tokens.max(0).cast_unsigned(),
        completion_tokens: run.completion_tokens.max(0).cast_unsigned(),
    };
    let reported = run.message.as_deref();
    let reason = run.finish_reason.unwrap_or(FinishReason::Stop);
    let error = match (run.status, reason, run.end_cause) {
        (RunStatus::Done, ..) | (_, FinishReason::Cancelled, Some(EndCause::ClientStop | EndCause::Regenerate)) => {
            let stopped = run.status != RunStatus::Done;
            let completion = CompletionMessage::new(run.request_id.into(), text.into(), reason, usage);
            let mut completion = if stopped { completion.stopped_by_client() } else { completion };
            completion.stop_string = details.stop_string.filter(|_| reason == FinishReason::Stop);
            let tool_calls = details.tool_calls.filter(|_| reason == FinishReason::ToolCalls);
            let tool_calls = tool_calls.and_then(|payload| serde_json::to_value(payload).ok());
            completion.tool_calls = tool_calls.map(|payload| Value::Array(tool_calls_of(&payload).to_vec()));
            completion.stored = true;
            return StreamMessage::Completion(completion);
        }
        (_, FinishReason::Cancelled, Some(EndCause::Timeout)) => StreamErrorMessage::timed_out(None),
        (_, FinishReason::Cancelled, _) => StreamErrorMessage::cancelled(reported),
        _ => StreamErrorMessage::failed(details.is_mod_error.then_some(Fault::Mod), run.end_cause, reported),
    };
    let mut error = RunErrorMessage::ended(error, run.request_id.into(), text.into(), Some(usage.into()));
    error.stored = true;
    StreamMessage::Error(error)
}
