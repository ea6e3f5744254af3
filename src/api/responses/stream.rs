//! A response as events, numbered: its head, each item with its beginning, pieces and end, and the whole at the end.
//!
//! What a mod takes back is told in an event `thunder.retract`; the response at the end is right in any case.

use super::kept::Keeper;
use super::shape::{self, Echo};
use crate::api::ApiError;
use crate::api::chat::stream::{Dialect, Ready, typed};
use crate::api::chat::{Heard, Said, Talk};
use crate::api::generation;
use futures::future::BoxFuture;
use serde_json::{Value, json};

/// Writes the events.
pub(super) struct Events {
    echo: Echo,
    keeper: Option<Keeper>,
    sequence: u64,
    /// Items that have ended.
    output: Vec<Value>,
    item: Option<Item>,
}

/// The item that is being said.
#[derive(Debug)]
struct Item {
    id: String,
    kind: Kind,
    text: String,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Thoughts,
    Text,
    Call { id: String, name: String },
}

impl Events {
    pub(super) fn new(echo: Echo, keeper: Option<Keeper>) -> Self {
        Self { echo, keeper, sequence: 0, output: Vec::new(), item: None }
    }

    fn send(&mut self, name: &'static str, event: Value, ready: &mut Ready) {
        send(name, self.sequence, event, ready);
        self.sequence += 1;
    }

    fn open(&mut self, talk: &Talk, kind: Kind, ready: &mut Ready) {
        self.close(talk, "completed", ready);
        let index = self.output.len();
        let item = match &kind {
            Kind::Thoughts => shape::reasoning(talk, index, "", false),
            Kind::Text => shape::message(talk, index, None, "in_progress"),
            Kind::Call { id, name } => shape::function_call(talk, index, id, name, "", "in_progress"),
        };
        let id = item["id"].as_str().unwrap_or_default().to_owned();
        self.send("response.output_item.added", json!({ "output_index": index, "item": item }), ready);
        let part = match kind {
            Kind::Thoughts => Some(json!({ "type": "reasoning_text", "text": "" })),
            Kind::Text => Some(shape::part("")),
            Kind::Call { .. } => None,
        };
        if let Some(part) = part {
            let event = json!({ "item_id": id, "output_index": index, "content_index": 0, "part": part });
            self.send("response.content_part.added", event, ready);
        }
        self.item = Some(Item { id, kind, text: String::new() });
    }

    fn piece(&mut self, talk: &Talk, text: &str, ready: &mut Ready) {
        let index = self.output.len();
        let Some(item) = &mut self.item else { return };
        item.text.push_str(text);
        let mut event = json!({ "item_id": item.id, "output_index": index, "delta": text });
        let name = match item.kind {
            Kind::Thoughts => "response.reasoning_text.delta",
            Kind::Text => "response.output_text.delta",
            Kind::Call { .. } => "response.function_call_arguments.delta",
        };
        match item.kind {
            Kind::Thoughts => event["content_index"] = 0.into(),
            Kind::Text => {
                event["content_index"] = 0.into();
                event["logprobs"] = json!([]);
            }
            Kind::Call { .. } => {}
        }
        if let Some(timings) = talk.timings_so_far(0).filter(|_| talk.wishes.timings_per_token) {
            event["timings"] = timings;
        }
        self.send(name, event, ready);
    }

