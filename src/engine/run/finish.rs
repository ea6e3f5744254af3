//! End of a run: reasons to end, and the record of the end.

use crate::engine::output::{EndReasoning, Output};
use crate::engine::recording::Recording;
use crate::engine::request::Limits;
use crate::engine::run::reasoning::ReasoningTracker;
use crate::engine::run::{Run, RunState};
use crate::events::{Finish, FinishReason, RunEnd, RunStatus, TokenId, Usage};
use crate::model::grammar::GrammarMatcher;
use crate::model::llama::{Sampler, SamplingParams};
use crate::model::printable;
use std::sync::Arc;

impl Run {
    /// Returns the reason and message if the run ends with the token that was just added.
    pub fn end_reason(&self) -> Option<(FinishReason, Option<String>)> {
        let last = *self.sequence.last()?;
        if self.ends_generation(last) || self.output_text.stopped_by().is_some() {
            return Some((FinishReason::Stop, None));
        }
        if self.constraint.as_ref().is_some_and(GrammarMatcher::is_complete) {
            return Some((FinishReason::Stop, None));
        }
        if self.generated() >= self.max_tokens {
            return Some((FinishReason::Length, None));
        }
        if self.output_text.is_outdented() {
            let message = format!("a line has less than the minimum indentation of {}", self.request.limits.min_indent);
            return Some((FinishReason::Length, Some(message)));
        }
        if let (Some(most), Some(first)) = (self.request.limits.max_time, self.first_token_us)
            && self.has_new_line()
            && self.elapsed_us().saturating_sub(first) >= most.as_micros() as u64
        {
            return Some((
                FinishReason::Length,
                Some(format!("the time limit of {} ms was reached", most.as_millis())),
            ));
        }
        None
    }

    /// Ends the run.
    pub fn finish(&mut self, reason: FinishReason, message: Option<String>, tool_calls: Option<serde_json::Value>) {
        if self.request.report.per_token {
            self.send_last_tokens();
        } else {
            let rest = self.output_text.take_remaining();
            self.send(rest);
        }
        let ends_hidden =
            self.sequence.last().is_some_and(|&token| self.generated() > 0 && self.ends_generation(token));
        let switched_off = self.mods.iter().filter_map(|active| active.health.off.clone());
        let message = message.into_iter().chain(switched_off).reduce(|all, next| all + "; " + &next);
        // Without a slot the run was only queued.
        let worked_us =
            if self.metrics.slot.get().is_some() { self.elapsed_us().saturating_sub(self.slot_us) } else { 0 };
        let prompt_us = self.prompt_us.unwrap_or(worked_us);
        let end = Arc::new(RunEnd {
            completed_at: self.event_buffer.now(),
            status: match reason {
                FinishReason::Stop | FinishReason::Length | FinishReason::ToolCalls => RunStatus::Done,
                FinishReason::Cancelled => RunStatus::Cancelled,
                FinishReason::Error => RunStatus::Failed,
            },
            finish: Finish {
                reason,
                message,
                stop_string: (reason == FinishReason::Stop).then(|| self.output_text.stopped_by()).flatten(),
                text: printable(self.output_text.text()),
                tool_calls,
                fault: self.fault,
                usage: Usage {
                    prompt_tokens: self.prompt_tokens as u32,
                    cached_tokens: self.cached_tokens as u32,
                    completion_tokens: (self.generated() - usize::from(ends_hidden)) as u32,
                },
                first_token_us: self.first_token_us,
                prompt_decoded: self.prompt_decoded() as u32,
                prompt_us,
                generation_us: worked_us.saturating_sub(prompt_us),
                truncated: self.evictions.truncated,
                evicted_tokens: self.evictions.tokens as u32,
                evicted: self.evictions.messages.clone(),
            },
        });
        for active in &mut self.mods {
            active.instance.finished();
        }
        // Released before the client learns of the end, since it may send the id again immediately.
        self.active_id = None;
        if let Some(Output::Text(delta)) = self.outbox.back_mut() {
            delta.last = Some(reason);
        }
        self.outbox.push_back(Output::Ended(Arc::clone(&end)));
        self.end = Some(end);
        self.state = RunState::Ended;
    }

    /// Ends a run that reached the maximum number of steps.
    pub fn finish_at_max_steps(&mut self) {
        let message = format!(
            "the limit of {} steps was reached with {} tokens in the answer; a mod may backtrack endlessly",
            self.request.limits.max_steps,
            self.generated()
        );
        self.finish(FinishReason::Length, Some(message), None);
    }

    /// Ends the run for an external reason: the client disconnected, the server shuts down, or the model failed.
    pub fn abort(&mut self, reason: FinishReason, message: String) {
        if self.end.is_none() {
            self.finish(reason, Some(message), None);
        }
    }

    /// Returns true if the token ends the run. With `ignore_eos` the model never samples its end-of-generation tokens, so
    /// one found here was forced by a mod.
    pub fn ends_generation(&self, token: TokenId) -> bool {
        self.request.limits.stop_tokens.contains(&token) || self.view.vocabulary.is_end_of_generation(token)
    }
}

/// Parameters that apply from the next token on.
pub struct ParameterChange {
    pub sampling: SamplingParams,
    pub sampler: Sampler,
    pub limits: Limits,
    pub note: String,
}

impl Run {
    /// Returns true if no step is in progress that needs the slot.
    pub fn is_between_tokens(&self) -> bool {
        self.forced.is_none() && self.prompt_measures.is_empty()
    }

    /// Ends the current reasoning, as if its budget were used up.
    pub fn end_reasoning(&mut self) -> EndReasoning {
        match self.thinking.as_mut().map(ReasoningTracker::request_end) {
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
        let ParameterChange { sampling, mut sampler, limits, note } = change;
        sampler.inherit_state(&mut self.sampler, &self.request.sampling, &sampling);
        self.sampler = sampler;
        self.request.sampling = sampling;
        // A mod may have set another maximum.
        if limits.max_tokens != self.request.limits.max_tokens {
            self.max_tokens = limits.max_tokens as usize;
        }
        if limits.stop != self.request.limits.stop {
            self.output_text.stop_at(limits.stop.iter().map(|text| text.as_bytes().to_vec()).collect());
        }
        self.request.limits = limits;
        // Several changes may arrive before the next event records them.
        self.note = Some(self.note.take().map_or(note.clone(), |before| format!("{before}; {note}")));
        let between_tokens = matches!(self.state, RunState::Decode { .. }) && self.forced.is_none();
        if between_tokens && self.generated() > 0 && self.generated() >= self.max_tokens {
            self.finish(FinishReason::Length, None, None);
        }
    }
}

impl Run {
    /// Records the collected events: those that are due, or `everything`.
    pub fn record(&mut self, recording: &mut Recording, everything: bool) {
        let items = if everything { Some(self.event_buffer.take_all()) } else { self.event_buffer.take_due() };
        if let Some(items) = items {
            recording.send_items(self.id, items);
        }
        if let Some((order, captured)) = self.attention_ready.take()
            && self.event_buffer.is_recorded()
        {
            recording.send_attention_row(self.id, order, captured);
        }
    }

    /// Records the last events and the end of the run.
    pub fn record_end(mut self, recording: &mut Recording) {
        if let Some(panic_guard) = self.panic_guard.take() {
            panic_guard.disarm();
        }
        if !self.event_buffer.is_recorded() {
            return;
        }
        self.record(recording, true);
        if let Some(end) = self.end {
            recording.send_end(self.id, end, self.request.attention);
        }
    }
}
