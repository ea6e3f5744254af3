//! Streams a response as numbered events: its start, each item with start, deltas and end, and the complete response.
//!
//! Retractions of mods are sent as the event `thunder.retract`; the response in the last event is always correct.

use super::response::{self, EchoedFields};
use super::stored::ResponseRecord;
use crate::api::shared::chat::sse::ChatEventWriter;
use crate::api::shared::chat::{ChatDelta, ChatStream, ChatUpdate};
use crate::api::shared::generation;
use crate::api::shared::sse::{PendingEvents, push_named};
use crate::server::ApiError;
use futures::future::BoxFuture;
use serde_json::{Value, json};

/// Writes the events of a response.
pub(super) struct ResponseEvents {
    echo: EchoedFields,
    record: Option<ResponseRecord>,
    sequence: u64,
    /// Completed items.
    output: Vec<Value>,
    item: Option<Item>,
}

/// The item that is being written.
#[derive(Debug)]
struct Item {
    id: String,
    kind: ItemKind,
    text: String,
}

#[derive(Debug, PartialEq, Eq)]
enum ItemKind {
    Thoughts,
    Text,
    Call { id: String, name: String },
}

impl ResponseEvents {
    pub(super) fn new(echo: EchoedFields, record: Option<ResponseRecord>) -> Self {
        Self { echo, record, sequence: 0, output: Vec::new(), item: None }
    }

    fn send(&mut self, name: &'static str, event: Value, pending: &mut PendingEvents) {
        send(name, self.sequence, event, pending);
        self.sequence += 1;
    }

    fn open(&mut self, chat: &ChatStream, kind: ItemKind, pending: &mut PendingEvents) {
        self.close(chat, "completed", pending);
        let index = self.output.len();
        let item = match &kind {
            ItemKind::Thoughts => response::reasoning(chat, index, "", false),
            ItemKind::Text => response::message(chat, index, None, "in_progress"),
            ItemKind::Call { id, name } => response::function_call(chat, index, id, name, "", "in_progress"),
        };
        let id = item["id"].as_str().unwrap_or_default().to_owned();
        self.send("response.output_item.added", json!({ "output_index": index, "item": item }), pending);
        let part = match kind {
            ItemKind::Thoughts => Some(json!({ "type": "reasoning_text", "text": "" })),
            ItemKind::Text => Some(response::part("")),
            ItemKind::Call { .. } => None,
        };
        if let Some(part) = part {
            let event = json!({ "item_id": id, "output_index": index, "content_index": 0, "part": part });
            self.send("response.content_part.added", event, pending);
        }
        self.item = Some(Item { id, kind, text: String::new() });
    }

    fn piece(&mut self, chat: &ChatStream, text: &str, pending: &mut PendingEvents) {
        let index = self.output.len();
        let Some(item) = &mut self.item else { return };
        item.text.push_str(text);
        let mut event = json!({ "item_id": item.id, "output_index": index, "delta": text });
        let name = match item.kind {
            ItemKind::Thoughts => "response.reasoning_text.delta",
            ItemKind::Text => "response.output_text.delta",
            ItemKind::Call { .. } => "response.function_call_arguments.delta",
        };
        match item.kind {
            ItemKind::Thoughts => event["content_index"] = 0.into(),
            ItemKind::Text => {
                event["content_index"] = 0.into();
                event["logprobs"] = json!([]);
            }
            ItemKind::Call { .. } => {}
        }
        if let Some(timings) = chat.partial_timings(0).filter(|_| chat.options.timings_per_token) {
            event["timings"] = timings;
        }
        self.send(name, event, pending);
    }

