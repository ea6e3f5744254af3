//! A run in its slot: the KV state that it can reuse and leaves, its progress and its times.

use super::Run;
use crate::engine::kv::prompt::{PromptView, StateKey};
use crate::engine::kv::slots::ReleasedState;
use crate::engine::output::{Output, PromptProgress};
use crate::engine::request::Overflow;
use crate::engine::status::{SlotProgress, SlotRun};
use crate::events::EndCause;
use std::time::Duration;

impl Run {
    /// Returns the prompt and the settings that determine which KV state it can reuse.
    pub fn prompt_view(&self) -> PromptView<'_> {
        let Self { request, sequence, view, budget, .. } = self;
        PromptView {
            tokens: sequence.tokens(),
            spans: sequence.spans(),
            vocabulary: &view.vocabulary,
            max_tokens: budget.max_tokens(),
            key: StateKey { owner: request.owner.as_ref(), adapters: request.adapters.as_ref() },
            cache_prompt: request.cache_prompt,
            cache_reuse: request.cache_reuse,
            evicts: request.overflow == Overflow::Evict,
            is_truncated: sequence.is_truncated(),
            needs_cells_in_order: request.attention,
        }
    }

    /// Sets the slot of the run.
    pub fn set_slot(&mut self, slot: u32) {
        self.metrics.set_slot(slot);
    }

    /// Sets the time at which the run got its first slot to now. Returns the time that the run was queued, in
    /// microseconds.
    pub fn mark_slot(&mut self) -> u64 {
        self.timing.mark_slot()
    }

    /// Returns the time since the request, without pauses that have ended.
    pub fn active_time(&self) -> Duration {
        Duration::from_micros(self.timing.elapsed_us())
    }

    /// Adds the duration of a pause, which does not count as active time.
    pub fn add_pause(&mut self, pause: Duration) {
        self.timing.add_pause(pause);
    }

    /// Returns the progress that the status of the slot shows.
    pub fn slot_progress(&self) -> SlotProgress {
        SlotProgress {
            prompt_tokens: self.sequence.prompt_len(),
            decoded: self.prompt_decoded(),
            cached: self.sequence.cached_tokens(),
            generated: self.sequence.answer_len(),
            new_line: self.answer.text().has_new_line(self.sequence.answer_len()),
            busy: self.end.is_none(),
            parameter_changes: self.parameter_changes,
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

    /// Reports the progress of the prompt, if the client requested it.
    pub fn report_progress(&mut self) {
        if self.request.report.progress && !self.has_decoded_prompt() && self.end.is_none() {
            self.outbox.push(Output::PromptProgress(PromptProgress {
                total: self.sequence.prompt_len() as u32,
                cached: self.sequence.cached_tokens() as u32,
                processed: self.sequence.kv_len().min(self.sequence.prompt_len()) as u32,
                elapsed_us: self.timing.since_slot_us(),
            }));
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
        self.end.as_ref().is_some_and(|end| end.finish.cause == Some(EndCause::InvalidLogits))
    }
}
