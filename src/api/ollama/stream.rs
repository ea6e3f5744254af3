//! Streams an answer as JSON lines: an object for each addition, then one with `"done": true`.
//!
//! A retraction by a mod is a line whose `thunder.retract` has the number of characters and tool calls to remove.

use super::response::{OllamaEnd, OllamaFormat, OllamaMessage, OllamaToolCall, RequestTimes};
use crate::api::shared::chat::sse::ChatEventWriter;
use crate::api::shared::chat::{ChatDelta, ChatStream, ChatUpdate};
use crate::api::shared::generation::ThunderFields;
use crate::api::shared::sse::{PendingEvents, ServerEvent};
use crate::events::TokenId;
use crate::server::ApiError;
use futures::future::BoxFuture;

/// Writer of the lines of an answer.
#[derive(Debug)]
pub(super) struct AnswerLineWriter {
    format: OllamaFormat,
    times: RequestTimes,
    generated: Vec<TokenId>,
}

impl AnswerLineWriter {
    pub(super) fn new(format: OllamaFormat, times: RequestTimes) -> Self {
        Self { format, times, generated: Vec::new() }
    }

    /// Adds the tokens of an update.
    pub(super) fn add_tokens(&mut self, update: &ChatUpdate) {
        self.generated.truncate(self.generated.len().saturating_sub(update.retracted_tokens));
        self.generated.extend(update.tokens.iter().map(|(token, _)| token.token));
    }

    /// Returns the complete answer.
    pub(super) fn complete(&self, chat: &ChatStream) -> String {
        let parsed = chat.message(0);
        let calls = chat.calls(0);
        let message = OllamaMessage {
            content: parsed.content.clone(),
            thinking: parsed.reasoning.clone(),
            tool_calls: calls.iter().enumerate().filter_map(|(index, call)| OllamaToolCall::new(index, call)).collect(),
            ..OllamaMessage::default()
        };
        self.last_line(chat, message)
    }

    fn last_line(&self, chat: &ChatStream, message: OllamaMessage) -> String {
        let end = OllamaEnd::new(chat, self.times);
        let thunder = ThunderFields::run(chat.run());
        self.format.line(&chat.model, message, Some((end, &self.generated)), Some(thunder))
    }
}

impl ChatEventWriter for AnswerLineWriter {
    fn on_start(&mut self, _: &ChatStream, _: &mut PendingEvents) {}

    fn on_update(&mut self, chat: &ChatStream, update: ChatUpdate, pending: &mut PendingEvents) {
        self.add_tokens(&update);
        for delta in update.deltas {
            let mut message = OllamaMessage::default();
            let mut thunder = None;
            match delta {
                ChatDelta::Reasoning(text) => message.thinking = text,
                ChatDelta::Content(text) => message.content = text,
                ChatDelta::ToolCall { .. } | ChatDelta::ToolArguments { .. } => continue,
                ChatDelta::ToolCallEnd(index) => {
                    let calls = chat.calls(0);
                    message.tool_calls.extend(calls.get(index).and_then(|call| OllamaToolCall::new(index, call)));
                }
                ChatDelta::Retract(retraction) => thunder = Some(ThunderFields::retract(&retraction)),
            }
            pending.push_back(ServerEvent::data(self.format.line(&chat.model, message, None, thunder)));
        }
        if update.end.is_some() {
            pending.push_back(ServerEvent::data(self.last_line(chat, OllamaMessage::default())));
        }
    }

    fn on_end(&mut self, _: &ChatStream, _: &mut PendingEvents) -> Option<BoxFuture<'static, PendingEvents>> {
        None
    }

    fn on_error(&mut self, error: &ApiError, pending: &mut PendingEvents) {
        pending.push_back(ServerEvent::json(&error.ollama()));
    }
}