    fn close(&mut self, talk: &Talk, status: &str, ready: &mut Ready) {
        let index = self.output.len();
        let Some(Item { id, kind, text }) = self.item.take() else { return };
        let part = |part: Value| json!({ "item_id": id, "output_index": index, "content_index": 0, "part": part });
        let item = match &kind {
            Kind::Thoughts => {
                let event = json!({ "item_id": id, "output_index": index, "content_index": 0, "text": text });
                self.send("response.reasoning_text.done", event, ready);
                let event = part(json!({ "type": "reasoning_text", "text": text }));
                self.send("response.content_part.done", event, ready);
                shape::reasoning(talk, index, &text, true)
            }
            Kind::Text => {
                let event = json!({ "item_id": id, "output_index": index, "content_index": 0, "text": text,
                                    "logprobs": [] });
                self.send("response.output_text.done", event, ready);
                self.send("response.content_part.done", part(shape::part(&text)), ready);
                shape::message(talk, index, Some(&text), status)
            }
            Kind::Call { id: call, name } => {
                let event = json!({ "item_id": id, "output_index": index, "name": name, "arguments": text });
                self.send("response.function_call_arguments.done", event, ready);
                shape::function_call(talk, index, call, name, &text, status)
            }
        };
        self.send("response.output_item.done", json!({ "output_index": index, "item": item.clone() }), ready);
        self.output.push(item);
    }
}

impl Dialect for Events {
    fn begin(&mut self, talk: &Talk, ready: &mut Ready) {
        let head = json!({ "response": shape::head(talk, &self.echo, "in_progress") });
        self.send("response.created", head.clone(), ready);
        self.send("response.in_progress", head, ready);
    }

    fn heard(&mut self, talk: &Talk, heard: Heard, ready: &mut Ready) {
        let is = |item: &Option<Item>, kind: &Kind| item.as_ref().is_some_and(|item| item.kind == *kind);
        if let Some(progress) = heard.progress {
            let mut event = json!({ "response": shape::head(talk, &self.echo, "in_progress"),
                                    "prompt_progress": generation::prompt_progress(progress) });
            if talk.wishes.timings_per_token {
                event["timings"] = generation::prompt_timings(progress);
            }
            self.send("response.in_progress", event, ready);
        }
        for said in heard.said {
            match said {
                Said::Reasoning(text) => {
                    if !is(&self.item, &Kind::Thoughts) {
                        self.open(talk, Kind::Thoughts, ready);
                    }
                    self.piece(talk, &text, ready);
                }
                Said::Content(text) => {
                    if !is(&self.item, &Kind::Text) {
                        self.open(talk, Kind::Text, ready);
                    }
                    self.piece(talk, &text, ready);
                }
                Said::Call { id, name, .. } => self.open(talk, Kind::Call { id, name }, ready),
                Said::Arguments { text, .. } => self.piece(talk, &text, ready),
                Said::Called(_) => self.close(talk, "completed", ready),
                Said::Retract(void) => {
                    let event = json!({ "chars": void.content, "reasoning_chars": void.reasoning,
                                        "tool_calls": void.calls });
                    self.send("thunder.retract", event, ready);
                }
            }
        }
    }

    fn end(&mut self, talk: &Talk, ready: &mut Ready) -> Option<BoxFuture<'static, Ready>> {
        let cut = talk.reason(0) == "length";
        self.close(talk, if cut { "incomplete" } else { "completed" }, ready);
        let response = shape::response(talk, &self.echo);
        let name = if cut { "response.incomplete" } else { "response.completed" };
        // Beside the response, as llama-server has it.
        let timings = talk.finish(0).map(generation::timings);
        let Some(keeper) = self.keeper.take() else {
            self.send(name, json!({ "response": response, "timings": timings }), ready);
            return None;
        };
        let sequence = self.sequence;
        // A client that has heard the end may name the response at once.
        Some(Box::pin(async move {
            let (mut last, response) = (Ready::new(), keeper.keep(response).await);
            send(name, sequence, json!({ "response": response, "timings": timings }), &mut last);
            last
        }))
    }

    fn failed(&mut self, error: &ApiError, ready: &mut Ready) {
        let told = error.openai()["error"].clone();
        let event = json!({ "code": told["code"], "message": told["message"], "param": told["param"] });
        self.send("error", event, ready);
    }
}

fn send(name: &'static str, sequence: u64, mut event: Value, ready: &mut Ready) {
    event["type"] = name.into();
    event["sequence_number"] = sequence.into();
    typed(ready, name, &event);
}
