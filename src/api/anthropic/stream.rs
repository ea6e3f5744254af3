//! Streams a message: `message_start`, each content block with its start, deltas and stop, `message_delta`,
//! `message_stop`.
//!
//! A retraction by a mod is sent as the event `thunder_retract`, which clients ignore unless they support it.

use super::response::{ContentBlock, ContentDelta, MessageEnd, MessageEvent, MessageResponse, MessageUsage};
use crate::api::shared::chat::{AnswerWriter, ChatDelta, ChatStream, ChatUpdate};
use crate::api::shared::sse::{PendingEvents, push_typed};
use crate::server::ApiError;
use axum::response::sse::Event;
use serde_json::Map;

/// Writer of the events of a message.
#[derive(Debug)]
pub(super) struct MessageEventWriter {
    stop_sequences: Vec<String>,
    /// The open block.
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

impl MessageEventWriter {
    pub(super) fn new(stop_sequences: Vec<String>) -> Self {
        Self { stop_sequences, block: None, count: 0 }
    }

    fn open(&mut self, block: Block, content_block: ContentBlock, pending: &mut PendingEvents) {
        self.close(pending);
        push_typed(pending, &MessageEvent::ContentBlockStart { index: self.count, content_block });
        self.count += 1;
        self.block = Some(block);
    }

    fn close(&mut self, pending: &mut PendingEvents) {
        let Some(block) = self.block.take() else { return };
        if block == Block::Thinking {
            self.delta(ContentDelta::SignatureDelta { signature: "" }, pending);
        }
        push_typed(pending, &MessageEvent::ContentBlockStop { index: self.count - 1 });
    }

    fn delta(&self, delta: ContentDelta, pending: &mut PendingEvents) {
        push_typed(pending, &MessageEvent::ContentBlockDelta { index: self.count.saturating_sub(1), delta });
    }
}

impl AnswerWriter for MessageEventWriter {
    fn on_start(&mut self, chat: &ChatStream, pending: &mut PendingEvents) {
        push_typed(pending, &MessageEvent::MessageStart { message: Box::new(MessageResponse::without_content(chat)) });
        push_typed(pending, &MessageEvent::Ping);
    }

    fn on_update(&mut self, chat: &ChatStream, update: ChatUpdate, pending: &mut PendingEvents) {
        for delta in update.deltas {
            match delta {
                ChatDelta::Reasoning(thinking) => {
                    if self.block != Some(Block::Thinking) {
                        let block = ContentBlock::Thinking { thinking: String::new(), signature: "" };
                        self.open(Block::Thinking, block, pending);
                    }
                    self.delta(ContentDelta::ThinkingDelta { thinking }, pending);
                }
                ChatDelta::Content(text) => {
                    if self.block != Some(Block::Text) {
                        self.open(Block::Text, ContentBlock::Text { text: String::new() }, pending);
                    }
                    self.delta(ContentDelta::TextDelta { text }, pending);
                }
                ChatDelta::ToolCall { id, name, .. } => {
                    self.open(Block::Call, ContentBlock::ToolUse { id, name, input: Map::new() }, pending);
                }
                ChatDelta::ToolArguments { text, .. } => {
                    self.delta(ContentDelta::InputJsonDelta { partial_json: text }, pending);
                }
                ChatDelta::ToolCallEnd(_) => self.close(pending),
                ChatDelta::Retract(retraction) => {
                    self.close(pending);
                    let event = MessageEvent::ThunderRetract {
                        chars: retraction.content,
                        reasoning_chars: retraction.reasoning,
                        tool_calls: retraction.calls,
                    };
                    push_typed(pending, &event);
                }
            }
        }
        if update.end.is_some() {
            self.close(pending);
            let delta = MessageEnd::new(chat, &self.stop_sequences);
            push_typed(pending, &MessageEvent::MessageDelta { delta, usage: MessageUsage::new(chat) });
        }
    }

    fn on_end(&mut self, _: &ChatStream, pending: &mut PendingEvents) {
        push_typed(pending, &MessageEvent::MessageStop);
    }

    fn on_error(&mut self, _: &ChatStream, error: &ApiError, pending: &mut PendingEvents) {
        push_typed(pending, &error.anthropic());
    }

    fn ping_event(&self) -> Option<Event> {
        Some(Event::default().event("ping").data("{\"type\":\"ping\"}"))
    }
}
