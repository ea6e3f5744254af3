//! Converts the events of a run to messages.

use super::error::StreamErrorMessage;
use super::log::{LogBacktrack, LogToken};
use super::response::{
    BacktrackMessage, CompletionMessage, InitMessage, RunErrorMessage, StatusMessage, StatusOperation, StreamLogprob,
    StreamMessage, StreamTiming, TokenMessage, TokenTiming,
};
use super::run::{StreamedRun, StreamedRunEnd};
use crate::engine::PromptProgress;
use crate::events::{EndCause, Finish, FinishReason};
use std::borrow::Cow;
use std::time::Duration;

/// Returns the init message. For a resumed run, `index` entries were sent before, and `text` is their text.
pub(super) fn init<'a>(run: &'a StreamedRun, resumed: Option<(usize, &str)>) -> StreamMessage<'a> {
    let properties = &run.properties;
    let init = InitMessage {
        model_info: Some(&properties.model_info),
        replaces: properties.replaces.as_deref(),
        ..InitMessage::new(run.request_id.as_str().into(), run.id, Some(properties.model.as_str().into()))
    };
    StreamMessage::Init(match resumed {
        Some((index, text)) => init.resumed(index, with_prompt_echo(run, text).into_owned()),
        None => init,
    })
}

/// Returns the message that repeats the prompt, if requested.
pub(super) fn echo(run: &StreamedRun) -> Option<StreamMessage<'_>> {
    let (options, prompt) = (run.properties.options, run.properties.prompt_text.as_str());
    (options.echo_prompt && options.stream).then(|| {
        StreamMessage::Token(TokenMessage {
            request_id: &run.request_id,
            index: 0,
            token: prompt.into(),
            token_id: None,
            echo: true,
            generated_text: options.cumulative.then(|| prompt.into()),
            logprobs: None,
            timing: None,
            finish_reason: None,
            finished: false,
        })
    })
}

/// Returns a token message; `text` is the text including the token.
pub(super) fn token<'a>(run: &'a StreamedRun, index: usize, token: LogToken, text: &'a str) -> StreamMessage<'a> {
    let options = run.properties.options;
    let LogToken { text: own, id, logprobs, elapsed, at, last } = token;
    let logprob = |(token, logprob): (String, f32)| StreamLogprob { token, logprob: logprob.into() };
    // For a run that was stopped or failed, only the last message has the reason.
    let reason = last.filter(|reason| !matches!(reason, FinishReason::Cancelled | FinishReason::Error));
    StreamMessage::Token(TokenMessage {
        request_id: &run.request_id,
        index,
        token: own.into(),
        token_id: id.filter(|_| options.token_ids),
        echo: false,
        generated_text: options.cumulative.then(|| with_prompt_echo(run, text)),
        logprobs: options.logprobs.map(|_| logprobs.into_iter().map(logprob).collect()),
        timing: options.timing.then(|| TokenTiming { token_ms: ms(elapsed), total_ms: ms(at) }),
        finish_reason: reason,
        finished: reason.is_some(),
    })
}

/// Returns a backtrack message; `text` is the remaining text.
pub(super) fn backtrack<'a>(
    run: &'a StreamedRun,
    index: usize,
    backtrack: LogBacktrack,
    text: &'a str,
) -> StreamMessage<'a> {
    StreamMessage::Backtrack(BacktrackMessage {
        request_id: &run.request_id,
        index,
        removed_tokens: backtrack.tokens,
        removed_characters: backtrack.chars,
        removed_text: backtrack.text,
        generated_text: run.properties.options.cumulative.then(|| with_prompt_echo(run, text)),
    })
}

/// Returns the last message of a run.
pub(super) fn last<'a>(run: &'a StreamedRun, ending: &StreamedRunEnd, text: &'a str) -> StreamMessage<'a> {
    let (id, text) = (run.request_id.as_str().into(), with_prompt_echo(run, text));
    let finish = match &ending.outcome {
        Ok(end) => &end.finish,
        Err(error) => return RunErrorMessage::ended(error.streaming(), id, text, None).into(),
    };
    let options = run.properties.options;
    let mut message = ended(id, text, finish, options.timeout);
    if let StreamMessage::Completion(completion) = &mut message {
        completion.timing = options.timing.then(|| StreamTiming {
            first_token_ms: finish.first_token_us.map(|us| ms(Duration::from_micros(us))),
            total_ms: ms(ending.total),
        });
    }
    message
}

/// Returns the last message of a run that ended with `finish`: its completion, or its error with the text so far.
/// `time_limit` is the limit that an error names.
pub(super) fn ended<'a>(
    request_id: Cow<'a, str>,
    text: Cow<'a, str>,
    finish: &Finish,
    time_limit: Option<Duration>,
) -> StreamMessage<'a> {
    let reported = finish.message.as_deref();
    let error = match (finish.reason, finish.cause) {
        (FinishReason::Error, cause) => StreamErrorMessage::failed(finish.fault, cause, reported),
        (FinishReason::Cancelled, Some(EndCause::Timeout)) => StreamErrorMessage::timed_out(time_limit),
        (FinishReason::Cancelled, cause) if !matches!(cause, Some(EndCause::ClientStop | EndCause::Regenerate)) => {
            StreamErrorMessage::cancelled(reported)
        }
        (reason, _) => {
            return StreamMessage::Completion(CompletionMessage {
                stop_string: finish.stop_string.clone(),
                tool_calls: finish.tool_calls.clone(),
                stopped_by: (reason == FinishReason::Cancelled).then_some("client"),
                ..CompletionMessage::new(request_id, text, reason, finish.usage)
            });
        }
    };
    RunErrorMessage::ended(error, request_id, text, Some(finish.usage.into())).into()
}

/// Returns the prompt's progress.
pub(super) fn prompt_progress(run: &StreamedRun, progress: PromptProgress) -> StreamMessage<'_> {
    let PromptProgress { total, cached, processed, elapsed_us } = progress;
    let percent = u64::from(processed) * 100 / u64::from(total.max(1));
    let text = format!("processing the prompt: {processed} of {total} tokens");
    let mut status = StatusMessage::new(StatusOperation::PromptProcessing, percent as u8, text, Some(&run.request_id));
    if processed > cached {
        let left = elapsed_us as f64 / 1e6 * f64::from(total - processed) / f64::from(processed - cached);
        status.eta_seconds = Some((left * 10.0).round() / 10.0);
    }
    status.into()
}

/// Returns the text, after the prompt if the client requested that.
fn with_prompt_echo<'a>(run: &StreamedRun, text: &'a str) -> Cow<'a, str> {
    if run.properties.options.echo_prompt {
        format!("{}{text}", run.properties.prompt_text).into()
    } else {
        text.into()
    }
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}
