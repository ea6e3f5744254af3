//! End of a run: stop conditions and the result.

use super::{Run, RunState};
use crate::engine::output::Output;
use crate::events::{EndCause, Fault, Finish, FinishReason, RunEnd, RunStatus, Usage};
use crate::model::without_nul;
use serde_json::Value;
use std::sync::Arc;

/// Reason for which a run ends.
pub(super) struct EndReason {
    pub reason: FinishReason,
    pub message: Option<String>,
    /// Tool calls of a mod.
    pub tool_calls: Option<Value>,
    /// Origin of an error; `None` for the engine.
    pub fault: Option<Fault>,
    /// Cause of an abort.
    pub cause: Option<EndCause>,
}

impl EndReason {
    /// Creates a reason with a message.
    pub fn new(reason: FinishReason, message: impl Into<String>) -> Self {
        Self { message: Some(message.into()), ..Self::from(reason) }
    }
}

impl From<FinishReason> for EndReason {
    fn from(reason: FinishReason) -> Self {
        Self { reason, message: None, tool_calls: None, fault: None, cause: None }
    }
}

impl Run {
    /// Returns the reason for which the run ends after the last token; `None` if it continues.
    pub(super) fn end_reason(&self) -> Option<EndReason> {
        let last = self.sequence.last()?;
        let text = self.answer.text();
        let kept = self.dispatch.kept_tokens(self.sequence.answer_len());
        if self.view.ends_answer(last) || text.is_stopped(kept) || self.sampler.is_complete() {
            return Some(FinishReason::Stop.into());
        }
        if self.budget.tokens_left(self.sequence.answer_len()) == 0 {
            return Some(self.max_tokens_reason());
        }
        let limits = &self.request.limits;
        if text.is_outdented(kept) {
            let message = format!("a line has less than the minimum indentation of {}", limits.min_indent);
            return Some(EndReason::new(FinishReason::Length, message));
        }
        if let (Some(max), Some(elapsed_us)) = (limits.max_time, self.timing.since_first_token_us())
            && text.has_new_line(kept)
            && elapsed_us >= max.as_micros() as u64
        {
            let message = format!("the time limit of {} ms was reached", max.as_millis());
            return Some(EndReason::new(FinishReason::Length, message));
        }
        None
    }

    /// Returns the reason for an end at the maximum of tokens. A maximum that a mod or the context has set is named,
    /// because the client does not know it.
    pub(super) fn max_tokens_reason(&self) -> EndReason {
        let (max, limits) = (self.budget.max_tokens(), &self.request.limits);
        let message = if max != limits.max_tokens as usize {
            format!("a mod has set the limit of {max} tokens, which is reached")
        } else if self.sequence.room() == 0 && limits.requested_max_tokens != Some(limits.max_tokens) {
            format!("the context of {} tokens is full", self.sequence.context())
        } else {
            return FinishReason::Length.into();
        };
        EndReason::new(FinishReason::Length, message)
    }

    /// Ends the run. Tokens whose removal a mod has announced are not part of the answer.
    pub(super) fn finish(&mut self, end_reason: impl Into<EndReason>) {
        self.discard_after(self.dispatch.kept_tokens(self.sequence.answer_len()));
        self.finish_with_all_tokens(end_reason);
    }

    /// Removes the tokens after the first `kept` from the answer, except for those that were released, and records that.
    pub(super) fn discard_after(&mut self, kept: usize) {
        let discarded = self.answer.discard_after(kept, &mut self.outbox);
        self.attention.truncate(self.answer.unreleased());
        if discarded > 0 {
            self.record_discard(discarded);
        }
    }

    /// Ends the run. All its tokens are part of the answer.
    pub(super) fn finish_with_all_tokens(&mut self, end_reason: impl Into<EndReason>) {
        let EndReason { reason, message, tool_calls, fault, cause } = end_reason.into();
        self.release_remaining();
        if self.answer.unreleased() > 0 {
            // Set by an earlier end if the run had already ended.
            let _ = self.metrics.tokens_after_text.set(self.answer.unreleased_ids().collect());
        }
        let _ = self.metrics.kv_len.set(self.sequence.kv_len() as u32);
        let generated = self.sequence.answer_len();
        let ends_hidden = generated > 0 && self.sequence.last().is_some_and(|token| self.view.ends_answer(token));
        let message = message.into_iter().chain(self.dispatch.disabled()).reduce(|all, next| all + "; " + &next);
        // A run without a slot was only queued.
        let worked_us = if self.metrics.slot().is_some() { self.timing.since_slot_us() } else { 0 };
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
                fault,
                cause,
                usage: Usage {
                    prompt_tokens: self.sequence.initial_prompt_len() as u32,
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
                mod_failures: self.dispatch.failures(),
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

    /// Ends a run that may not reach its next step.
    pub(super) fn finish_at_last_step(&mut self) {
        let message = self.budget.exhausted_message(self.sequence.answer_len());
        self.finish(EndReason::new(FinishReason::Length, message));
    }

    /// Ends the run for an external reason: the client disconnected or stopped it, the server shuts down, or the model
    /// failed.
    pub fn abort(&mut self, cause: EndCause, message: impl Into<String>) {
        if self.end.is_none() {
            if let Some(forced) = self.forced.take() {
                // No event has recorded these tokens.
                self.sequence.retract(self.sequence.len() - forced.start);
            }
            self.finish(EndReason { cause: Some(cause), ..EndReason::new(cause.finish_reason(), message) });
        }
    }
}
