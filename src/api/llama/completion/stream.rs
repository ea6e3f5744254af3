//! The chunks of a streamed completion.

use super::response::RunResponse;
use crate::api::shared::generation::OutputWriter;
use crate::api::shared::sse::{PendingEvents, ServerEvent, to_json};
use crate::engine::Output;
use crate::server::ApiError;

/// Writer of the chunks of a stream. llama-server sends no `[DONE]` after them.
pub(super) struct LlamaChunkWriter {
    pub(super) responses: Vec<RunResponse>,
}

impl OutputWriter for LlamaChunkWriter {
    fn on_output(&mut self, run: usize, output: Output, pending: &mut PendingEvents) {
        let response = &mut self.responses[run];
        let chunk = match output {
            Output::Text(delta) => to_json(&response.chunk(&delta)),
            Output::Retract { chars, tokens } => {
                response.retract(tokens);
                if chars == 0 {
                    return;
                }
                to_json(&response.retraction_chunk(chars))
            }
            Output::PromptProgress(progress) => to_json(&response.progress_chunk(progress)),
            Output::PromptProbabilities(_) => return,
            Output::Ended(end) => response.final_chunk(&end),
        };
        pending.push_back(ServerEvent::data(chunk));
    }

    fn on_end(&mut self, _: &mut PendingEvents) {}

    fn on_error(&mut self, error: &ApiError, pending: &mut PendingEvents) {
        pending.push_back(ServerEvent::json(&error.llama()));
    }
}
