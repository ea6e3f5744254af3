//! Streams a chat completion: a chunk with the role, the deltas, the finish reason, optional token counts, `[DONE]`.

use super::response;
use crate::api::shared::chat::sse::ChatEventWriter;
use crate::api::shared::chat::{ChatDelta, ChatStream, ChatUpdate, MeasuredTokens};
use crate::api::shared::generation;
use crate::api::shared::sse::{PendingEvents, ServerEvent};
use crate::server::ApiError;
use futures::future::BoxFuture;
use serde_json::{Map, Value, json};

/// Writes the chunks of a chat completion.
#[derive(Debug, Default)]
pub(super) struct ChatChunks {
    /// Per answer, tokens whose text is held back; they are sent with the next chunk.
    held_tokens: Vec<MeasuredTokens>,
}

impl ChatEventWriter for ChatChunks {
    fn on_start(&mut self, chat: &ChatStream, pending: &mut PendingEvents) {
        self.held_tokens = vec![Vec::new(); chat.len()];
        for answer in 0..chat.len() {
            let mut object = chunk(chat, answer, &json!({ "role": "assistant", "content": null }), &Value::Null);
            if answer == 0 {
                object.insert("thunder".into(), response::thunder(chat));
            }
            send(pending, object);
        }
    }

    fn on_update(&mut self, chat: &ChatStream, update: ChatUpdate, pending: &mut PendingEvents) {
        let answer = update.answer;
        if let Some(progress) = update.progress {
            let mut object = chunk(chat, answer, &json!({ "role": "assistant", "content": null }), &Value::Null);
            object.insert("prompt_progress".into(), generation::prompt_progress(progress));
            if chat.options.timings_per_token {
                object.insert("timings".into(), generation::prompt_timings(progress));
            }
            send(pending, object);
        }
        if chat.options.logprobs.is_some() {
            response::update_tokens(&mut self.held_tokens[answer], update.tokens, update.retracted_tokens);
        }
        for delta in update.deltas.into_iter().filter(|delta| !matches!(delta, ChatDelta::ToolCallEnd(_))) {
            let tokens = std::mem::take(&mut self.held_tokens[answer]);
            let logprobs = response::logprobs(chat, &tokens);
            let mut object = chunk(chat, answer, &delta_json(&delta), &logprobs);
            if let ChatDelta::Retract(void) = delta {
                let mut retract = json!({ "chars": void.content });
                if void.reasoning > 0 {
                    retract["reasoning_chars"] = void.reasoning.into();
                }
                if void.calls > 0 {
                    retract["tool_calls"] = void.calls.into();
                }
                object.insert("thunder".into(), json!({ "retract": retract }));
            }
            if chat.options.timings_per_token
                && let Some(timings) = chat.partial_timings(answer)
            {
                object.insert("timings".into(), timings);
            }
            send(pending, object);
        }
        if update.end.is_some() {
            self.finish(chat, answer, pending);
        }
    }

    fn on_end(&mut self, _: &ChatStream, pending: &mut PendingEvents) -> Option<BoxFuture<'static, PendingEvents>> {
        pending.push_back(ServerEvent::data("[DONE]"));
        None
    }

    fn on_error(&mut self, error: &ApiError, pending: &mut PendingEvents) {
        pending.push_back(ServerEvent::json(&error.openai()));
    }
}

impl ChatChunks {
    fn finish(&mut self, chat: &ChatStream, answer: usize, pending: &mut PendingEvents) {
        let tokens = std::mem::take(&mut self.held_tokens[answer]);
        let choice = json!({ "index": answer, "delta": {}, "logprobs": response::logprobs(chat, &tokens),
                             "finish_reason": chat.reason(answer) });
        let mut last = response::object(chat, json!([choice]), true);
        if (0..chat.len()).any(|other| chat.finish(other).is_none()) {
            send(pending, last);
            return;
        }
        last.insert("thunder".into(), response::thunder(chat));
        if chat.options.include_usage {
            send(pending, last);
            last = response::object(chat, json!([]), true);
            last.insert("usage".into(), response::usage(chat));
        }
        response::add_final_fields(chat, &mut last);
        send(pending, last);
    }
}

fn delta_json(delta: &ChatDelta) -> Value {
    match delta {
        ChatDelta::Reasoning(text) => json!({ "reasoning_content": text }),
        ChatDelta::Content(text) => json!({ "content": text }),
        ChatDelta::ToolCall { index, id, name } => {
            json!({ "tool_calls": [{ "index": index, "id": id, "type": "function",
                                                  "function": { "name": name, "arguments": "" } }] })
        }
        ChatDelta::ToolArguments { index, text } => {
            json!({ "tool_calls": [{ "index": index, "function": { "arguments": text } }] })
        }
        ChatDelta::ToolCallEnd(_) => json!({}),
        ChatDelta::Retract(_) => json!({ "content": "" }),
    }
}

fn chunk(chat: &ChatStream, answer: usize, delta: &Value, logprobs: &Value) -> Map<String, Value> {
    let choice = json!({ "index": answer, "delta": delta, "logprobs": logprobs, "finish_reason": null });
    response::object(chat, json!([choice]), true)
}

fn send(pending: &mut PendingEvents, object: Map<String, Value>) {
    pending.push_back(ServerEvent::data(Value::Object(object).to_string()));
}
