//! Streams a message: `message_start`, each content block with its start, deltas and stop, `message_delta`,
//! `message_stop`.
//!
//! Retractions of mods are sent as the event `thunder_retract`, which clients ignore unless they support it.

use super::response;
use crate::api::shared::chat::sse::ChatEventWriter;
use crate::api::shared::chat::{ChatDelta, ChatStream, ChatUpdate};
use crate::api::shared::sse::{PendingEvents, push_named};
use crate::server::ApiError;
use axum::response::sse::Event;
use futures::future::BoxFuture;
use serde_json::{Value, json};

/// Writes the events of a message.
#[derive(Debug)]
pub(super) struct MessageEvents {
    stop_sequences: Vec<String>,
    block: Option<Block>,
    /// Number of blocks started.
    count: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Call,
}

impl MessageEvents {
    pub(super) fn new(stop_sequences: Vec<String>) -> Self {
        Self { stop_sequences, block: None, count: 0 }
    }

    fn open(&mut self, block: Block, content: &Value, pending: &mut PendingEvents) {
        self.close(pending);
        let start = json!({ "type": "content_block_start", "index": self.count, "content_block": content });
        push_named(pending, "content_block_start", &start);
        self.count += 1;
        self.block = Some(block);
    }

    fn close(&mut self, pending: &mut PendingEvents) {
        let Some(block) = self.block.take() else { return };
        if block == Block::Thinking {
            self.delta(&json!({ "type": "signature_delta", "signature": "" }), pending);
        }
        push_named(pending, "content_block_stop", &json!({ "type": "content_block_stop", "index": self.count - 1 }));
    }

    fn delta(&self, delta: &Value, pending: &mut PendingEvents) {
        let index = self.count.saturating_sub(1);
        let event = json!({ "type": "content_block_delta", "index": index, "delta": delta });
        push_named(pending, "content_block_delta", &event);
    }
}

impl ChatEventWriter for MessageEvents {
    fn on_start(&mut self, chat: &ChatStream, pending: &mut PendingEvents) {
        let mut message = response::empty_message(chat);
        message["thunder"] = response::thunder(chat);
        push_named(pending, "message_start", &json!({ "type": "message_start", "message": message }));
        push_named(pending, "ping", &json!({ "type": "ping" }));
    }

    fn on_update(&mut self, chat: &ChatStream, update: ChatUpdate, pending: &mut PendingEvents) {
        for delta in update.deltas {
            match delta {
                ChatDelta::Reasoning(text) => {
                    if self.block != Some(Block::Thinking) {
                        let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
                        self.open(Block::Thinking, &block, pending);
                    }
                    self.delta(&json!({ "type": "thinking_delta", "thinking": text }), pending);
                }
                ChatDelta::Content(text) => {
                    if self.block != Some(Block::Text) {
                        self.open(Block::Text, &json!({ "type": "text", "text": "" }), pending);
                    }
                    self.delta(&json!({ "type": "text_delta", "text": text }), pending);
                }
                ChatDelta::ToolCall { id, name, .. } => {
                    let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                    self.open(Block::Call, &block, pending);
                }
                ChatDelta::ToolArguments { text, .. } => {
                    self.delta(&json!({ "type": "input_json_delta", "partial_json": text }), pending);
                }
                ChatDelta::ToolCallEnd(_) => self.close(pending),
                ChatDelta::Retract(void) => {
                    self.close(pending);
                    let event = json!({ "type": "thunder_retract", "chars": void.content,
                                        "reasoning_chars": void.reasoning, "tool_calls": void.calls });
                    push_named(pending, "thunder_retract", &event);
                }
            }
        }
        if update.end.is_some() {
            self.close(pending);
            let (reason, stop) = response::stop_reason(chat, &self.stop_sequences);
            let event = json!({ "type": "message_delta", "delta": { "stop_reason": reason, "stop_sequence": stop },
                                "usage": response::usage(chat) });
            push_named(pending, "message_delta", &event);
        }
    }

    fn on_end(&mut self, _: &ChatStream, pending: &mut PendingEvents) -> Option<BoxFuture<'static, PendingEvents>> {
        push_named(pending, "message_stop", &json!({ "type": "message_stop" }));
        None
    }

    fn on_error(&mut self, error: &ApiError, pending: &mut PendingEvents) {
        push_named(pending, "error", &error.anthropic());
    }

    fn ping_event(&self) -> Option<Event> {
        Some(Event::default().event("ping").data("{\"type\":\"ping\"}"))
    }
}
