//! Server messages of the streaming protocol.

use super::log::LogToken;
use super::run::{RunEnding, StreamedRun};
use crate::engine::PromptProgress;
use crate::events::{EndCause, Fault, Finish, FinishReason, Usage};
use crate::server::{ApiError, Loaded};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Returns the properties of a model.
pub(super) fn model_info(loaded: &Loaded) -> Value {
    let card = loaded.model().card();
    json!({
        "version": card.architecture,
        "max_tokens": loaded.engine().context_per_slot(),
        "quantization": card.file_type,
        "parameters": card.parameters,
    })
}

/// Returns the init message. For a resumed run, `index` entries were sent before, and `text` is their text.
pub(super) fn init(run: &StreamedRun, resumed: Option<(usize, &str)>) -> Value {
    let mut message = json!({
        "type": "init",
        "request_id": run.request_id,
        "run_id": run.id,
        "model": run.head.model,
        "model_info": run.head.model_info,
    });
    if let Some(replaced) = &run.head.replaces {
        message["replaces"] = replaced.as_str().into();
    }
    if let Some((index, text)) = resumed {
        message["resumed"] = true.into();
        message["index"] = index.into();
        message["generated_text"] = echoed(run, text).into();
    }
    message
}

/// Returns the message that repeats the prompt, if requested.
pub(super) fn echo(run: &StreamedRun) -> Option<Value> {
    let options = run.head.options;
    (options.echo_prompt && options.stream).then(|| {
        let mut message = json!({ "type": "token", "request_id": run.request_id, "index": 0, "token": run.head.prompt_text,
                                  "echo": true });
        if options.cumulative {
            message["generated_text"] = run.head.prompt_text.as_str().into();
        }
        message["finish_reason"] = Value::Null;
        message["finished"] = false.into();
        message
    })
}

/// Returns a token message; `text` is the text including the token.
pub(super) fn token(run: &StreamedRun, index: usize, token: &LogToken, text: &str) -> Value {
    let options = run.head.options;
    let mut message = Map::new();
    message.insert("type".into(), "token".into());
    message.insert("request_id".into(), run.request_id.as_str().into());
    message.insert("index".into(), index.into());
    message.insert("token".into(), token.text.as_str().into());
    if let (true, Some(id)) = (options.token_ids, token.id) {
        message.insert("token_id".into(), id.into());
    }
    if options.cumulative {
        message.insert("generated_text".into(), echoed(run, text).into());
    }
    if let Some(count) = options.logprobs {
        let list = token.logprobs.iter().take(count.max(1));
        let list = list.map(|(token, logprob)| json!({ "token": token, "logprob": logprob }));
        message.insert("logprobs".into(), list.collect());
    }
    if options.timing {
        message.insert("timing".into(), json!({ "token_ms": ms(token.elapsed), "total_ms": ms(token.at) }));
    }
    // For a run that was stopped or failed, only the last message has the reason.
    let reason = token.last.filter(|reason| !matches!(reason, FinishReason::Cancelled | FinishReason::Error));
    message.insert("finish_reason".into(), reason.map(FinishReason::as_str).into());
    message.insert("finished".into(), reason.is_some().into());
    Value::Object(message)
}

/// Returns a backtrack message; `text` is the remaining text.
pub(super) fn backtrack(
    run: &StreamedRun,
    index: usize,
    (chars, tokens): (usize, usize),
    removed: &str,
    text: &str,
) -> Value {
    let mut message = json!({
        "type": "backtrack",
        "request_id": run.request_id,
        "index": index,
        "removed_tokens": tokens,
        "removed_characters": chars,
        "removed_text": removed,
    });
    if run.head.options.cumulative {
        message["generated_text"] = echoed(run, text).into();
    }
    message
}

/// Returns the last message of a run: its completion, or the error that ended it with the text so far.
pub(super) fn last(run: &StreamedRun, over: &RunEnding, text: &str) -> Value {
    let text = echoed(run, text);
    match &over.outcome {
        Ok(end) => {
            let finish = &end.finish;
            let counts = Some(finish.usage);
            match (finish.reason, finish.cause) {
                (FinishReason::Cancelled, Some(EndCause::Timeout)) => {
                    with_partial_text(timed_out(run.head.options.timeout), run, &text, counts)
                }
                (FinishReason::Cancelled, Some(EndCause::ClientStop | EndCause::Regenerate)) => {
                    let mut message = completion(run, over, finish, &text);
                    message["stopped_by"] = "client".into();
                    message
                }
                (FinishReason::Cancelled, _) => {
                    with_partial_text(cancelled_error(finish.message.as_deref()), run, &text, counts)
                }
                (FinishReason::Error, _) => {
                    let error = failed(finish.fault, finish.cause, finish.message.as_deref());
                    with_partial_text(error, run, &text, counts)
                }
                _ => completion(run, over, finish, &text),
            }
        }
        Err(error) => with_partial_text(to_value(error), run, &text, None),
    }
}

