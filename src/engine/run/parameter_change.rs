//! Changes of a run by its client: new parameters, and the end of the reasoning.

use super::reasoning::ReasoningTracker;
use super::{Run, RunState};
use crate::engine::output::EndReasoningOutcome;
use crate::engine::request::Limits;
use crate::events::FinishReason;
use crate::model::llama::{Sampler, SamplingParams};
use std::sync::Arc;

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
    /// Applies changed parameters from the next token on.
    pub fn apply_change(&mut self, change: ParameterChange) {
        if self.end.is_some() {
            return;
        }
        let ParameterChange { sampling, sampler, limits, note } = change;
        self.sampler.replace(sampler, &self.request.sampling, &sampling);
        self.request.sampling = sampling;
        self.budget.change_limits(&self.request.limits, &limits);
        if limits.stop != self.request.limits.stop {
            self.answer.set_stop_strings(&limits.stop);
        }
        if limits.stop_tokens != self.view.stop_tokens {
            Arc::make_mut(&mut self.view).stop_tokens.clone_from(&limits.stop_tokens);
        }
        self.request.limits = limits;
        self.parameter_changes += 1;
        // Several changes may arrive before the next event records them.
        self.note = Some(self.note.take().map_or(note.clone(), |before| format!("{before}; {note}")));
        let between_tokens = matches!(self.state, RunState::Decode { .. }) && self.forced.is_none();
        let answer_len = self.sequence.answer_len();
        if between_tokens && answer_len > 0 && self.budget.tokens_left(answer_len) == 0 {
            self.finish(FinishReason::Length);
        }
    }

    /// Ends the current reasoning, as if its budget were used up.
    pub fn end_reasoning(&mut self) -> EndReasoningOutcome {
        match self.reasoning.as_mut().map(ReasoningTracker::request_end) {
            Some(true) => EndReasoningOutcome::Ended,
            Some(false) => EndReasoningOutcome::NotReasoning,
            None => EndReasoningOutcome::NoBudget,
        }
    }
}
