//! Messages for runs that have ended and are read from the database.

use super::message;
use super::response::{InitMessage, StreamMessage};
use crate::events::{Fault, Finish, FinishReason, RunEnd, RunStatus, Scope, Usage};
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
    let init = InitMessage::new(run.request_id.clone().into(), run.run_id, run.model.clone().map(Into::into));
    Ok([StreamMessage::Init(init.stored()), last(run, text, details)])
}

/// Returns the last message.
fn last(run: RunSummary, text: String, details: EndDetails) -> StreamMessage<'static> {
    let finish = finish(&run, details);
    let mut message = message::ended(run.request_id.into(), text.into(), &finish, None);
    match &mut message {
        StreamMessage::Completion(completion) => completion.stored = true,
        StreamMessage::Error(error) => error.stored = true,
        _ => {}
    }
    message
}

/// Returns the end of a run as far as it is stored.
fn finish(run: &RunSummary, details: EndDetails) -> Finish {
    let usage = Usage {
        prompt_tokens: run.prompt_tokens.max(0).cast_unsigned(),
        cached_tokens: run.cached_tokens.max(0).cast_unsigned(),
        completion_tokens: run.completion_tokens.max(0).cast_unsigned(),
    };
    let reason = match (run.status, run.finish_reason) {
        (RunStatus::Done, reason) => reason.unwrap_or(FinishReason::Stop),
        (_, Some(FinishReason::Cancelled)) => FinishReason::Cancelled,
        _ => FinishReason::Error,
    };
    let tool_calls = details.tool_calls.filter(|_| reason == FinishReason::ToolCalls);
    let tool_calls = tool_calls.and_then(|payload| serde_json::to_value(payload).ok());
    // The fault is not stored: an error of a mod has an action, and one of the engine a cause. Failures stored before
    // migration V14 have no cause either, except for `out_of_memory`, so they are reported as errors of the request.
    let fault = match (details.is_mod_error, run.finish_reason, run.end_cause) {
        (true, ..) => Some(Fault::Mod),
        (false, Some(FinishReason::Error), None) => Some(Fault::Request),
        _ => None,
    };
    Finish {
        reason,
        message: run.message.clone(),
        stop_string: details.stop_string.filter(|_| reason == FinishReason::Stop),
        tool_calls: tool_calls.map(|payload| Value::Array(tool_calls_of(&payload).to_vec())),
        fault,
        cause: run.end_cause,
        ..RunEnd::empty(run.created_at, usage).finish
    }
}
