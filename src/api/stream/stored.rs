//! Runs that only the database knows any more.

use super::message;
use crate::api::{ApiError, App};
use crate::events::{FinishReason, RunStatus, Usage};
use crate::store::RunSummary;
use crate::trace::fold::Fold;
use serde_json::{Value, json};

/// The beginning and the end of a run, as it would be told now.
///
/// # Errors
/// 404 when there is none; 409 while it goes on elsewhere.
pub(super) async fn messages(app: &App, id: &str) -> Result<[Value; 2], ApiError> {
    let store = app.store()?;
    let run = store.find(id).await?.ok_or_else(|| ApiError::not_found("run", id).at("request_id"))?;
    if run.status == RunStatus::Running {
        let detail = format!("run '{id}' goes on, and was not begun with this protocol on this server");
        return Err(ApiError::conflict(detail).at("request_id"));
    }
    let document = store.document(run.run_id).await?.ok_or_else(|| ApiError::not_found("run", id))?;
    let fold = move || {
        let mut fold = Fold::new();
        document.items().iter().for_each(|item| fold.apply(item));
        fold.answer_text()
    };
    let text = tokio::task::spawn_blocking(fold).await.map_err(ApiError::internal)?;
    let init = json!({ "type": "init", "request_id": run.request_id, "run_id": run.run_id, "model": run.model,
                       "resumed": true, "stored": true });
    Ok([init, last(&run, &text)])
}

fn last(run: &RunSummary, text: &str) -> Value {
    let counts = Usage {
        prompt_tokens: run.prompt_tokens.max(0).cast_unsigned(),
        cached_tokens: run.cached_tokens.max(0).cast_unsigned(),
        completion_tokens: run.completion_tokens.max(0).cast_unsigned(),
    };
    let reason = run.finish_reason.unwrap_or(FinishReason::Stop);
    if matches!(run.status, RunStatus::Done | RunStatus::Cancelled) {
        let reason = if reason == FinishReason::Cancelled { "stop" } else { reason.as_str() };
        return json!({ "type": "completion", "request_id": run.request_id, "generated_text": text,
                       "finish_reason": reason, "usage": message::usage(counts), "stored": true });
    }
    let told = run.message.as_deref().unwrap_or("the run did not end by itself");
    json!({ "type": "error", "error": "internal_error", "message": told, "recoverable": false, "recovery_action": null,
            "request_id": run.request_id, "generated_text": text, "usage": message::usage(counts), "stored": true })
}
