//! Tokens of a run, and all positions in them: the end of the prompt, the spans of messages, the number of tokens in
//! the KV cache, and the tokens that a full context evicted.
//!
//! Removals of tokens are only listed here; the scheduler applies them to the KV cache.

use super::evictions::Evictions;
use crate::engine::kv::checkpoints::CheckpointPlan;
use crate::engine::kv::conversation::spans::{cut_spans, shifted_index};
use crate::engine::kv::conversation::{self, Alignment, SlotHistory};
use crate::engine::kv::removal::KvRemoval;
use crate::engine::request::{ContextLimit, Overflow, Request};
use crate::events::{EvictedMessage, Eviction, Span, TokenId, is_image_token};
use crate::model::Vocabulary;
use crate::model::llama::CheckpointPurpose;
use std::ops::Range;
use std::sync::Arc;

/// Tokens of the prompt, then generated tokens.
pub struct Sequence {
    tokens: Vec<TokenId>,
    /// Role of each part of the prompt.
    spans: Vec<Span>,
    /// Number of prompt tokens that are in the context.
    prompt_len: usize,
    /// Number of prompt tokens with which the run began. Later evictions do not change it.
    initial_prompt_len: usize,
    /// Number of tokens at the start whose state the KV cache holds.
    kv_len: usize,
    /// Prompt tokens whose KV state was reused; `None` before the first decode.
    cached_tokens: Option<usize>,
    /// Removals that the KV cache has not applied yet.
    kv_removals: Vec<KvRemoval>,
    /// Number of tokens at the start that have not changed since the last call of [`Sequence::take_unchanged`].
    unchanged: usize,
    /// History of the conversation, which the slot keeps after the run.
    history: SlotHistory,
    evictions: Evictions,
    checkpoints: CheckpointPlan,
    limit: ContextLimit,
    vocabulary: Arc<Vocabulary>,
}

impl Sequence {
    /// Moves the prompt out of a request. `context` is the context size of a slot, in tokens.
    pub fn new(request: &mut Request, vocabulary: Arc<Vocabulary>, context: usize) -> Self {
        let tokens = std::mem::take(&mut request.prompt);
        Self {
            spans: std::mem::take(&mut request.spans),
            prompt_len: tokens.len(),
            initial_prompt_len: tokens.len(),
            tokens,
            kv_len: 0,
            cached_tokens: None,
            kv_removals: Vec::new(),
            unchanged: 0,
            history: SlotHistory::default(),
            evictions: Evictions::default(),
            checkpoints: CheckpointPlan::default(),
            limit: request.context_limit(context),
            vocabulary,
        }
    }

    /// Returns all tokens.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the last token.
    pub fn last(&self) -> Option<TokenId> {
        self.tokens.last().copied()
    }

    /// Returns the roles of the parts of the prompt.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Returns the number of prompt tokens that are in the context.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Returns the number of prompt tokens with which the run began.
    pub fn initial_prompt_len(&self) -> usize {
        self.initial_prompt_len
    }

