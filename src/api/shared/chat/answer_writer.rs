//! Streams chat answers in any protocol's format, as server-sent events or as JSON lines.

use super::stream::{ChatStream, ChatUpdate};
use crate::api::shared::sse::{self, EventSource, PendingEvents};
use crate::server::ApiError;
use axum::response::Response;
use axum::response::sse::Event;
use std::future::ready;

/// A writer of the events of a chat stream in one protocol's format.
pub(crate) trait AnswerWriter: Send + 'static {
    /// Writes the events that precede all output.
    fn on_start(&mut self, chat: &ChatStream, pending: &mut PendingEvents);
    /// Writes the events for one update.
    fn on_update(&mut self, chat: &ChatStream, update: ChatUpdate, pending: &mut PendingEvents);
    /// Writes the events after the last answer.
    fn on_end(&mut self, chat: &ChatStream, pending: &mut PendingEvents);
    /// Returns the last events, if they have to wait for a result. Those of [`Self::on_end`] are sent meanwhile.
    fn after_end(&mut self) -> impl Future<Output = PendingEvents> + Send {
        ready(PendingEvents::new())
    }
    /// Writes the error that ends the stream.
    fn on_error(&mut self, chat: &ChatStream, error: &ApiError, pending: &mut PendingEvents);
    /// Returns the keep-alive event; `None` sends a comment.
    fn ping_event(&self) -> Option<Event> {
        None
    }
}

/// Returns the response that streams the answers.
pub(crate) fn stream_answers(chat: ChatStream, mut writer: impl AnswerWriter) -> Response {
    let mut pending = PendingEvents::new();
    writer.on_start(&chat, &mut pending);
    let mut keep_alive = sse::comments(chat.options.ping);
    if let Some(ping) = writer.ping_event() {
        keep_alive = keep_alive.map(|keep_alive| keep_alive.event(ping));
    }
    sse::respond(ChatEvents { chat, writer, has_ended: false }, pending, keep_alive)
}

/// Returns the response that streams the answers as JSON lines.
pub(crate) fn stream_answer_lines(chat: ChatStream, mut writer: impl AnswerWriter) -> Response {
    let mut pending = PendingEvents::new();
    writer.on_start(&chat, &mut pending);
    sse::respond_lines(ChatEvents { chat, writer, has_ended: false }, pending)
}

struct ChatEvents<W> {
    chat: ChatStream,
    writer: W,
    /// True after the end of the last answer.
    has_ended: bool,
}

impl<W: AnswerWriter> EventSource for ChatEvents<W> {
    async fn advance(&mut self, pending: &mut PendingEvents) -> bool {
        if self.has_ended {
            pending.extend(self.writer.after_end().await);
            return false;
        }
        match self.chat.next().await {
            Ok(Some(update)) => {
                self.writer.on_update(&self.chat, update, pending);
                true
            }
            Ok(None) => {
                self.writer.on_end(&self.chat, pending);
                self.has_ended = true;
                true
            }
            Err(error) => {
                self.writer.on_error(&self.chat, &error, pending);
                false
            }
        }
    }
}
