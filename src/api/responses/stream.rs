//! Streams a response as numbered events: its start, each item with start, deltas and end, and the complete response.
//!
//! A retraction by a mod is sent as the event `thunder.retract`, and removes the text from the item that is open. Completed
//! items are not sent again; the response in the last event is always correct.

use super::event::{ResponseEvent, ResponseStreamEvent};
use super::logprobs::TextTokens;
use super::response::{EchoedFields, OutputItem, OutputPart, ResponseObject, ResponseStatus, call_status};
use super::stored::ResponseRecord;
use crate::api::shared::chat::{AnswerWriter, ChatDelta, ChatStream, ChatUpdate};
use crate::api::shared::generation::{RunTimings, TokenProbabilities};
use crate::api::shared::sse::{PendingEvents, push_typed};
use crate::server::ApiError;

/// Writer of the events of a response.
pub(super) struct ResponseEventWriter {
    echo: EchoedFields,
    record: Option<ResponseRecord>,
    sequence: u64,
    /// Number of completed items.
    completed: usize,
    /// Number of items of each kind.
    counts: ItemCounts,
    item: Option<Item>,
    tokens: TextTokens,
    /// The complete response after the end of the answer, until it is sent.
    complete: Option<(ResponseObject, Option<RunTimings>)>,
}

/// The open item, to which deltas are added.
#[derive(Debug)]
struct Item {
    id: String,
    /// Number of items of its kind before it.
    number: usize,
    kind: ItemKind,
    text: String,
    /// Number of tokens before the item.
    tokens_before: usize,
}

#[derive(Debug, Default)]
struct ItemCounts {
    reasonings: usize,
    messages: usize,
    calls: usize,
}

impl ItemCounts {
    /// Adds an item. Returns the number of items of its kind before it.
    fn add(&mut self, kind: &ItemKind) -> usize {
        let count = match kind {
            ItemKind::Reasoning => &mut self.reasonings,
            ItemKind::Text => &mut self.messages,
            ItemKind::Call { .. } => &mut self.calls,
        };
        *count += 1;
        *count - 1
    }
}

#[derive(Debug, PartialEq, Eq)]
enum ItemKind {
    Reasoning,
    Text,
    Call { id: String, name: String },
}

impl Item {
    /// Removes the last characters of the text, of which those before this item are in completed items.
    fn retract(&mut self, content: usize, reasoning: usize) {
        let chars = match self.kind {
            ItemKind::Reasoning => reasoning,
            ItemKind::Text => content,
            ItemKind::Call { .. } => 0,
        };
        if let Some(last) = chars.checked_sub(1) {
            self.text.truncate(self.text.char_indices().rev().nth(last).map_or(0, |(at, _)| at));
        }
    }
}

/// Sender that numbers the events of a stream and adds them to the pending ones.
struct EventSender<'a> {
    sequence: &'a mut u64,
    pending: &'a mut PendingEvents,
}

impl EventSender<'_> {
    fn send(&mut self, event: ResponseEvent<'_>) {
        let sequence_number = *self.sequence;
        *self.sequence += 1;
        push_typed(self.pending, &ResponseStreamEvent { event, sequence_number });
    }
}

impl ResponseEventWriter {
    pub(super) fn new(echo: EchoedFields, record: Option<ResponseRecord>) -> Self {
        Self {
            echo,
            record,
            sequence: 0,
            completed: 0,
            counts: ItemCounts::default(),
            item: None,
            tokens: TextTokens::default(),
            complete: None,
        }
    }

    fn send(&mut self, event: ResponseEvent<'_>, pending: &mut PendingEvents) {
        EventSender { sequence: &mut self.sequence, pending }.send(event);
    }

