//! The whole answer at once, for a request without `stream`.

use super::shape::{self, Head};
use super::tool_calls;
use super::wire::Route;
use crate::api::{ApiError, App, generation};
use crate::engine::Output;
use crate::events::RunEnd;
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
    let mut next = first;
    let end = loop {
        match next {
            Output::Text(delta) => shape::collect(head.answer, &mut tokens, delta),
            Output::Retract { chars } => shape::retract(&mut tokens, chars),
            Output::Ended(end) => break end,
            Output::Prompt(_) | Output::Progress(_) => {}
        }
        next = generation::next(app, &mut rest).await?;
    };
    generation::failure(&end, head.run_id).map_or_else(|| Ok(answer(head, &end, &tokens)), Err)
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
    object.insert("timings".into(), generation::timings(finish));
    object.insert("thunder".into(), head.thunder());
    Value::Object(object)
}
