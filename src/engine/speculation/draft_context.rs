//! Drafts from a draft model: its llama context, with one sequence per slot.
//!
//! The context is not notified of changes to its runs. Each call passes all tokens of a run; their common prefix with
//! the KV cache is kept, and the rest is removed. So removed tokens, forced tokens, a shifted context and the next run
//! of a slot need no special treatment.

use crate::engine::options::DraftModel;
use crate::events::TokenId;
use crate::model::llama::{AttentionCapture, Context, ContextOptions, TokenOutputs};
use crate::model::{Model, ModelError, Vocabulary, common_prefix};
use std::sync::Arc;

/// Maximum tokens of a run that the first step of a draft decodes. A run with more catches up first.
pub const MAX_STEP_TOKENS: usize = 4;
/// Number of most probable tokens over which probabilities are normalized, as in llama.cpp.
const CANDIDATES: usize = 10;

/// A draft model's context.
pub struct DraftContext<'model> {
    context: Context<'model>,
    /// Tokens of each slot in the KV cache.
    sequences: Vec<Vec<TokenId>>,
    vocabulary: Arc<Vocabulary>,
    /// Number of tokens that the vocabularies of both models have.
    known_tokens: usize,
    ubatch_size: usize,
}

/// A run that needs a draft.
pub struct DraftRequest<'run> {
    /// Slot of the run.
    pub slot: usize,
    /// All tokens of the run.
    pub tokens: &'run [TokenId],
    /// Maximum tokens of the draft; at least 1.
    pub max: usize,
    /// Minimum probability of each token.
    pub min_probability: f32,
}

/// A run with tokens that the model must decode before it can draft.
pub struct CatchUpPart<'run> {
    /// Slot of the run.
    pub slot: usize,
    /// All tokens of the run.
    pub tokens: &'run [TokenId],
    /// Number of missing tokens to decode.
    pub count: usize,
}

/// A draft of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Draft {
    /// The drafted tokens.
    pub tokens: Vec<TokenId>,
    /// Number of decodes for the draft.
    pub steps: usize,
}

/// Sizes and threads of the main model's context.
#[derive(Debug, Clone, Copy)]
pub struct MainContextSettings {
    /// Context size of each slot, in tokens.
    pub ctx_size: u32,
    /// Number of slots.
    pub parallel: u32,
    /// Maximum tokens in one physical batch.
    pub ubatch_size: u32,
    /// Threads that decode generated tokens.
    pub threads: i32,
    /// Threads that decode prompts.
    pub threads_batch: i32,
}

impl<'model> DraftContext<'model> {
    /// Creates the context of a draft model. It shares the threads of `context`, the main model's context, if these
    /// suffice.
    ///
    /// # Errors
    /// [`ModelError::Draft`]: the models are incompatible, or llama.cpp could not create the context.
    pub fn new(
        draft: &'model DraftModel,
        main: &Model,
        settings: MainContextSettings,
        context: &Context<'_>,
    ) -> Result<Self, ModelError> {
        let model = &draft.model;
        main.check_draft(model)?;
        let (threads, threads_batch) =
            (draft.threads.unwrap_or(settings.threads), draft.threads_batch.unwrap_or(settings.threads_batch));
        let has_enough_threads = threads.max(threads_batch) <= settings.threads.max(settings.threads_batch);
        let options = ContextOptions {
            context_per_sequence: settings.ctx_size,
            sequences: settings.parallel,
            batch_size: settings.ubatch_size.max(settings.parallel * MAX_STEP_TOKENS as u32),
            ubatch_size: settings.ubatch_size,
            threads,
            threads_batch,
            attention: AttentionCapture::Off,
            cache_type_k: draft.cache_type_k,
            cache_type_v: draft.cache_type_v,
            checkpoint_bytes: 0,
        };
        let draft_context =
            model.context(&options, has_enough_threads.then_some(context)).map_err(|error| model.draft_error(error))?;
        if !draft_context.are_all_prefixes_usable() {
            let reason = "it has recurrent layers or an attention window, so rejected tokens cannot be removed from its \
                          state; use a model without them";
            return Err(model.draft_error(reason));
        }
        Ok(Self {
            context: draft_context,
            sequences: vec![Vec::new(); settings.parallel as usize],
            vocabulary: Arc::clone(model.vocabulary()),
            known_tokens: model.vocabulary().len().min(main.vocabulary().len()),
            ubatch_size: settings.ubatch_size as usize,
        })
    }

    /// Returns the maximum tokens of a call of [`DraftContext::catch_up`].
    pub fn max_catch_up(&self) -> usize {
        self.ubatch_size
    }

    /// Returns the number of tokens that the model must decode before it can draft; at least 1, because the logits
    /// after the last token are needed. Returns `None` if the model lacks one of these tokens.
    pub fn missing(&self, slot: usize, tokens: &[TokenId]) -> Option<usize> {
        let missing = &tokens[self.kept(slot, tokens)..];
        let is_known = |&token: &TokenId| usize::try_from(token).is_ok_and(|index| index < self.known_tokens);
        (!missing.is_empty() && missing.iter().all(is_known)).then_some(missing.len())
    }

    /// Returns the number of tokens in the KV cache that are kept for these tokens of a run.
    fn kept(&self, slot: usize, tokens: &[TokenId]) -> usize {
        common_prefix(&self.sequences[slot], tokens).min(tokens.len().saturating_sub(1))
    }

