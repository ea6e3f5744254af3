//! Methods of a run for the scheduler: next decode, KV state, outputs, progress, and changes by the client.

use super::outbox::Outbox;
use super::reasoning::ReasoningTracker;
use super::sequence::Sequence;
use super::{Run, RunState};
use crate::engine::captures::TokenCaptures;
use crate::engine::kv::prompt::{PromptView, StateKey};
use crate::engine::kv::slots::ReleasedState;
use crate::engine::output::{EndReasoningOutcome, Output, PromptProgress, RunMetrics};
use crate::engine::request::{Limits, Overflow, Request};
use crate::engine::status::{SlotProgress, SlotRun};
use crate::events::{FinishReason, RunEnd, RunId, TokenId};
use crate::model::llama::{CheckpointPurpose, EmbeddingRows, LayerSet, Sampler, SamplingParams, TokenOutputs};
use crate::mods::ModInstance;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Maximum rows of logits in one decode of a run, each with a value per token of the vocabulary.
const MAX_LOGIT_ROWS: usize = 256;

/// Maximum attention rows in one decode of a run, each with a value per layer, head and position.
const MAX_ATTENTION_ROWS: usize = 4;

/// New parameters of a run.
pub struct ParameterChange {
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Sampler with these parameters.
    pub sampler: Sampler,
    /// Limits and stop conditions.
    pub limits: Limits,
    /// Description of the change, for the trace.
    pub note: String,
}

impl Run {
    /// Returns the id.
    pub fn id(&self) -> RunId {
        self.id
    }

    /// Returns the request. Its prompt and spans were moved to [`Run::sequence`].
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Returns the sequence.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Returns the sequence, for updates of its KV state.
    pub fn sequence_mut(&mut self) -> &mut Sequence {
        &mut self.sequence
    }

