//! A chat completion in chunks: the role alone, then what is said, then the finish reason, counts on demand, `[DONE]`.

use super::shape::{self, Tokens};
use crate::api::ApiError;
use crate::api::chat::stream::{Dialect, Ready};
use crate::api::chat::{Heard, Said, Talk};
use crate::api::generation;
use futures::future::BoxFuture;
use serde_json::{Map, Value, json};

/// Writes the chunks.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    /// Tokens whose text is held back, and that go with the next chunk; for each answer.
    pending: Vec<Tokens>,
}

impl Dialect for Chunks {
    fn begin(&mut self, talk: &Talk, ready: &mut Ready) {
        self.pending = vec![Vec::new(); talk.len()];
        for answer in 0..talk.len() {
            let mut object = chunk(talk, answer, &json!({ "role": "assistant", "content": null }), &Value::Null);
            if answer == 0 {
                object.insert("thunder".into(), shape::thunder(talk));
            }
            send(ready, object);
        }
    }

    fn heard(&mut self, talk: &Talk, heard: Heard, ready: &mut Ready) {
        let answer = heard.answer;
        if let Some(progress) = heard.progress {
            let mut object = chunk(talk, answer, &json!({ "role": "assistant", "content": null }), &Value::Null);
            object.insert("prompt_progress".into(), generation::prompt_progress(progress));
            if talk.wishes.timings_per_token {
                object.insert("timings".into(), generation::prompt_timings(progress));
            }
            send(ready, object);
        }
        if talk.wishes.logprobs.is_some() {
            shape::collect(&mut self.pending[answer], heard.tokens, heard.taken_back);
        }
        for said in heard.said.into_iter().filter(|said| !matches!(said, Said::Called(_))) {
            let tokens = std::mem::take(&mut self.pending[answer]);
            let logprobs = shape::logprobs(talk, &tokens);
            let mut object = chunk(talk, answer, &delta(&said), &logprobs);
            if let Said::Retract(void) = said {
                let mut retract = json!({ "chars": void.content });
                if void.reasoning > 0 {
                    retract["reasoning_chars"] = void.reasoning.into();
                }
                if void.calls > 0 {
                    retract["tool_calls"] = void.calls.into();
                }
                object.insert("thunder".into(), json!({ "retract": retract }));
            }
            if talk.wishes.timings_per_token
                && let Some(timings) = talk.timings_so_far(answer)
            {
                object.insert("timings".into(), timings);
            }
            send(ready, object);
        }
        if heard.end.is_some() {
            self.finish(talk, answer, ready);
        }
    }

    fn end(&mut self, _: &Talk, ready: &mut Ready) -> Option<BoxFuture<'static, Ready>> {
        ready.push_back((None, "[DONE]".into()));
        None
    }

    fn failed(&mut self, error: &ApiError, ready: &mut Ready) {
        ready.push_back((None, error.openai().to_string()));
    }
}

impl Chunks {
    fn finish(&mut self, talk: &Talk, answer: usize, ready: &mut Ready) {
        let tokens = std::mem::take(&mut self.pending[answer]);
        let choice = json!({ "index": answer, "delta": {}, "logprobs": shape::logprobs(talk, &tokens),
                             "finish_reason": talk.reason(answer) });
        let mut last = shape::object(talk, json!([choice]), true);
        if (0..talk.len()).any(|other| talk.finish(other).is_none()) {
            send(ready, last);
            return;
        }
        last.insert("thunder".into(), shape::thunder(talk));
        if talk.wishes.include_usage {
            send(ready, last);
            last = shape::object(talk, json!([]), true);
            last.insert("usage".into(), shape::usage(talk));
        }
        shape::ending(talk, &mut last);
        send(ready, last);
    }
}

fn delta(said: &Said) -> Value {
    match said {
        Said::Reasoning(text) => json!({ "reasoning_content": text }),
        Said::Content(text) => json!({ "content": text }),
        Said::Call { index, id, name } => json!({ "tool_calls": [{ "index": index, "id": id, "type": "function",
                                                  "function": { "name": name, "arguments": "" } }] }),
        Said::Arguments { index, text } => {
            json!({ "tool_calls": [{ "index": index, "function": { "arguments": text } }] })
        }
        Said::Called(_) => json!({}),
        Said::Retract(_) => json!({ "content": "" }),
    }
}

fn chunk(talk: &Talk, answer: usize, delta: &Value, logprobs: &Value) -> Map<String, Value> {
    let choice = json!({ "index": answer, "delta": delta, "logprobs": logprobs, "finish_reason": null });
    shape::object(talk, json!([choice]), true)
}

fn send(ready: &mut Ready, object: Map<String, Value>) {
    ready.push_back((None, Value::Object(object).to_string()));
}
