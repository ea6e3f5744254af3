//! The chunks of a streamed completion.

use super::response::RunResponse;
use crate::api::shared::generation::stream::OutputWriter;
use crate::api::shared::sse::{PendingEvents, ServerEvent, to_json};
use crate::engine::Output;
use crate::server::ApiError;

/// Writer of the chunks of a stream. llama-server sends no `[DONE]` after them.
pub(super) struct LlamaChunkWriter {
    pub(super) responses: Vec<RunResponse>,
}

impl OutputWriter for LlamaChunkWriter {
    fn write(&mut self, run: usize, output: Output, pending: &mut PendingEvents) {
        let response = &mut self.responses[run];
        let chunk = match output {
            Output::Text(delta) => response.chunk(delta),
            Output::Retract { chars, tokens } => {
                response.retract(tokens);
                if chars == 0 {
                    return;
                }
                to_json(&response.retraction_chunk(chars))
            }
            Output::Progress(progress) => to_json(&response.progress_chunk(progress)),
            Output::Prompt(_) => return,
            Output::Ended(end) => response.final_chunk(&end),
        };
        pending.push_back(ServerEvent::data(chunk));
    }

    fn end(&mut self, _: &mut PendingEvents) {}

    fn error(&self, error: &ApiError) -> String {
        to_json(&error.llama())
    }
}