    /// Decodes the next missing tokens of runs, in one decode. Their counts must add up to at most
    /// [`DraftContext::max_catch_up`].
    ///
    /// # Errors
    /// llama.cpp could not decode; the context is then unusable.
    pub fn catch_up(&mut self, parts: &[CatchUpPart<'_>]) -> Result<(), ModelError> {
        let mut last = None;
        for &CatchUpPart { slot, tokens, count } in parts {
            last = Some(self.add(slot, tokens, count)?);
        }
        self.context.decode()?;
        // Reading logits waits for the GPU to finish, so that the caller can measure the time.
        if let Some(index) = last {
            let _ = self.context.logits(index);
        }
        Ok(())
    }

    /// Drafts the most probable next tokens of runs. The runs share the decodes.
    ///
    /// # Errors
    /// llama.cpp could not decode; the context is then unusable.
    pub fn draft(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ModelError> {
        let mut drafts = vec![Draft::default(); requests.len()];
        // Requests that are not complete, with the indexes of their logits.
        let mut active = Vec::new();
        for (at, request) in requests.iter().enumerate() {
            active.push((at, self.add(request.slot, request.tokens, request.tokens.len())?));
        }
        while !active.is_empty() {
            self.context.decode()?;
            let mut next = Vec::new();
            for (at, index) in active {
                let (request, draft) = (&requests[at], &mut drafts[at]);
                draft.steps += 1;
                let Some(token) = self.next_token(index, request.min_probability) else { continue };
                draft.tokens.push(token);
                if draft.tokens.len() < request.max {
                    next.push((at, token));
                }
            }
            active = Vec::new();
            for (at, token) in next {
                active.push((at, self.push(requests[at].slot, token, true)?));
            }
        }
        Ok(drafts)
    }

    /// Returns the most probable token after the token at `index` of the last decode. Returns `None` if it is not
    /// probable enough, ends the generation, or is unknown to the main model.
    fn next_token(&self, index: usize, min_probability: f32) -> Option<TokenId> {
        let (token, probability) = most_probable(self.context.logits(index))?;
        let is_usable = probability >= min_probability
            && (token as usize) < self.known_tokens
            && !self.vocabulary.is_end_of_generation(token);
        is_usable.then_some(token)
    }

    /// Adds up to `count` tokens of a run that the KV cache lacks to the batch, and removes all tokens from the KV
    /// cache that differ from the run's. Returns the batch index of the last added token, whose logits are requested.
    fn add(&mut self, slot: usize, tokens: &[TokenId], count: usize) -> Result<usize, ModelError> {
        let mut kept = self.kept(slot, tokens);
        if kept < self.sequences[slot].len() {
            kept = kept.min(self.context.truncate(slot as i32, kept as u32) as usize);
            self.sequences[slot].truncate(kept);
        }
        let end = tokens.len().min(kept + count);
        let mut index = 0;
        for (position, &token) in tokens.iter().enumerate().take(end).skip(kept) {
            index = self.push(slot, token, position + 1 == end)?;
        }
        Ok(index)
    }

    fn push(&mut self, slot: usize, token: TokenId, output: bool) -> Result<usize, ModelError> {
        let sequence = &mut self.sequences[slot];
        let outputs = TokenOutputs { logits: output, ..TokenOutputs::default() };
        let index = self.context.add(token, sequence.len() as u32, slot as i32, outputs)?;
        sequence.push(token);
        Ok(index)
    }

    /// Parks the threads until the next decode.
    pub fn park_threads(&self) {
        self.context.park_threads();
    }
}

/// Returns the most probable token and its probability among the most probable tokens; `None` if the logits are not
/// numbers.
fn most_probable(logits: &[f32]) -> Option<(TokenId, f32)> {
    // The largest logits, in descending order.
    let mut top = [f32::NEG_INFINITY; CANDIDATES];
    let mut best = 0;
    for (index, &logit) in logits.iter().enumerate() {
        if logit > top[CANDIDATES - 1] {
            let at = top.partition_point(|&other| other >= logit);
            top.copy_within(at..CANDIDATES - 1, at + 1);
            top[at] = logit;
            if at == 0 {
                best = index;
            }
        }
    }
    let sum: f32 = top.iter().map(|logit| (logit - top[0]).exp()).sum();
    sum.is_finite().then(|| (best as TokenId, 1.0 / sum))
}

#[cfg(test)]
mod tests {
    use super::most_probable;

    #[test]
    fn most_probable_token_has_its_share_of_the_ten_largest_logits() {
        let mut logits = vec![-3.0; 30];
        logits[17] = 2.0;
        logits[4] = 1.0;
        let (token, probability) = most_probable(&logits).unwrap();
        let expected = 1.0 / (1.0 + (-1.0_f32).exp() + 8.0 * (-5.0_f32).exp());
        assert!(token == 17 && (probability - expected).abs() < 1e-6, "{token} {probability}");
        assert_eq!(most_probable(&[1.0, 1.0]), Some((0, 0.5)), "the first of equal logits");
        assert_eq!(most_probable(&[f32::NAN, f32::NAN]), None);
        assert_eq!(most_probable(&[]), None);
    }
}
