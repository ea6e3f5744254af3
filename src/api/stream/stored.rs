//! Messages for runs that have ended and are read from the database.

use super::error::StreamErrorMessage;
use super::response::{CompletionMessage, InitMessage, RunErrorMessage, StreamMessage};
use crate::events::{ActionRecord, ActionType, EndCause, EventType, Fault, FinishReason, RunStatus, Scope, Usage};
use crate::mods::tool_calls_of;
use crate::server::{ApiError, App};
use crate::store::RunSummary;
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
    let document = store.document(scope, run.run_id).await?.ok_or_else(not_found)?;
    let text = store.answer(scope, run.run_id).await?.ok_or_else(not_found)?;
    let last_added = document.events.iter().rev().find(|event| event.event_type == EventType::Added);
    let stop_string = last_added.and_then(|event| event.measured.as_ref()?.stopped_by.clone());
    let mod_result = ModResult::from_actions(&document.actions);
    let init = InitMessage::stored(run.request_id.clone().into(), run.run_id, run.model.clone().map(Into::into));
    Ok([StreamMessage::Init(init), last(run, text, stop_string, mod_result)])
}

/// The result with which a mod ended the run.
#[derive(Default)]
struct ModResult {
    fault: Option<Fault>,
    tool_calls: Option<Value>,
}

impl ModResult {
    fn from_actions(actions: &[ActionRecord]) -> Self {
        let mut result = Self::default();
        for action in actions {
            match action.action_type {
                ActionType::EmitError => result.fault = Some(Fault::Mod),
                ActionType::ToolCalls => {
                    let payload = action.tool_calls.as_ref().and_then(|calls| serde_json::to_value(calls).ok());
                    result.tool_calls = payload.map(|payload| Value::Array(tool_calls_of(&payload).to_vec()));
                }
                _ => {}
            }
        }
        result
    }
}

/// Returns the last message, equal to that of [`super::message::last`] for a run in memory.
fn last(run: RunSummary, text: String, stop_string: Option<String>, mod_result: ModResult) -> StreamMessage<'static> {
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
            completion.stop_string = stop_string.filter(|_| reason == FinishReason::Stop);
            completion.tool_calls = mod_result.tool_calls.filter(|_| reason == FinishReason::ToolCalls);
            completion.stored = true;
            return StreamMessage::Completion(completion);
        }
        (_, FinishReason::Cancelled, Some(EndCause::Timeout)) => StreamErrorMessage::timed_out(None),
        (_, FinishReason::Cancelled, _) => StreamErrorMessage::cancelled(reported),
        _ => StreamErrorMessage::failed(mod_result.fault, run.end_cause, reported),
    };
    let mut error = RunErrorMessage::ended(error, run.request_id.into(), text.into(), Some(usage.into()));
    error.stored = true;
    StreamMessage::Error(error)
}
