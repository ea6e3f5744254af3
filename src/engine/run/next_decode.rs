//! The next decode of a run, for the scheduler: its tokens, drafts, outputs and checkpoints.

use super::{Run, RunState};
use crate::engine::captures::TokenCaptures;
use crate::engine::request::Request;
use crate::events::TokenId;
use crate::model::llama::{CheckpointPurpose, EmbeddingRows, LayerSet, TokenOutputs};

/// Maximum rows of logits in one decode of a run, each with a value per token of the vocabulary.
const MAX_LOGIT_ROWS: usize = 256;

/// Maximum attention rows in one decode of a run, each with a value per layer, head and position.
const MAX_ATTENTION_ROWS: usize = 4;

impl Run {
    /// Returns the position from which the run needs logits, if it needs a decode.
    pub fn logits_from(&self) -> Option<usize> {
        match self.state {
            RunState::Decode { logits_from } => Some(logits_from),
            _ => None,
        }
    }

    /// Returns true if the run needs a decode.
    pub fn needs_decode(&self) -> bool {
        self.logits_from().is_some()
    }

    /// Returns true unless a step that needs the slot is in progress: a decode of forced tokens or of prompt
    /// probabilities.
    pub fn is_between_tokens(&self) -> bool {
        self.forced.is_none() && self.prompt_probabilities.is_empty()
    }

    /// Returns the maximum number of tokens for the next decode. Its rows of logits and attention are limited.
    pub fn max_decode_len(&self) -> usize {
        let mut len = match self.next_embeddings() {
            Some(rows) => self.sequence.decode_len().min(rows.count()),
            None => self.sequence.text_decode_len(),
        };
        let kv_len = self.sequence.kv_len();
        let logits_from = self.logits_from().unwrap_or(kv_len);
        len = len.min(logits_from.saturating_sub(kv_len) + MAX_LOGIT_ROWS);
        if self.request.report.attention_rows {
            let rows_from = logits_from.max(self.sequence.prompt_len().saturating_sub(1));
            len = len.min(rows_from.saturating_sub(kv_len) + MAX_ATTENTION_ROWS);
        }
        len
    }

    /// Returns true if the next decode starts with an image.
    pub fn next_is_image(&self) -> bool {
        self.sequence.next_is_image()
    }

    /// Returns the embeddings of the image that the next decode starts with, up to the end of a chunk; `None` if it
    /// starts with text, or if the request lacks the image.
    pub fn next_embeddings(&self) -> Option<EmbeddingRows<'_>> {
        if !self.sequence.next_is_image() {
            return None;
        }
        let (tokens, position) = (self.sequence.tokens(), self.sequence.kv_len());
        self.request.images.iter().find_map(|image| image.embeddings_at(tokens, position))
    }

    /// Returns what the decode of the token at `position` gives; `logits` is true if its logits are needed.
    pub fn token_outputs(&self, position: usize, logits: bool) -> TokenOutputs {
        let len = self.sequence.len();
        // Only the logits at the end of the sequence begin a step.
        let begins_step = logits && position + 1 == len;
        TokenOutputs {
            logits,
            attention: self.attention.is_captured(position, logits, len, self.sequence.prompt_len()),
            lens: self.request.lens && begins_step,
            hidden_states: if begins_step { self.dispatch.hidden_layers() } else { LayerSet::default() },
        }
    }

    /// Sets what was captured with the next logits, before these are passed.
    pub fn set_captures(&mut self, captures: TokenCaptures) {
        if let Some(row) = captures.attention {
            self.attention.set_current(row);
        }
        self.step_logits.set_hidden_states(captures.hidden_states);
    }

    /// Plans the checkpoints of the state.
    pub fn plan_checkpoints(&mut self, logits_from: usize) {
        // Later requests and mods that backtrack can return to a checkpoint in the prompt.
        let in_prompt = self.request.cache_prompt || !self.dispatch.is_empty();
        self.sequence.plan_checkpoints(logits_from, in_prompt);
    }

    /// Returns the purpose of a checkpoint after the last decode, if one is due.
    pub fn take_due_checkpoint(&mut self) -> Option<CheckpointPurpose> {
        self.sequence.take_due_checkpoint(!self.dispatch.is_empty())
    }

    /// Returns the maximum number of tokens to draft for the next decode: as many as the answer has room for. Returns 0
    /// unless the run decodes a single generated token.
    pub fn max_draft(&self) -> usize {
        if !self.has_decoded_prompt() || self.forced.is_some() || self.sequence.decode_len() != 1 {
            return 0;
        }
        let left = self.budget.tokens_left(self.sequence.answer_len());
        left.saturating_sub(1).min(self.sequence.room())
    }

    /// Returns what the decode of a drafted token gives.
    pub fn draft_outputs(&self) -> TokenOutputs {
        let Request { attention, lens, .. } = self.request;
        TokenOutputs { logits: true, attention, lens, hidden_states: self.dispatch.hidden_layers() }
    }

    /// Returns true if `token` at `position` is the next token that the run must decode, so that logits after a drafted
    /// token there are valid.
    pub fn continues_with(&self, position: usize, token: TokenId) -> bool {
        self.needs_decode()
            && self.sequence.kv_len() == position
            && self.sequence.tokens().get(position) == Some(&token)
    }

    /// Sets the token that was drafted for the next step, before its logits are passed.
    pub fn set_drafted(&mut self, token: Option<TokenId>) {
        self.step_logits.set_drafted(token);
    }

    /// Counts a draft of `tokens` tokens.
    pub fn count_draft(&mut self, tokens: usize) {
        self.drafts.drafts += 1;
        self.drafts.drafted += tokens as u32;
    }

    /// Counts an accepted token of a draft.
    pub fn count_accepted(&mut self) {
        self.drafts.accepted += 1;
    }
}