    fn close(&mut self, chat: &ChatStream, status: &str, pending: &mut PendingEvents) {
        let index = self.output.len();
        let Some(Item { id, kind, text }) = self.item.take() else { return };
        let part = |part: Value| json!({ "item_id": id, "output_index": index, "content_index": 0, "part": part });
        let item = match &kind {
            ItemKind::Thoughts => {
                let event = json!({ "item_id": id, "output_index": index, "content_index": 0, "text": text });
                self.send("response.reasoning_text.done", event, pending);
                let event = part(json!({ "type": "reasoning_text", "text": text }));
                self.send("response.content_part.done", event, pending);
                response::reasoning(chat, index, &text, true)
            }
            ItemKind::Text => {
                let event = json!({ "item_id": id, "output_index": index, "content_index": 0, "text": text,
                                    "logprobs": [] });
                self.send("response.output_text.done", event, pending);
                self.send("response.content_part.done", part(response::part(&text)), pending);
                response::message(chat, index, Some(&text), status)
            }
            ItemKind::Call { id: call, name } => {
                let event = json!({ "item_id": id, "output_index": index, "name": name, "arguments": text });
                self.send("response.function_call_arguments.done", event, pending);
                response::function_call(chat, index, call, name, &text, status)
            }
        };
        self.send("response.output_item.done", json!({ "output_index": index, "item": item.clone() }), pending);
        self.output.push(item);
    }
}

impl ChatEventWriter for ResponseEvents {
    fn on_start(&mut self, chat: &ChatStream, pending: &mut PendingEvents) {
        let start = json!({ "response": response::empty_response(chat, &self.echo, "in_progress") });
        self.send("response.created", start.clone(), pending);
        self.send("response.in_progress", start, pending);
    }

    fn on_update(&mut self, chat: &ChatStream, update: ChatUpdate, pending: &mut PendingEvents) {
        let is = |item: &Option<Item>, kind: &ItemKind| item.as_ref().is_some_and(|item| item.kind == *kind);
        if let Some(progress) = update.progress {
            let mut event = json!({ "response": response::empty_response(chat, &self.echo, "in_progress"),
                                    "prompt_progress": generation::prompt_progress(progress) });
            if chat.options.timings_per_token {
                event["timings"] = generation::prompt_timings(progress);
            }
            self.send("response.in_progress", event, pending);
        }
        for delta in update.deltas {
            match delta {
                ChatDelta::Reasoning(text) => {
                    if !is(&self.item, &ItemKind::Thoughts) {
                        self.open(chat, ItemKind::Thoughts, pending);
                    }
                    self.piece(chat, &text, pending);
                }
                ChatDelta::Content(text) => {
                    if !is(&self.item, &ItemKind::Text) {
                        self.open(chat, ItemKind::Text, pending);
                    }
                    self.piece(chat, &text, pending);
                }
                ChatDelta::ToolCall { id, name, .. } => self.open(chat, ItemKind::Call { id, name }, pending),
                ChatDelta::ToolArguments { text, .. } => self.piece(chat, &text, pending),
                ChatDelta::ToolCallEnd(_) => self.close(chat, "completed", pending),
                ChatDelta::Retract(void) => {
                    let event = json!({ "chars": void.content, "reasoning_chars": void.reasoning,
                                        "tool_calls": void.calls });
                    self.send("thunder.retract", event, pending);
                }
            }
        }
    }

    fn on_end(&mut self, chat: &ChatStream, pending: &mut PendingEvents) -> Option<BoxFuture<'static, PendingEvents>> {
        let cut = chat.reason(0) == "length";
        self.close(chat, if cut { "incomplete" } else { "completed" }, pending);
        let response = response::response(chat, &self.echo);
        let name = if cut { "response.incomplete" } else { "response.completed" };
        // llama-server sends the timings next to the response.
        let timings = chat.finish(0).map(generation::timings);
        let Some(record) = self.record.take() else {
            self.send(name, json!({ "response": response, "timings": timings }), pending);
            return None;
        };
        let sequence = self.sequence;
        // The response is stored before the last event is sent because a client may then continue it immediately.
        Some(Box::pin(async move {
            let (mut last, response) = (PendingEvents::new(), record.save(response).await);
            send(name, sequence, json!({ "response": response, "timings": timings }), &mut last);
            last
        }))
    }

    fn on_error(&mut self, error: &ApiError, pending: &mut PendingEvents) {
        let rendered = error.openai().error;
        let event = json!({ "code": rendered.code, "message": rendered.message, "param": rendered.param });
        self.send("error", event, pending);
    }
}

fn send(name: &'static str, sequence: u64, mut event: Value, pending: &mut PendingEvents) {
    event["type"] = name.into();
    event["sequence_number"] = sequence.into();
    push_named(pending, name, &event);
}