    /// Returns the number of prompt tokens whose KV state was reused.
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens.unwrap_or_default()
    }

    /// Returns the number of prompt tokens that were decoded, without the cached ones. `is_complete` is true after the
    /// decode of the whole prompt.
    pub fn prompt_decoded(&self, is_complete: bool) -> usize {
        let processed = if is_complete { self.initial_prompt_len } else { self.kv_len.min(self.initial_prompt_len) };
        processed.saturating_sub(self.cached_tokens())
    }

    /// Returns the number of tokens of the answer, including those that a full context evicted.
    pub fn answer_len(&self) -> usize {
        self.generated_in_context() + self.evictions.generated()
    }

    /// Returns the number of generated tokens that are in the context.
    pub fn generated_in_context(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Returns the number of generated tokens that a full context evicted, and the index of the first token that
    /// followed all evicted ones (0 if none were evicted).
    pub fn evicted_generated(&self) -> (usize, usize) {
        (self.evictions.generated(), self.evictions.end())
    }

    /// Returns the number of tokens that a mod can remove: those of the answer after evicted ones. One token always
    /// remains, because the model needs it to continue.
    pub fn removable(&self) -> usize {
        self.tokens.len() - self.prompt_len.max(self.evictions.end()).max(1)
    }

    /// Returns the number of tokens that the context still has room for.
    pub fn room(&self) -> usize {
        self.limit.context.saturating_sub(self.tokens.len())
    }

    /// Returns the size of the context.
    pub fn context(&self) -> usize {
        self.limit.context
    }

    /// Appends a token.
    pub fn push(&mut self, token: TokenId) {
        self.tokens.push(token);
    }

    /// Appends tokens.
    pub fn extend(&mut self, tokens: &[TokenId]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// Removes `count` generated tokens from the end.
    pub fn retract(&mut self, count: usize) {
        self.tokens.truncate(self.tokens.len() - count);
        self.kv_len = self.kv_len.min(self.tokens.len());
        self.unchanged = self.unchanged.min(self.tokens.len());
    }

    /// Removes the whole answer. Returns the number of its tokens, including those that a full context evicted.
    pub fn retract_answer(&mut self) -> usize {
        let count = self.generated_in_context();
        self.retract(count);
        count + self.evictions.clear_answer()
    }

    /// Replaces the prompt with that of a mod, and clears spans and history, which belong to the old prompt.
    pub fn replace_prompt(&mut self, tokens: Vec<TokenId>) {
        self.prompt_len = tokens.len();
        self.initial_prompt_len = tokens.len();
        self.tokens = tokens;
        self.unchanged = 0;
        self.evictions.clear_answer();
        self.history = SlotHistory::default();
        self.spans.clear();
    }

    /// Returns the number of tokens at the start that are the same as in the last call.
    pub fn take_unchanged(&mut self) -> usize {
        std::mem::replace(&mut self.unchanged, self.tokens.len())
    }

    /// Returns the number of tokens that the KV cache holds.
    pub fn kv_len(&self) -> usize {
        self.kv_len
    }

    /// Sets the number of tokens that the KV cache holds: those that the slot's state has in common with the sequence
    /// before a decode, and those before its end after it.
    pub fn set_kv_len(&mut self, kv_len: usize) {
        self.kv_len = kv_len;
    }

    /// Makes the next decode start at the first token: the slot's KV state was lost or must not be used.
    pub fn discard_kv(&mut self) {
        self.kv_len = 0;
    }

    /// Makes the next decode start at `position` or earlier.
    pub fn decode_from(&mut self, position: usize) {
        self.kv_len = self.kv_len.min(position);
    }

    /// Counts the tokens in the KV cache as cached, before the first decode of the run. Returns false if they were counted
    /// before.
    pub fn count_cached_tokens(&mut self) -> bool {
        let is_first = self.cached_tokens.is_none();
        self.cached_tokens.get_or_insert(self.kv_len.min(self.initial_prompt_len));
        is_first
    }

    /// Returns the number of tokens for the next decode: all that the KV cache does not hold, up to the next
    /// checkpoint.
    pub fn decode_len(&self) -> usize {
        self.checkpoints.decode_limit(self.kv_len, self.tokens.len()) - self.kv_len
    }

    /// Returns true if the next decode starts with a placeholder of an image.
    pub fn next_is_image(&self) -> bool {
        self.tokens.get(self.kv_len).is_some_and(|&token| is_image_token(token))
    }

    /// Returns the number of tokens for the next decode before the next image.
    pub fn text_decode_len(&self) -> usize {
        let rest = self.tokens.iter().skip(self.kv_len).take(self.decode_len());
        rest.take_while(|&&token| !is_image_token(token)).count()
    }

    /// Returns the first position from `position` on that is not within an image.
    fn outside_image(&self, mut position: usize) -> usize {
        let is_image = |at: usize| self.tokens.get(at).is_some_and(|&token| is_image_token(token));
        while position > 0 && is_image(position - 1) && is_image(position) {
            position += 1;
        }
        position
    }

    /// Takes the removals that the KV cache has not applied yet.
    pub fn take_kv_removals(&mut self) -> Vec<KvRemoval> {
        std::mem::take(&mut self.kv_removals)
    }

    /// Plans the checkpoints of the state, before the first decode. `in_prompt` is true if the prompt gets checkpoints.
    pub fn plan_checkpoints(&mut self, logits_from: usize, in_prompt: bool) {
        let last_user = self.spans.iter().rfind(|span| span.role == "user").map(|span| span.start as usize);
        self.checkpoints = if in_prompt {
            CheckpointPlan::for_prompt(self.kv_len, last_user, logits_from)
        } else {
            CheckpointPlan::without_prompt(self.kv_len)
        };
    }

    /// Returns the purpose of a checkpoint after the last decode, if one is due. `in_answer` is true if the answer gets
    /// checkpoints.
    pub fn take_due_checkpoint(&mut self, in_answer: bool) -> Option<CheckpointPurpose> {
        self.checkpoints.take_due(self.kv_len, in_answer.then_some(self.prompt_len))
    }

    /// Returns true if the context was full.
    pub fn is_truncated(&self) -> bool {
        self.evictions.was_full()
    }

    /// Returns the number of evicted tokens, and the evicted messages.
    pub fn evicted(&self) -> (usize, &[EvictedMessage]) {
        (self.evictions.tokens(), self.evictions.messages())
    }

    /// Takes the evictions that no event has recorded yet.
    pub fn take_unreported_eviction(&mut self) -> Option<Box<Eviction>> {
        self.evictions.take_unreported()
    }

    /// Sets the history of the slot, replaces the prompt with its alignment to that history, and evicts messages if the
    /// prompt does not fit.
    pub fn fit_prompt(&mut self, aligned: Option<Alignment>, history: SlotHistory) {
        self.unchanged = 0;
        let original = aligned.map(|Alignment { tokens, spans, omitted }| {
            if !omitted.is_empty() {
                let messages = conversation::evicted_messages(&self.tokens, &self.spans, &omitted, &self.vocabulary);
                self.evictions.omit(&omitted, messages);
            }
            (std::mem::replace(&mut self.tokens, tokens), std::mem::replace(&mut self.spans, spans))
        });
        self.history = history;
        self.prompt_len = self.tokens.len();
        if self.tokens.len() >= self.limit.context
            && !self.limit.is_filled_by(self.tokens.len())
            && self.make_room(1).is_err()
            && let Some(original) = original
        {
            // The prompt may only be too long because of restored reasoning.
            (self.tokens, self.spans) = original;
            self.history = SlotHistory::default();
            self.evictions = Evictions::default();
            self.prompt_len = self.tokens.len();
            // Submission has checked that the original prompt can be made to fit.
            let _ = self.make_room(1);
        }
        self.initial_prompt_len = self.prompt_len;
    }

    /// Evicts tokens if necessary so that `more` tokens can follow. Returns true if it evicted any.
    ///
    /// # Errors
    /// Not enough tokens can be evicted; the message gives the reason.
    pub fn make_room(&mut self, more: usize) -> Result<bool, String> {
        let (len, context) = (self.tokens.len(), self.limit.context);
        if len + more <= context {
            return Ok(false);
        }
        let max = context.saturating_sub(more);
        self.evictions.set_full();
        match self.limit.overflow {
            Overflow::Stop => Err(format!("the context of {context} tokens is full")),
            Overflow::Shift { keep, discard } => {
                let special = self.vocabulary.special();
                let bos = usize::from(special.add_bos && self.tokens.first().copied() == special.bos);
                let keep = keep
                    .map_or(self.prompt_len, |keep| keep.saturating_add(bos))
                    .min(context.saturating_sub(4))
                    .min(len - 1);
                // An image is kept or dropped as a whole, because its embeddings are decoded together.
                let keep = self.outside_image(keep);
                let left = len - keep;
                // As in llama-server, half of the tokens in the KV cache, which does not hold the last one yet.
                let requested =
                    if discard == 0 { left.saturating_sub(1) / 2 } else { discard.min(left.saturating_sub(1)) };
                let discard = requested.max(len - max);
                let discard = self.outside_image(keep + discard) - keep;
                if discard >= left {
                    return Err(format!("the context of {context} tokens is full, and {keep} of them must be kept"));
                }
                let ranges = vec![keep..keep + discard];
                self.history.remove_ranges(&ranges);
                self.remove_ranges(&ranges, Vec::new());
                Ok(true)
            }
            Overflow::Evict => {
                let prompt = &self.tokens[..self.prompt_len];
                let parts = conversation::droppable_parts(prompt, &self.spans, &self.vocabulary);
                let goal = conversation::eviction_target(context).min(max);
                let Some(parts) = conversation::select_parts(parts, len, max, goal) else {
                    return Err(format!(
                        "the context of {context} tokens is full, and no message is left that can be dropped: system messages, the last user message and the last answer are kept"
                    ));
                };
                let messages = parts.iter().flat_map(|part| part.evicted_messages(prompt, &self.vocabulary)).collect();
                let ranges: Vec<Range<usize>> = parts.into_iter().map(|part| part.range).collect();
                self.history.record_dropped(&self.tokens, &self.spans, &ranges, &self.vocabulary);
                self.remove_ranges(&ranges, messages);
                Ok(true)
            }
        }
    }

    /// Returns the history for the slot, including this answer so far.
    pub fn slot_history(&self) -> SlotHistory {
        let mut history = self.history.clone();
        if self.evictions.generated() == 0 && !self.spans.is_empty() {
            history.record_answer(self.prompt_len, &self.tokens[self.prompt_len..], &self.vocabulary);
        }
        history
    }

    /// Removes ordered ranges from the sequence, and lists the removal for the KV cache.
    fn remove_ranges(&mut self, ranges: &[Range<usize>], messages: Vec<EvictedMessage>) {
        self.prompt_len = self.evictions.remove(ranges, messages, self.prompt_len);
        self.unchanged = ranges.first().map_or(self.unchanged, |range| self.unchanged.min(range.start));
        let kv_len = self.kv_len;
        let cached: Vec<Range<usize>> = ranges
            .iter()
            .filter(|range| range.start < kv_len)
            .map(|range| range.start..range.end.min(kv_len))
            .collect();
        if !cached.is_empty() {
            self.kv_removals.push(KvRemoval { kv_len, ranges: cached });
        }
        self.kv_len = shifted_index(kv_len, ranges);
        for range in ranges.iter().rev() {
            self.tokens.drain(range.clone());
        }
        self.spans = cut_spans(&self.spans, ranges);
    }
}

#[cfg(test)]
mod tests;
