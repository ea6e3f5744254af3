//! End of a run: reasons to end, and the record of the end.

use super::Output;
use super::run::{Run, RunState};
use crate::events::{Finish, FinishReason, RunEnd, RunStatus, TokenId, Usage};
use crate::model::grammar::GrammarMatcher;
use crate::model::printable;
use std::sync::Arc;

impl Run {
    /// Returns the reason and message if the run ends with the token that was just added.
    pub(super) fn end_reason(&self) -> Option<(FinishReason, Option<String>)> {
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
    pub(super) fn finish(
        &mut self,
        reason: FinishReason,
        message: Option<String>,
        tool_calls: Option<serde_json::Value>,
    ) {
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
    pub(super) fn finish_at_max_steps(&mut self) {
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
    pub(super) fn ends_generation(&self, token: TokenId) -> bool {
        self.request.limits.stop_tokens.contains(&token) || self.view.vocabulary.is_end_of_generation(token)
    }
}