    fn open(&mut self, chat: &ChatStream, kind: ItemKind, pending: &mut PendingEvents) {
        self.close(chat, ResponseStatus::Completed, pending);
        let (output_index, number) = (self.completed, self.counts.add(&kind));
        let started = ResponseStatus::InProgress;
        let (item, part) = match &kind {
            ItemKind::Reasoning => {
                (OutputItem::reasoning(chat, number, None, started), Some(OutputPart::reasoning("")))
            }
            ItemKind::Text => {
                (OutputItem::message(chat, number, None, started), Some(OutputPart::text("", Vec::new())))
            }
            ItemKind::Call { id, name } => (OutputItem::function_call(chat, number, id, name, "", started), None),
        };
        self.send(ResponseEvent::OutputItemAdded { output_index, item: &item }, pending);
        let item_id = item.id();
        if let Some(part) = part {
            self.send(ResponseEvent::ContentPartAdded { item_id, output_index, content_index: 0, part }, pending);
        }
        let tokens_before = self.tokens.assigned();
        self.item = Some(Item { id: item_id.to_owned(), number, kind, text: String::new(), tokens_before });
    }

    fn push_delta(
        &mut self,
        chat: &ChatStream,
        delta: &str,
        logprobs: Vec<TokenProbabilities>,
        pending: &mut PendingEvents,
    ) {
        let Self { item: Some(Item { id: item_id, kind, text, .. }), completed: output_index, sequence, .. } = self
        else {
            return;
        };
        text.push_str(delta);
        let (output_index, content_index) = (*output_index, 0);
        let timings = chat.options.timings_per_token.then(|| chat.partial_timings(0)).flatten();
        let event = match kind {
            ItemKind::Reasoning => {
                ResponseEvent::ReasoningTextDelta { item_id, output_index, delta, content_index, timings }
            }
            ItemKind::Text => {
                ResponseEvent::OutputTextDelta { item_id, output_index, delta, content_index, logprobs, timings }
            }
            ItemKind::Call { .. } => {
                ResponseEvent::FunctionCallArgumentsDelta { item_id, output_index, delta, timings }
            }
        };
        EventSender { sequence, pending }.send(event);
    }

    fn close(&mut self, chat: &ChatStream, status: ResponseStatus, pending: &mut PendingEvents) {
        let Some(Item { id, number, kind, text, tokens_before }) = self.item.take() else { return };
        // A mod that replaced the text with calls leaves its tokens.
        let has_text = kind == ItemKind::Text && !text.is_empty();
        let end = if has_text { self.tokens.assigned() } else { tokens_before };
        let logprobs = self.tokens.logprobs(chat, tokens_before..end);
        let (item_id, output_index, content_index) = (id.as_str(), self.completed, 0);
        let (done, part) = match &kind {
            ItemKind::Reasoning => (
                ResponseEvent::ReasoningTextDone { item_id, output_index, content_index, text: &text },
                Some(OutputPart::reasoning(text.as_str())),
            ),
            ItemKind::Text => (
                ResponseEvent::OutputTextDone {
                    item_id,
                    output_index,
                    content_index,
                    text: &text,
                    logprobs: logprobs.clone(),
                },
                Some(OutputPart::text(text.as_str(), logprobs.clone())),
            ),
            ItemKind::Call { name, .. } => {
                (ResponseEvent::FunctionCallArgumentsDone { item_id, output_index, name, arguments: &text }, None)
            }
        };
        self.send(done, pending);
        if let Some(part) = part {
            self.send(ResponseEvent::ContentPartDone { item_id, output_index, content_index, part }, pending);
        }
        let item = match kind {
            ItemKind::Reasoning => OutputItem::reasoning(chat, number, Some(text), status),
            ItemKind::Text => OutputItem::message(chat, number, Some(OutputPart::text(text, logprobs)), status),
            ItemKind::Call { id, name } => {
                OutputItem::function_call(chat, number, &id, &name, &text, call_status(&text))
            }
        };
        self.send(ResponseEvent::OutputItemDone { output_index, item: &item }, pending);
        self.completed += 1;
    }
}