    /// Returns the outputs for the client.
    pub fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }

    /// Returns true if the outbox has outputs.
    pub fn has_outputs(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Returns the flag that is set before the client receives the end of the run.
    pub fn ended_flag(&self) -> Arc<AtomicBool> {
        self.outbox.ended_flag()
    }

    /// Returns the metrics that are known before the run ends.
    pub fn metrics(&self) -> &Arc<RunMetrics> {
        &self.metrics
    }

    /// Returns the end of the run, once it has ended.
    pub fn end(&self) -> Option<&Arc<RunEnd>> {
        self.end.as_ref()
    }

    /// Returns true after the prompt was decoded.
    pub fn has_decoded_prompt(&self) -> bool {
        self.timing.prompt_us().is_some()
    }

    /// Returns the time since the request, without pauses that have ended.
    pub fn active_time(&self) -> Duration {
        Duration::from_micros(self.timing.elapsed_us())
    }

    /// Adds the duration of a pause, which does not count as active time.
    pub fn add_pause(&mut self, pause: Duration) {
        self.timing.add_pause(pause);
    }

    /// Returns the prompt and the settings that determine which KV state it can reuse.
    pub fn prompt_view(&self) -> PromptView<'_> {
        let Self { request, sequence, view, max_tokens, .. } = self;
        PromptView {
            tokens: sequence.tokens(),
            spans: sequence.spans(),
            vocabulary: &view.vocabulary,
            max_tokens: *max_tokens,
            key: StateKey { owner: request.owner.as_ref(), adapters: request.adapters.as_ref() },
            cache_prompt: request.cache_prompt,
            cache_reuse: request.cache_reuse,
            evicts: request.overflow == Overflow::Evict,
            is_truncated: sequence.is_truncated(),
            needs_cells_in_order: request.attention,
        }
    }

    /// Takes the state that the slot keeps after the run.
    pub fn take_released_state(&mut self) -> ReleasedState {
        ReleasedState {
            kv_len: self.sequence.kv_len(),
            removals: self.sequence.take_kv_removals(),
            needs_cells_in_order: self.request.attention,
            history: self.sequence.slot_history(),
            processed: self.prompt_decoded(),
        }
    }

    /// Returns true if the model returned logits that were NaN or infinite. The slot's state must then not be reused.
    pub fn has_invalid_logits(&self) -> bool {
        self.invalid_logits
    }

    /// Returns true unless a step that needs the slot is in progress: a decode of forced tokens or of prompt
    /// probabilities.
    pub fn is_between_tokens(&self) -> bool {
        self.forced.is_none() && self.prompt_probabilities.is_empty()
    }

    /// Returns true if the run is a fork that has not started.
    pub fn is_fork(&self) -> bool {
        self.fork_tokens.is_some()
    }

    /// Sets the first slot of the run. Returns the time that the run was queued, in microseconds.
    pub fn assign_slot(&mut self, slot: u32) -> u64 {
        // `set` cannot fail: only the first slot of a run is passed here.
        let _ = self.metrics.slot.set(slot);
        self.timing.mark_slot()
    }

    /// Reports the progress of the prompt, if the client requested it.
    pub fn report_progress(&mut self) {
        if self.request.report.progress && !self.has_decoded_prompt() && self.end.is_none() {
            self.outbox.push(Output::Progress(PromptProgress {
                total: self.sequence.prompt_len() as u32,
                cached: self.sequence.cached_tokens() as u32,
                processed: self.sequence.kv_len().min(self.sequence.prompt_len()) as u32,
                elapsed_us: self.timing.since_slot_us(),
            }));
        }
    }

    /// Returns the maximum number of tokens for the next decode. Its rows of logits and attention are limited.
    pub fn max_decode_len(&self) -> usize {
        let mut len = match self.next_embeddings() {
            Some(rows) => self.sequence.decode_len().min(rows.count()),
            None => self.sequence.text_decode_len(),
        };
        let kv_len = self.sequence.kv_len();
        let outputs_from = self.logits_from().unwrap_or(kv_len);
        len = len.min(outputs_from.saturating_sub(kv_len) + MAX_LOGIT_ROWS);
        if self.request.report.attention_rows {
            let rows_from = outputs_from.max(self.sequence.prompt_len().saturating_sub(1));
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

    /// Returns the maximum number of tokens to draft for the next decode: as many as the answer has room for. Returns 0
    /// unless the run decodes a single generated token.
    pub fn max_draft(&self) -> usize {
        if !self.has_decoded_prompt() || self.forced.is_some() || self.sequence.decode_len() != 1 {
            return 0;
        }
        let left = self.max_tokens.saturating_sub(self.sequence.generated());
        left.saturating_sub(1).min(self.sequence.room())
    }

    /// Returns true if `token` at `position` is the next token that the run must decode, so that logits after a drafted
    /// token there are valid.
    pub fn continues_with(&self, position: usize, token: TokenId) -> bool {
        self.needs_decode()
            && self.sequence.kv_len() == position
            && self.sequence.tokens().get(position) == Some(&token)
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

    /// Sets the token that was drafted for the next step, before its logits are passed.
    pub fn set_drafted(&mut self, token: Option<TokenId>) {
        self.step_logits.set_drafted(token);
    }

    /// Plans the checkpoints of the state.
    pub fn plan_checkpoints(&mut self, outputs_from: usize) {
        // Later requests and mods that backtrack can return to a checkpoint in the prompt.
        let in_prompt = self.request.cache_prompt || !self.dispatch.is_empty();
        self.sequence.plan_checkpoints(outputs_from, in_prompt);
    }

    /// Returns the purpose of a checkpoint after the last decode, if one is due.
    pub fn take_due_checkpoint(&mut self) -> Option<CheckpointPurpose> {
        self.sequence.take_due_checkpoint(!self.dispatch.is_empty())
    }

    /// Returns what the decode of the token at `position` gives; `logits` is true if its logits are needed.
    pub fn token_outputs(&self, position: usize, logits: bool) -> TokenOutputs {
        let len = self.sequence.len();
        // Only the logits at the end of the sequence begin a step.
        let begins_step = logits && position + 1 == len;
        TokenOutputs {
            logits,
            attention: self.attention.captures(position, logits, len, self.sequence.prompt_len()),
            lens: self.request.lens && begins_step,
            hidden_states: if begins_step { self.dispatch.hidden_layers() } else { LayerSet::default() },
        }
    }

    /// Returns what the decode of a drafted token gives.
    pub fn draft_outputs(&self) -> TokenOutputs {
        let Request { attention, lens, .. } = self.request;
        TokenOutputs { logits: true, attention, lens, hidden_states: self.dispatch.hidden_layers() }
    }

    /// Returns the progress that the status of the slot shows.
    pub fn slot_progress(&self) -> SlotProgress {
        SlotProgress {
            prompt_tokens: self.sequence.prompt_len(),
            processed: self.prompt_decoded(),
            cached: self.sequence.cached_tokens(),
            generated: self.sequence.generated(),
            new_line: self.answer.text().has_new_line(),
            busy: self.end.is_none(),
        }
    }

    /// Returns the parameters that the status of the slot shows.
    pub fn slot_run(&self) -> SlotRun {
        SlotRun {
            run_id: self.id,
            owner: self.request.owner.clone(),
            sampling: self.request.sampling.clone(),
            limits: self.request.limits.clone(),
            adapters: self.request.adapters.clone().unwrap_or_default(),
        }
    }

    /// Returns the position from which the run needs logits, if it needs a decode.
    pub fn logits_from(&self) -> Option<usize> {
        match self.state {
            RunState::Decode { outputs_from } => Some(outputs_from),
            _ => None,
        }
    }

    /// Returns true if the run needs a decode.
    pub fn needs_decode(&self) -> bool {
        self.logits_from().is_some()
    }

    /// Returns the mod whose reply the run waits for.
    pub fn awaited_mod(&mut self) -> Option<&mut dyn ModInstance> {
        let RunState::AwaitingReply(_, index) = self.state else { return None };
        self.dispatch.instance(index)
    }

    /// Sets what was captured with the next logits, before these are passed.
    pub fn set_captures(&mut self, captures: TokenCaptures) {
        if let Some(row) = captures.attention {
            self.attention.set_current(row);
        }
        self.step_logits.set_hidden_states(captures.hidden_states);
    }

    /// Ends the current reasoning, as if its budget were used up.
    pub fn end_reasoning(&mut self) -> EndReasoningOutcome {
        match self.reasoning.as_mut().map(ReasoningTracker::request_end) {
            Some(true) => EndReasoningOutcome::Ended,
            Some(false) => EndReasoningOutcome::NotReasoning,
            None => EndReasoningOutcome::NoBudget,
        }
    }

    /// Applies changed parameters from the next token on.
    pub fn apply_change(&mut self, change: ParameterChange) {
        if self.end.is_some() {
            return;
        }
        let ParameterChange { sampling, sampler, limits, note } = change;
        self.sampler.replace(sampler, &self.request.sampling, &sampling);
        self.request.sampling = sampling;
        // A maximum that a mod has set is kept unless the client changes its own.
        if limits.max_tokens != self.request.limits.max_tokens {
            self.max_tokens = limits.max_tokens as usize;
        }
        if limits.max_steps != self.request.limits.max_steps {
            self.max_steps = limits.max_steps;
        }
        if limits.stop != self.request.limits.stop {
            self.answer.set_stop_strings(&limits.stop);
        }
        self.request.limits = limits;
        // Several changes may arrive before the next event records them.
        self.note = Some(self.note.take().map_or(note.clone(), |before| format!("{before}; {note}")));
        let between_tokens = matches!(self.state, RunState::Decode { .. }) && self.forced.is_none();
        let generated = self.sequence.generated();
        if between_tokens && generated > 0 && generated >= self.max_tokens {
            self.finish(FinishReason::Length, None, None);
        }
    }
}
