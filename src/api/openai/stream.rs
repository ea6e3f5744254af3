//! The answer as server-sent events: the role alone, then text, then the finish reason, counts on demand, `[DONE]`.
//!
//! The stream pulls: a client that does not read stops its own run, and one that has gone drops the stream, and with
//! it the run.

use super::shape::{self, Head};
use super::tool_calls;
use super::wire::Route;
use crate::api::{ApiError, App, generation};
use crate::engine::{Delta, Output};
use crate::events::RunEnd;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::mpsc;

/// Proxies close connections that are silent for longer.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The response that streams a run. `first` is the output that was awaited already.
pub(super) fn respond(app: App, head: Head, first: Output, rest: mpsc::Receiver<Output>) -> Response {
    let mut writer = Writer { head, app, rest, ready: VecDeque::new(), sent_chars: 0, over: false };
    writer.begin();
    writer.take(Some(first));
    let sse = Sse::new(events(writer)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    // nginx would otherwise hold tokens back until its buffer is full.
    ([("x-accel-buffering", "no")], sse).into_response()
}

fn events(writer: Writer) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(writer, |mut writer| async move {
        loop {
            if let Some(data) = writer.ready.pop_front() {
                return Some((Ok(Event::default().data(data)), writer));
            }
            if writer.over {
                return None;
            }
            let output = tokio::select! {
                output = writer.rest.recv() => output,
                () = writer.app.stopped() => {
                    writer.fail(&ApiError::unavailable("the server is stopping"));
                    continue;
                }
            };
            writer.take(output);
        }
    })
}

struct Writer {
    head: Head,
    app: App,
    rest: mpsc::Receiver<Output>,
    /// Data of events that can be sent.
    ready: VecDeque<String>,
    /// Characters of the answer that were sent and not taken back.
    sent_chars: usize,
    over: bool,
}

impl Writer {
    fn begin(&mut self) {
        if self.head.answer.route == Route::Chat {
            let choice = json!({ "index": 0, "delta": { "role": "assistant", "content": null },
                                 "logprobs": null, "finish_reason": null });
            let thunder = self.head.thunder();
            self.chunk(&choice, Some(thunder));
        }
    }

    fn take(&mut self, output: Option<Output>) {
        match output {
            Some(Output::Text(delta)) => self.text(&delta),
            Some(Output::Retract { chars }) => {
                self.sent_chars = self.sent_chars.saturating_sub(chars);
                let choice = self.choice("", &Value::Null);
                self.chunk(&choice, Some(json!({ "retract": { "chars": chars } })));
            }
            Some(Output::Ended(end)) => match generation::failure(&end, self.head.run_id) {
                Some(error) => self.fail(&error),
                None => self.end(&end),
            },
            Some(Output::Prompt(_) | Output::Progress(_)) => {}
            None => self.fail(&ApiError::internal("the engine dropped the run")),
        }
    }

    fn text(&mut self, delta: &Delta) {
        let logprobs = self.head.logprobs(&delta.tokens, self.sent_chars);
        if delta.text.is_empty() && logprobs.is_null() {
            return;
        }
        self.sent_chars += delta.text.chars().count();
        let choice = self.choice(&delta.text, &logprobs);
        self.chunk(&choice, None);
    }

    fn choice(&self, text: &str, logprobs: &Value) -> Value {
        match self.head.answer.route {
            Route::Chat => {
                json!({ "index": 0, "delta": { "content": text }, "logprobs": logprobs, "finish_reason": null })
            }
            Route::Completions => json!({ "index": 0, "text": text, "logprobs": logprobs, "finish_reason": null }),
        }
    }

    fn end(&mut self, end: &RunEnd) {
        let finish = &end.finish;
        if let Some(payload) = &finish.tool_calls
            && self.head.answer.route == Route::Chat
        {
            let calls = tool_calls::normalised(payload, &self.head.run_id.to_string());
            for delta in tool_calls::deltas(&calls) {
                let choice = json!({ "index": 0, "delta": delta, "logprobs": null, "finish_reason": null });
                self.chunk(&choice, None);
            }
        }
        let reason = shape::finish_reason(finish.reason);
        let choice = match self.head.answer.route {
            Route::Chat => json!({ "index": 0, "delta": {}, "logprobs": null, "finish_reason": reason }),
            Route::Completions => json!({ "index": 0, "text": "", "logprobs": null, "finish_reason": reason }),
        };
        let mut last = self.head.object(json!([choice]), true);
        last.insert("thunder".into(), self.head.thunder());
        if self.head.answer.include_usage {
            self.ready.push_back(Value::Object(last).to_string());
            last = self.head.object(json!([]), true);
            last.insert("usage".into(), shape::usage(finish.usage));
        }
        last.insert("timings".into(), generation::timings(finish));
        self.ready.push_back(Value::Object(last).to_string());
        self.ready.push_back("[DONE]".into());
        self.over = true;
    }

    fn fail(&mut self, error: &ApiError) {
        self.ready.push_back(error.openai().to_string());
        self.over = true;
    }

    fn chunk(&mut self, choice: &Value, thunder: Option<Value>) {
        let mut object = self.head.object(json!([choice]), true);
        if let Some(thunder) = thunder {
            object.insert("thunder".into(), thunder);
        }
        self.ready.push_back(Value::Object(object).to_string());
    }
}
