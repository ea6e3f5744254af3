//! Streams a chat completion: a chunk with the role, the deltas, the finish reason, optional token counts, `[DONE]`.

use super::response::{self, ChatChunkDelta, ChatCompletionChunk};
use crate::api::shared::chat::{AnswerWriter, ChatDelta, ChatStream, ChatUpdate};
use crate::api::shared::generation::{CollectedTokens, RunTimings, ThunderFields};
use crate::api::shared::sse::{PendingEvents, ServerEvent};
use crate::server::ApiError;

/// Writer of the chunks of a chat completion.
#[derive(Debug, Default)]
pub(super) struct ChatChunkWriter {
    /// For each answer, the tokens whose text is held back; they are sent with the next chunk.
    held_tokens: Vec<CollectedTokens>,
}

impl AnswerWriter for ChatChunkWriter {
    fn on_start(&mut self, chat: &ChatStream, pending: &mut PendingEvents) {
        self.held_tokens = vec![CollectedTokens::default(); chat.len()];
        for answer in 0..chat.len() {
            let mut chunk = ChatCompletionChunk::delta(chat, answer, ChatChunkDelta::START, None);
            chunk.details.thunder = (answer == 0).then(|| response::thunder(chat));
            send(pending, &chunk);
        }
    }

    fn on_update(&mut self, chat: &ChatStream, update: ChatUpdate, pending: &mut PendingEvents) {
        let answer = update.answer;
        if let Some(progress) = update.progress {
            let mut chunk = ChatCompletionChunk::delta(chat, answer, ChatChunkDelta::START, None);
            chunk.prompt_progress = Some(progress.into());
            chunk.details.timings = chat.options.timings_per_token.then(|| RunTimings::from_prompt(progress));
            send(pending, &chunk);
        }
        if chat.options.logprobs.is_some() {
            self.held_tokens[answer].update(update.retracted_tokens, update.tokens);
        }
        for delta in &update.deltas {
            let Some(addition) = ChatChunkDelta::new(delta) else { continue };
            let tokens = std::mem::take(&mut self.held_tokens[answer]);
            let logprobs = response::logprobs(chat, &tokens);
            let mut chunk = ChatCompletionChunk::delta(chat, answer, addition, logprobs);
            if let ChatDelta::Retract(retraction) = delta {
                chunk.details.thunder = Some(ThunderFields::retract(retraction));
            }
            if chat.options.timings_per_token {
                chunk.details.timings = chat.partial_timings(answer);
            }
            send(pending, &chunk);
        }
        if update.end.is_some() {
            self.finish(chat, answer, pending);
        }
    }

    fn on_end(&mut self, _: &ChatStream, pending: &mut PendingEvents) {
        pending.push_back(ServerEvent::data("[DONE]"));
    }

    fn on_error(&mut self, _: &ChatStream, error: &ApiError, pending: &mut PendingEvents) {
        pending.push_back(ServerEvent::json(&error.openai()));
    }
}

impl ChatChunkWriter {
    fn finish(&mut self, chat: &ChatStream, answer: usize, pending: &mut PendingEvents) {
        let tokens = std::mem::take(&mut self.held_tokens[answer]);
        let mut last = ChatCompletionChunk::end(chat, answer, response::logprobs(chat, &tokens));
        if (0..chat.len()).any(|other| chat.finish(other).is_none()) {
            send(pending, &last);
            return;
        }
        last.details.thunder = Some(response::thunder(chat));
        if chat.options.include_usage {
            send(pending, &last);
            last = ChatCompletionChunk::usage(chat);
        }
        send(pending, &last.with_final_fields(chat));
    }
}

fn send(pending: &mut PendingEvents, chunk: &ChatCompletionChunk<'_>) {
    pending.push_back(ServerEvent::json(chunk));
}
