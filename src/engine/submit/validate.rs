//! Checks of a request by the engine, before a run is created.

use crate::engine::error::SubmitError;
use crate::engine::kv::conversation;
use crate::engine::request::{Overflow, Request};
use crate::engine::{Engine, Inner, head_rows};

impl Engine {
    /// Checks that the engine can serve the request, and applies the server's limits to it.
    pub(crate) fn validate(&self, request: &mut Request) -> Result<(), SubmitError> {
        let Inner { model, options, .. } = &*self.inner;
        if !model.generates() {
            return Err(SubmitError::NoGeneration { model: model.name().to_owned() });
        }
        if !self.is_running() {
            return Err(SubmitError::Stopped);
        }
        if let Some(slot) = request.slot.filter(|&slot| slot >= options.parallel) {
            return Err(SubmitError::NoSuchSlot { slot, slots: options.parallel });
        }
        self.complete_images(request)?;
        self.validate_images(request)?;
        self.validate_prompt(request)?;
        self.validate_attention(request)?;
        if request.lens {
            self.check_lens()?;
        }
        request.limits.apply_server_limit(options.max_tokens)
    }

    /// Checks that the prompt has only known tokens and images and fits into the context, possibly after messages are
    /// dropped.
    fn validate_prompt(&self, request: &Request) -> Result<(), SubmitError> {
        let vocabulary = self.inner.model.vocabulary();
        let context = self.inner.options.ctx_size as usize;
        let prompt_tokens = request.prompt.len();
        if prompt_tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if let Some(&token) = request.prompt.iter().find(|&&token| !vocabulary.is_prompt_token(token)) {
            return Err(SubmitError::UnknownToken { token, vocabulary: vocabulary.len() });
        }
        if prompt_tokens < context || request.context_limit(context).is_filled_by(prompt_tokens) {
            return Ok(());
        }
        if request.overflow != Overflow::Evict {
            return Err(SubmitError::PromptTooLong { prompt_tokens, context });
        }
        let parts = conversation::droppable_parts(&request.prompt, &request.spans, vocabulary);
        match conversation::select_parts(parts, prompt_tokens, context - 1, 0) {
            Some(_) => Ok(()),
            None => Err(SubmitError::NothingToDrop { prompt_tokens, context }),
        }
    }

    /// Checks that attention can be captured as requested. A request that only records attention runs without it if the
    /// model does not support it.
    fn validate_attention(&self, request: &mut Request) -> Result<(), SubmitError> {
        if !request.attention {
            return Ok(());
        }
        match self.attention() {
            Ok(support) => head_rows::check(request, support, self.inner.options.ctx_size as usize),
            Err(SubmitError::AttentionUnsupported { .. }) if !request.report.attention_rows => {
                request.attention = false;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}
