//! Streams an answer as JSON lines: an object for each addition, then one with `"done": true`.
//!
//! A retraction by a mod is a line whose `thunder.retract` has the number of characters and tool calls to remove.

use super::response::{OllamaEnd, OllamaFormat, OllamaLine, OllamaMessage, OllamaToolCall, RequestTimes};
use crate::api::shared::chat::{AnswerWriter, ChatDelta, ChatStream, ChatUpdate};
use crate::api::shared::generation::{
    CollectedTokens, OPENAI_NO_LOGPROB, ProbabilityFormatter, ThunderFields, TokenProbabilities,
};
use crate::api::shared::sse::{PendingEvents, ServerEvent};
use crate::engine::MeasuredToken;
use crate::events::TokenId;
use crate::server::ApiError;

/// Writer of the lines of an answer.
#[derive(Debug)]
pub(super) struct AnswerLineWriter {
    format: OllamaFormat,
    /// Tokens of the prompt, if the last line contains them.
    prompt: Option<Vec<TokenId>>,
    times: RequestTimes,
    generated: Vec<TokenId>,
    /// Tokens whose log-probabilities are part of the next line.
    unsent: CollectedTokens,
}

impl AnswerLineWriter {
    pub(super) fn new(format: OllamaFormat, prompt: Option<Vec<TokenId>>, times: RequestTimes) -> Self {
        Self { format, prompt, times, generated: Vec::new(), unsent: CollectedTokens::default() }
    }

    /// Removes the last `retracted` tokens, then appends `added`.
    pub(super) fn update_tokens(&mut self, chat: &ChatStream, retracted: usize, added: Vec<MeasuredToken>) {
        self.generated.truncate(self.generated.len().saturating_sub(retracted));
        self.generated.extend(added.iter().map(|token| token.measurement.token));
        if chat.options.logprobs.is_some() {
            self.unsent.update(retracted, added);
        }
    }

    /// Takes the log-probabilities of the unsent tokens; none unless the client requested them.
    fn take_logprobs(&mut self, chat: &ChatStream) -> Vec<TokenProbabilities> {
        let formatter = ProbabilityFormatter {
            vocabulary: &chat.vocabulary,
            top: chat.options.logprobs.unwrap_or(0),
            after_sampler: chat.options.after_sampler,
            no_logprob: OPENAI_NO_LOGPROB,
        };
        let tokens = std::mem::take(&mut self.unsent);
        tokens.iter().map(|token| formatter.sampled_token(token)).collect()
    }

    /// Returns the complete answer.
    pub(super) fn complete(&mut self, chat: &ChatStream) -> String {
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

    fn last_line(&mut self, chat: &ChatStream, message: OllamaMessage) -> String {
        let line = OllamaLine {
            message,
            logprobs: self.take_logprobs(chat),
            end: Some(OllamaEnd::new(chat, self.times)),
            context: self.prompt.as_ref().map(|prompt| [prompt.as_slice(), &self.generated].concat()),
            thunder: Some(ThunderFields::run(chat.run())),
        };
        self.format.line(&chat.model, line)
    }
}

impl AnswerWriter for AnswerLineWriter {
    fn on_start(&mut self, _: &ChatStream, _: &mut PendingEvents) {}

    fn on_update(&mut self, chat: &ChatStream, update: ChatUpdate, pending: &mut PendingEvents) {
        self.update_tokens(chat, update.retracted_tokens, update.tokens);
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
            let logprobs = self.take_logprobs(chat);
            let line = OllamaLine { message, logprobs, thunder, ..OllamaLine::default() };
            pending.push_back(ServerEvent::data(self.format.line(&chat.model, line)));
        }
        if update.end.is_some() {
            pending.push_back(ServerEvent::data(self.last_line(chat, OllamaMessage::default())));
        }
    }

    fn on_end(&mut self, _: &ChatStream, _: &mut PendingEvents) {}

    fn on_error(&mut self, _: &ChatStream, error: &ApiError, pending: &mut PendingEvents) {
        pending.push_back(ServerEvent::json(&error.ollama()));
    }
}