fn completion(run: &StreamedRun, over: &RunEnding, finish: &Finish, text: &str) -> Value {
    let mut message = json!({
        "type": "completion",
        "request_id": run.request_id,
        "generated_text": text,
        "finish_reason": finish_reason(finish.reason),
        "usage": usage(finish.usage),
    });
    if let Some(stop) = &finish.stop_string {
        message["stop_string"] = stop.as_str().into();
    }
    if let Some(calls) = &finish.tool_calls {
        message["tool_calls"] = calls.clone();
    }
    if run.head.options.timing {
        let first = finish.first_token_us.map(|us| ms(Duration::from_micros(us)));
        message["timing"] = json!({ "first_token_ms": first, "total_ms": ms(over.total) });
    }
    message
}

/// Returns the token counts.
pub(super) fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

/// Returns a status message about progress or a completed control message.
pub(super) fn status(operation: &str, progress: u8, message: &str, request_id: Option<&str>) -> Value {
    let mut status = json!({ "type": "status", "operation": operation, "progress": progress, "message": message });
    if let Some(id) = request_id {
        status["request_id"] = id.into();
    }
    status
}

/// Returns the prompt's progress.
pub(super) fn prompt_progress(run: &StreamedRun, progress: PromptProgress) -> Value {
    let PromptProgress { total, cached, processed, elapsed_us } = progress;
    let percent = u64::from(processed) * 100 / u64::from(total.max(1));
    let text = format!("processing the prompt: {processed} of {total} tokens");
    let mut status = status("prompt_processing", percent as u8, &text, Some(&run.request_id));
    if processed > cached {
        let left = elapsed_us as f64 / 1e6 * f64::from(total - processed) / f64::from(processed - cached);
        status["eta_seconds"] = ((left * 10.0).round() / 10.0).into();
    }
    status
}

fn to_value(error: &ApiError) -> Value {
    serde_json::to_value(error.streaming()).unwrap_or_default()
}

/// Returns an error message for a run.
pub(super) fn error(error: &ApiError, request_id: Option<&str>) -> Value {
    let mut message = to_value(error);
    if let Some(id) = request_id {
        message["request_id"] = id.into();
    }
    message
}

/// Returns the completion of a run that was stopped before it started.
pub(super) fn never_started(request_id: &str) -> Value {
    json!({ "type": "completion", "request_id": request_id, "generated_text": "", "finish_reason": "stop",
            "usage": usage(Usage::default()), "stopped_by": "client" })
}

/// Returns the error of a failed run.
pub(super) fn failed(fault: Option<Fault>, cause: Option<EndCause>, message: Option<&str>) -> Value {
    let message = message.unwrap_or("the run failed");
    match (fault, cause) {
        (Some(Fault::Mod | Fault::QuoteMod), _) => ended("content_filter", message, None),
        (Some(Fault::Request), _) => ended("invalid_request", message, None),
        (None, Some(EndCause::OutOfMemory)) => ended("memory_pressure", message, Some("retry")),
        (None, _) => ended("internal_error", message, None),
    }
}

/// Returns the error of a run that exceeded its time limit.
pub(super) fn timed_out(limit: Option<Duration>) -> Value {
    let message = match limit {
        Some(limit) => format!("the run exceeded its time limit of {} ms", limit.as_millis()),
        None => "the run exceeded its time limit".to_owned(),
    };
    ended("timeout", &message, Some("retry"))
}

/// Returns the error of a run that the server cancelled.
pub(super) fn cancelled_error(message: Option<&str>) -> Value {
    ended("unavailable", message.unwrap_or("the run was cancelled"), Some("retry"))
}

fn ended(kind: &str, message: &str, action: Option<&str>) -> Value {
    json!({ "type": "error", "error": kind, "message": message, "recoverable": action.is_some(),
            "recovery_action": action })
}

/// Adds the text so far to an error, so that a client can continue from it.
fn with_partial_text(mut error: Value, run: &StreamedRun, text: &str, counts: Option<Usage>) -> Value {
    error["request_id"] = run.request_id.as_str().into();
    error["generated_text"] = text.into();
    if let Some(counts) = counts {
        error["usage"] = usage(counts);
    }
    error
}

/// Returns the finish reason; a stopped run has `stop`.
pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    if reason == FinishReason::Cancelled { FinishReason::Stop.as_str() } else { reason.as_str() }
}

fn echoed(run: &StreamedRun, text: &str) -> String {
    if run.head.options.echo_prompt { format!("{}{text}", run.head.prompt_text) } else { text.to_owned() }
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_kind_follows_the_fault() {
        let kind = |fault, cause, message: &str| {
            let error = failed(fault, cause, Some(message));
            (error["error"].as_str().unwrap().to_owned(), error["recoverable"].as_bool().unwrap())
        };
        assert_eq!(kind(Some(Fault::Mod), None, "out of memory, says a mod"), ("content_filter".into(), false));
        assert_eq!(kind(Some(Fault::Request), None, "no token can be drawn"), ("invalid_request".into(), false));
        assert_eq!(kind(None, Some(EndCause::OutOfMemory), "no room"), ("memory_pressure".into(), true));
        assert_eq!(
            kind(None, Some(EndCause::DecodeFailed), "out of memory, says a log"),
            ("internal_error".into(), false)
        );
        assert_eq!(kind(None, None, "the KV state is damaged"), ("internal_error".into(), false));
    }
}