impl AnswerWriter for ResponseEventWriter {
    fn on_start(&mut self, chat: &ChatStream, pending: &mut PendingEvents) {
        let response = ResponseObject::in_progress(chat, self.echo.clone());
        self.send(ResponseEvent::Created { response: &response }, pending);
        let event = ResponseEvent::InProgress { response: &response, prompt_progress: None, timings: None };
        self.send(event, pending);
    }

    fn on_update(&mut self, chat: &ChatStream, mut update: ChatUpdate, pending: &mut PendingEvents) {
        let is_open = |item: &Option<Item>, kind: &ItemKind| item.as_ref().is_some_and(|item| item.kind == *kind);
        if let Some(progress) = update.progress {
            let event = ResponseEvent::InProgress {
                response: &ResponseObject::in_progress(chat, self.echo.clone()),
                prompt_progress: Some(progress.into()),
                timings: chat.options.timings_per_token.then(|| RunTimings::from_prompt(progress)),
            };
            self.send(event, pending);
        }
        self.tokens.add(chat, &mut update);
        for delta in update.deltas {
            match &delta {
                ChatDelta::Reasoning(_) if !is_open(&self.item, &ItemKind::Reasoning) => {
                    self.open(chat, ItemKind::Reasoning, pending);
                }
                ChatDelta::Content(_) if !is_open(&self.item, &ItemKind::Text) => {
                    self.open(chat, ItemKind::Text, pending);
                }
                _ => {}
            }
            let assigned = self.tokens.assign(&delta);
            match delta {
                ChatDelta::Content(text) => {
                    let logprobs = self.tokens.logprobs(chat, assigned);
                    self.push_delta(chat, &text, logprobs, pending);
                }
                ChatDelta::ToolCall { id, name, .. } => self.open(chat, ItemKind::Call { id, name }, pending),
                ChatDelta::Reasoning(text) | ChatDelta::ToolArguments { text, .. } => {
                    self.push_delta(chat, &text, Vec::new(), pending);
                }
                ChatDelta::ToolCallEnd(_) => self.close(chat, ResponseStatus::Completed, pending),
                ChatDelta::Retract(retraction) => {
                    if let Some(item) = &mut self.item {
                        item.retract(retraction.content, retraction.reasoning);
                    }
                    let event = ResponseEvent::Retract {
                        chars: retraction.content,
                        reasoning_chars: retraction.reasoning,
                        tool_calls: retraction.calls,
                    };
                    self.send(event, pending);
                }
            }
        }
    }

    fn on_end(&mut self, chat: &ChatStream, pending: &mut PendingEvents) {
        let response = ResponseObject::complete(chat, &self.tokens, self.echo.clone());
        self.close(chat, response.status, pending);
        // llama-server sends the timings next to the response.
        self.complete = Some((response, chat.finish(0).map(RunTimings::new)));
    }

    async fn after_end(&mut self) -> PendingEvents {
        let mut pending = PendingEvents::new();
        let Some((mut complete, timings)) = self.complete.take() else { return pending };
        if let Some(record) = self.record.take() {
            // The response is stored before the last event is sent, after which a client may continue it immediately.
            complete = record.save(complete).await;
        }
        let response = &complete;
        let event = if response.status == ResponseStatus::Incomplete {
            ResponseEvent::Incomplete { response, timings }
        } else {
            ResponseEvent::Completed { response, timings }
        };
        self.send(event, &mut pending);
        pending
    }

    fn on_error(&mut self, chat: &ChatStream, error: &ApiError, pending: &mut PendingEvents) {
        let rendered = error.openai().error;
        let (code, message, param) = (rendered.code, rendered.message, rendered.param);
        let response = ResponseObject::failed(chat, self.echo.clone(), code, &message);
        self.send(ResponseEvent::Error { code, message, param }, pending);
        self.send(ResponseEvent::Failed { response: &response }, pending);
    }
}
