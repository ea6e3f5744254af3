//! Converts the events of a run to messages.

use super::error::StreamErrorMessage;
use super::log::LogToken;
use super::response::{
    BacktrackMessage, CompletionMessage, InitMessage, RunErrorMessage, StreamLogprob, StreamMessage, StreamTiming,
    StreamUsage, TokenMessage, TokenTiming,
};
use super::run::{StreamedRun, StreamedRunEnd};
use super::status::{StatusMessage, StatusOperation};
use crate::engine::PromptProgress;
use crate::events::{EndCause, Finish, FinishReason, Usage};
use std::borrow::Cow;
use std::time::Duration;

/// Returns the init message. For a resumed run, `index` entries were sent before, and `text` is their text.
pub(super) fn init<'a>(run: &'a StreamedRun, resumed: Option<(usize, &str)>) -> StreamMessage<'a> {
    StreamMessage::Init(InitMessage {
        model_info: Some(&run.head.model_info),
        replaces: run.head.replaces.as_deref(),
        resumed: resumed.is_some(),
        stored: false,
        index: resumed.map(|(index, _)| index),
        generated_text: resumed.map(|(_, text)| with_prompt_echo(run, text).into_owned()),
        ..InitMessage::stored(run.request_id.as_str().into(), run.id, Some(run.head.model.as_str().into()))
    })
}

/// Returns the message that repeats the prompt, if requested.
pub(super) fn echo(run: &StreamedRun) -> Option<StreamMessage<'_>> {
    let (options, prompt) = (run.head.options, run.head.prompt_text.as_str());
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
    let options = run.head.options;
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
    (removed_characters, removed_tokens): (usize, usize),
    removed_text: String,
    text: &'a str,
) -> StreamMessage<'a> {
    StreamMessage::Backtrack(BacktrackMessage {
        request_id: &run.request_id,
        index,
        removed_tokens,
        removed_characters,
        removed_text,
        generated_text: run.head.options.cumulative.then(|| with_prompt_echo(run, text)),
    })
}

/// Returns the last message of a run: its completion, or the error that ended it with the text so far.
pub(super) fn last<'a>(run: &'a StreamedRun, ending: &StreamedRunEnd, text: &'a str) -> StreamMessage<'a> {
    let text = with_prompt_echo(run, text);
    let failed = |error: StreamErrorMessage, text, usage: Option<Usage>| {
        let id = run.request_id.as_str().into();
        StreamMessage::Error(RunErrorMessage::ended(error, id, text, usage.map(StreamUsage::from)))
    };
    match &ending.outcome {
        Ok(end) => {
            let finish = &end.finish;
            let counts = Some(finish.usage);
            match (finish.reason, finish.cause) {
                (FinishReason::Cancelled, Some(EndCause::Timeout)) => {
                    failed(StreamErrorMessage::timed_out(run.head.options.timeout), text, counts)
                }
                (FinishReason::Cancelled, Some(EndCause::ClientStop | EndCause::Regenerate)) => {
                    StreamMessage::Completion(completion(run, ending, finish, text).stopped_by_client())
                }
                (FinishReason::Cancelled, _) => {
                    failed(StreamErrorMessage::cancelled(finish.message.as_deref()), text, counts)
                }
                (FinishReason::Error, _) => {
                    let error = StreamErrorMessage::failed(finish.fault, finish.cause, finish.message.as_deref());
                    failed(error, text, counts)
                }
                _ => StreamMessage::Completion(completion(run, ending, finish, text)),
            }
        }
        Err(error) => failed(error.streaming(), text, None),
    }
}

fn completion<'a>(
    run: &'a StreamedRun,
    ending: &StreamedRunEnd,
    finish: &Finish,
    text: Cow<'a, str>,
) -> CompletionMessage<'a> {
    let timing = || StreamTiming {
        first_token_ms: finish.first_token_us.map(|us| ms(Duration::from_micros(us))),
        total_ms: ms(ending.total),
    };
    CompletionMessage {
        stop_string: finish.stop_string.clone(),
        tool_calls: finish.tool_calls.clone(),
        timing: run.head.options.timing.then(timing),
        ..CompletionMessage::new(run.request_id.as_str().into(), text, finish.reason, finish.usage)
    }
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
    if run.head.options.echo_prompt { format!("{}{text}", run.head.prompt_text).into() } else { text.into() }
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}
