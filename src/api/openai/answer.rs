//! The whole answer at once, for a request without `stream`.

use super::shape::{self, Head};
use super::tool_calls;
use super::wire::Route;
use crate::api::{ApiError, App, Kind};
use crate::engine::Output;
use crate::events::{FinishReason, RunEnd};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// Waits for the end of a run and writes its answer. `first` is the output that was awaited already.
pub(super) async fn whole(
    app: &App,
    head: &Head,
    first: Output,
    mut rest: mpsc::Receiver<Output>,
) -> Result<Value, ApiError> {
    let mut tokens = Vec::new();
    let mut next = Some(first);
    let end = loop {
        match next {
            Some(Output::Text(delta)) => shape::collect(head.answer, &mut tokens, delta),
            Some(Output::Retract { chars }) => shape::retract(&mut tokens, chars),
            Some(Output::Ended(end)) => break end,
            None => return Err(ApiError::internal("the engine dropped the run")),
        }
        next = tokio::select! {
            output = rest.recv() => output,
            () = app.stopped() => return Err(ApiError::unavailable("the server is stopping").retry_after(1)),
        };
    };
    failure(&end, head).map_or_else(|| Ok(answer(head, &end, &tokens)), Err)
}

/// The error that a run ended with, if it did.
pub(super) fn failure(end: &RunEnd, head: &Head) -> Option<ApiError> {
    let finish = &end.finish;
    let message = finish.message.clone();
    match finish.reason {
        FinishReason::Stop | FinishReason::Length | FinishReason::ToolCalls => None,
        FinishReason::Cancelled => {
            Some(ApiError::unavailable(message.unwrap_or_else(|| "the run was cancelled".into())).retry_after(1))
        }
        FinishReason::Error => {
            let message = message.unwrap_or_else(|| format!("run {} failed", head.run_id));
            Some(ApiError::new(Kind::Unprocessable, message).code("run_failed"))
        }
    }
}

fn answer(
    head: &Head,
    end: &RunEnd,
    tokens: &[(crate::events::TokenMeasure, Vec<crate::events::Alternative>)],
) -> Value {
    let finish = &end.finish;
    let logprobs = head.logprobs(tokens, 0);
    let reason = shape::finish_reason(finish.reason);
    let choice = match head.answer.route {
        Route::Completions => json!({ "index": 0, "text": finish.text, "logprobs": logprobs, "finish_reason": reason }),
        Route::Chat => {
            let mut message = json!({ "role": "assistant", "content": finish.text });
            if let Some(payload) = &finish.tool_calls {
                if finish.text.is_empty() {
                    message["content"] = Value::Null;
                }
                message["tool_calls"] = tool_calls::normalised(payload, &head.run_id.to_string()).into();
            }
            json!({ "index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason })
        }
    };
    let mut object = head.object(json!([choice]), false);
    object.insert("usage".into(), shape::usage(finish.usage));
    object.insert("timings".into(), shape::timings(finish));
    object.insert("thunder".into(), head.thunder());
    Value::Object(object)
}
