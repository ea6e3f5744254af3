//! A message as events: its head, each block with its beginning, pieces and end, why it ended, its end.
//!
//! What a mod takes back is told in an event `thunder_retract`, which clients that do not know it ignore.

use super::shape;
use crate::api::ApiError;
use crate::api::chat::stream::{Dialect, Ready, typed};
use crate::api::chat::{Heard, Said, Talk};
use axum::response::sse::Event;
use futures::future::BoxFuture;
use serde_json::{Value, json};

/// Writes the events.
#[derive(Debug)]
pub(super) struct Events {
    stops: Vec<String>,
    block: Option<Block>,
    /// Blocks that have begun.
    count: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Call,
}

impl Events {
    pub(super) fn new(stops: Vec<String>) -> Self {
        Self { stops, block: None, count: 0 }
    }

    fn open(&mut self, block: Block, content: &Value, ready: &mut Ready) {
        self.close(ready);
        let start = json!({ "type": "content_block_start", "index": self.count, "content_block": content });
        typed(ready, "content_block_start", &start);
        self.count += 1;
        self.block = Some(block);
    }

    fn close(&mut self, ready: &mut Ready) {
        let Some(block) = self.block.take() else { return };
        if block == Block::Thinking {
            self.delta(&json!({ "type": "signature_delta", "signature": "" }), ready);
        }
        typed(ready, "content_block_stop", &json!({ "type": "content_block_stop", "index": self.count - 1 }));
    }

    fn delta(&self, delta: &Value, ready: &mut Ready) {
        let index = self.count.saturating_sub(1);
        let event = json!({ "type": "content_block_delta", "index": index, "delta": delta });
        typed(ready, "content_block_delta", &event);
    }
}

impl Dialect for Events {
    fn begin(&mut self, talk: &Talk, ready: &mut Ready) {
        let mut message = shape::head(talk);
        message["thunder"] = shape::thunder(talk);
        typed(ready, "message_start", &json!({ "type": "message_start", "message": message }));
        typed(ready, "ping", &json!({ "type": "ping" }));
    }

    fn heard(&mut self, talk: &Talk, heard: Heard, ready: &mut Ready) {
        for said in heard.said {
            match said {
                Said::Reasoning(text) => {
                    if self.block != Some(Block::Thinking) {
                        let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
                        self.open(Block::Thinking, &block, ready);
                    }
                    self.delta(&json!({ "type": "thinking_delta", "thinking": text }), ready);
                }
                Said::Content(text) => {
                    if self.block != Some(Block::Text) {
                        self.open(Block::Text, &json!({ "type": "text", "text": "" }), ready);
                    }
                    self.delta(&json!({ "type": "text_delta", "text": text }), ready);
                }
                Said::Call { id, name, .. } => {
                    let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                    self.open(Block::Call, &block, ready);
                }
                Said::Arguments { text, .. } => {
                    self.delta(&json!({ "type": "input_json_delta", "partial_json": text }), ready);
                }
                Said::Called(_) => self.close(ready),
                Said::Retract(void) => {
                    self.close(ready);
                    let event = json!({ "type": "thunder_retract", "chars": void.content,
                                        "reasoning_chars": void.reasoning, "tool_calls": void.calls });
                    typed(ready, "thunder_retract", &event);
                }
            }
        }
        if heard.end.is_some() {
            self.close(ready);
            let (reason, stop) = shape::ending(talk, &self.stops);
            let event = json!({ "type": "message_delta", "delta": { "stop_reason": reason, "stop_sequence": stop },
                                "usage": shape::usage(talk) });
            typed(ready, "message_delta", &event);
        }
    }

    fn end(&mut self, _: &Talk, ready: &mut Ready) -> Option<BoxFuture<'static, Ready>> {
        typed(ready, "message_stop", &json!({ "type": "message_stop" }));
        None
    }

    fn failed(&mut self, error: &ApiError, ready: &mut Ready) {
        typed(ready, "error", &error.anthropic());
    }

    fn ping(&self) -> Option<Event> {
        Some(Event::default().event("ping").data("{\"type\":\"ping\"}"))
    }
}
