//! Changes of a run by its client: other parameters, and the end of the reasoning.

use super::reasoning::ReasoningTracker;
use super::{Run, RunState};
use crate::engine::output::EndReasoning;
use crate::engine::request::Limits;
use crate::events::FinishReason;
use crate::model::llama::{Sampler, SamplingParams};

/// Parameters that apply from the next token on.
pub struct ParameterChange {
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Sampler made from them.
    pub sampler: Sampler,
    /// Limits and stop conditions.
    pub limits: Limits,
    /// Description of the change, for the trace.
    pub note: String,
}

impl Run {
    /// Ends the current reasoning, as if its budget were used up.
    pub fn end_reasoning(&mut self) -> EndReasoning {
        match self.reasoning.as_mut().map(ReasoningTracker::request_end) {
            Some(true) => EndReasoning::Ended,
            Some(false) => EndReasoning::NotReasoning,
            None => EndReasoning::NoBudget,
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
        // A mod may have set another maximum.
        if limits.max_tokens != self.request.limits.max_tokens {
            self.max_tokens = limits.max_tokens as usize;
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
