//! End of a run: stop conditions, and recording of the end.

use super::{Run, RunState};
use crate::engine::output::Output;
use crate::engine::recording::Recording;
use crate::engine::request::Limits;
use crate::events::{EndCause, Finish, FinishReason, RunEnd, RunStatus, TokenId, Usage};
use crate::model::without_nul;
use std::sync::Arc;

impl Run {
    /// Returns the finish reason and a message if the run ends after the last token.
    pub(super) fn end_reason(&self) -> Option<(FinishReason, Option<String>)> {
        let last = self.sequence.last()?;
        let text = self.answer.text();
        if self.ends_generation(last) || text.is_stopped() || self.sampler.is_complete() {
            return Some((FinishReason::Stop, None));
        }
        if self.sequence.generated() >= self.max_tokens {
            return Some((FinishReason::Length, None));
        }
        let limits = &self.request.limits;
        if text.is_outdented() {
            let message = format!("a line has less than the minimum indentation of {}", limits.min_indent);
            return Some((FinishReason::Length, Some(message)));
        }
        if let (Some(max), Some(elapsed_us)) = (limits.max_time, self.timing.since_first_token_us())
            && text.has_new_line()
            && elapsed_us >= max.as_micros() as u64
        {
            let message = format!("the time limit of {} ms was reached", max.as_millis());
            return Some((FinishReason::Length, Some(message)));
        }
        None
    }

    /// Ends the run.
    pub(super) fn finish(
        &mut self,
        reason: FinishReason,
        message: Option<String>,
        tool_calls: Option<serde_json::Value>,
    ) {
        self.send_remaining();
        let generated = self.sequence.generated();
        let ends_hidden = generated > 0 && self.sequence.last().is_some_and(|token| self.ends_generation(token));
        let message = message.into_iter().chain(self.dispatch.disabled()).reduce(|all, next| all + "; " + &next);
        // A run without a slot was only queued.
        let worked_us = if self.metrics.slot.get().is_some() { self.timing.since_slot_us() } else { 0 };
        let prompt_us = self.timing.prompt_us().unwrap_or(worked_us);
        let (evicted_tokens, evicted) = self.sequence.evicted();
        let text = self.answer.text();
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
                stop_string: (reason == FinishReason::Stop).then(|| text.stopped_by()).flatten(),
                text: without_nul(text.text()),
                tool_calls,
                fault: self.fault,
                cause: self.cause,
                usage: Usage {
                    prompt_tokens: self.sequence.prompt_tokens() as u32,
                    cached_tokens: self.sequence.cached_tokens() as u32,
                    completion_tokens: (generated - usize::from(ends_hidden)) as u32,
                },
                first_token_us: self.timing.first_token_us(),
                prompt_decoded: self.prompt_decoded() as u32,
                prompt_us,
                generation_us: worked_us.saturating_sub(prompt_us),
                truncated: self.sequence.is_truncated(),
                evicted_tokens: evicted_tokens as u32,
                evicted: evicted.to_vec(),
                drafts: self.drafts,
            },
        });
        self.dispatch.finish();
        // The client may reuse the id when it has received the end.
        self.registration.release_id();
        self.outbox.mark_last(reason);
        self.outbox.push(Output::Ended(Arc::clone(&end)));
        self.end = Some(end);
        self.state = RunState::Ended;
    }

    /// Returns the last step that the run can reach: the maximum of steps, or the last one in which the answer can
    /// become longer than it was. Without a limit of tokens, only the latter stops a mod that backtracks endlessly.
    pub(super) fn last_step(&self) -> u32 {
        let without_growth = Limits::new(self.sequence.context() as u32).max_steps;
        self.max_steps.min(self.longest.1.saturating_add(without_growth))
    }

    /// Ends a run that reached its last step.
    pub(super) fn finish_at_last_step(&mut self) {
        let (generated, (longest, since)) = (self.sequence.generated(), self.longest);
        let reached = if self.step >= self.max_steps {
            format!("the limit of {} steps was reached with {generated} tokens in the answer", self.max_steps)
        } else {
            let steps = self.step - since;
            format!("the answer did not exceed {longest} tokens in the last {steps} steps, and has {generated} now")
        };
        self.finish(FinishReason::Length, Some(reached + "; a mod may backtrack endlessly"), None);
    }

    /// Ends the run for an external reason: the client disconnected or stopped it, the server shuts down, or the model
    /// failed.
    pub fn abort(&mut self, cause: EndCause, message: impl Into<String>) {
        if self.end.is_none() {
            if let Some(forced) = self.forced.take() {
                // No event has recorded these tokens.
                self.sequence.retract(self.sequence.len() - forced.start);
            }
            self.cause = Some(cause);
            self.finish(cause.finish_reason(), Some(message.into()), None);
        }
    }

    /// Returns true if the token ends the run. With `ignore_eos`, end-of-generation tokens are never sampled, but those
    /// that a mod forces still end the run.
    pub(super) fn ends_generation(&self, token: TokenId) -> bool {
        self.request.limits.stop_tokens.contains(&token) || self.view.vocabulary.is_end_of_generation(token)
    }

    /// Sends the run's events to the recorder: those that are due, or `everything`.
    pub fn record(&mut self, recording: &mut Recording, everything: bool) {
        let items = if everything { Some(self.event_buffer.take_all()) } else { self.event_buffer.take_due() };
        if let Some(items) = items {
            recording.send_items(self.id, items);
        }
        for (order, captured) in self.attention.take_ready() {
            if self.event_buffer.is_recorded() {
                let stored = self.attention.stored_heads(&self.request.stored_heads, &captured);
                recording.send_attention_row(self.id, order, captured, stored);
            }
        }
    }

    /// Sends the last events and the end of the run to the recorder.
    pub fn record_end(mut self, recording: &mut Recording) {
        if self.event_buffer.is_recorded() {
            self.record(recording, true);
            if let Some(end) = self.end {
                recording.send_end(self.id, end, self.request.attention);
            }
        }
        self.registration.end();
    }
}
